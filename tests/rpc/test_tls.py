"""Encrypted listeners: who gets in, who does not, and what is said about files that are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from tests.rpc.certificates import Authority
from tests.rpc.scripted_role import ScriptedRole, answer
from triptych.core.errors import Draining, StartupError
from triptych.core.request import GenerateRequest
from triptych.rpc.server import serve_role
from triptych.rpc.tls import TlsFiles
from triptych.wire.channel import EngineChannel
from triptych.wire.gen import lifecycle_pb2, openengine_pb2_grpc
from triptych.wire.tls import ChannelTls

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rpc.conftest import Serve

SECONDS = 20.0
REQUEST = GenerateRequest("r", "scripted", "hi")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def answered(address: str, tls: ChannelTls | None) -> bool:
    """Whether such a client is served; a refusal is Draining, which says that nobody usable is there."""
    channel = EngineChannel(address, tls)
    try:
        events = [event async for event in await channel.generate(REQUEST)]
    except Draining:
        return False
    finally:
        await channel.close()
    assert events == answer(REQUEST)
    return True


async def test_an_encrypted_listener_serves_who_trusts_it_and_nobody_in_plaintext(
    serve: Serve, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    served = await serve(tls=TlsFiles(*authority.issue("server")))
    assert await answered(served.address, ChannelTls(authority.path))
    assert not await answered(served.address, ChannelTls(other.path))
    assert not await answered(served.address, ChannelTls())
    assert not await answered(served.address, None)


async def test_a_plain_grpc_client_of_an_encrypted_listener(serve: Serve, authority: Authority) -> None:
    served = await serve(tls=TlsFiles(*authority.issue("server")))
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    async with grpc.aio.secure_channel(served.address, credentials) as channel:
        control = openengine_pb2_grpc.ControlStub(channel)
        health = await control.Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY


async def test_with_a_client_authority_clients_need_its_certificate(
    serve: Serve, authority: Authority, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    served = await serve(tls=TlsFiles(*authority.issue("server"), clients.path))
    assert await answered(served.address, ChannelTls(authority.path, *clients.issue("client")))
    assert not await answered(served.address, ChannelTls(authority.path))
    assert not await answered(served.address, ChannelTls(authority.path, *authority.issue("stranger")))
    assert served.role.requests == [REQUEST]


async def test_an_encrypted_listener_may_face_other_machines(authority: Authority) -> None:
    server = await serve_role(ScriptedRole(), "0.0.0.0", 0, tls=TlsFiles(*authority.issue("server")))
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    assert await answered(address, ChannelTls(authority.path))
    await server.stop(None)


def broken(kind: str, authority: Authority, tmp_path: Path) -> tuple[Path, Path, Path | None]:
    """Files of which one is wrong."""
    certificate, key = authority.issue("server")
    nonsense, empty = tmp_path / "nonsense", tmp_path / "empty"
    nonsense.write_bytes(b"-----BEGIN NONSENSE-----\n\xff\n")
    empty.write_bytes(b"")
    return {
        "no certificate": (tmp_path / "absent", key, None),
        "no key": (certificate, tmp_path / "absent", None),
        "no client authority": (certificate, key, tmp_path / "absent"),
        "a directory": (tmp_path, key, None),
        "certificate is nonsense": (nonsense, key, None),
        "certificate is empty": (empty, key, None),
        "certificate is a key": (key, key, None),
        "key is nonsense": (certificate, nonsense, None),
        "key is empty": (certificate, empty, None),
        "key is a certificate": (certificate, certificate, None),
        "key of another": (certificate, authority.issue("other")[1], None),
        "key with a password": (*authority.issue("locked", password=b"secret"), None),
        "client authority is nonsense": (certificate, key, nonsense),
        "client authority is a key": (certificate, key, key),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no certificate", "--tls-certificate .*absent cannot be read: No such file"),
        ("no key", "--tls-key .*absent cannot be read: No such file"),
        ("no client authority", "--tls-client-ca .*absent cannot be read: No such file"),
        ("a directory", "--tls-certificate .* cannot be read: Is a directory"),
        ("certificate is nonsense", "--tls-certificate .*nonsense holds no certificate"),
        ("certificate is empty", "--tls-certificate .*empty holds no certificate"),
        ("certificate is a key", "--tls-certificate .*server.key holds no certificate"),
        ("key is nonsense", "--tls-key .*nonsense is not usable as the private key"),
        ("key is empty", "--tls-key .*empty is not usable as the private key"),
        ("key is a certificate", "--tls-key .*server.pem is not usable as the private key"),
        ("key of another", "--tls-key .*other.key is not the key of the certificate in --tls-certificate .*server.pem"),
        ("key with a password", "--tls-key .*locked.key is protected by a password"),
        ("client authority is nonsense", "--tls-client-ca .*nonsense holds no certificate"),
        ("client authority is a key", "--tls-client-ca .*server.key holds no certificate"),
    ],
)
async def test_a_file_that_is_wrong_is_one_line_at_start_up(
    authority: Authority, tmp_path: Path, kind: str, message: str
) -> None:
    files = TlsFiles(*broken(kind, authority, tmp_path))
    with pytest.raises(StartupError, match=message) as caught:
        files.credentials()
    assert "\n" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)
    with pytest.raises(StartupError, match=message):
        await serve_role(ScriptedRole(), "127.0.0.1", 0, tls=files)


def test_flags_that_belong_together(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    assert TlsFiles.of(None, None, None) is None
    assert TlsFiles.of(certificate, key, None) == TlsFiles(certificate, key)
    assert TlsFiles.of(certificate, key, authority.path) == TlsFiles(certificate, key, authority.path)
    for given in ((certificate, None, None), (None, key, None), (None, None, authority.path)):
        with pytest.raises(StartupError, match="--tls-certificate and --tls-key go together"):
            TlsFiles.of(*given)


def test_the_client_s_files_are_checked_alike(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("client")
    with pytest.raises(StartupError, match=r"--engine-ca .*absent cannot be read"):
        EngineChannel("127.0.0.1:1", ChannelTls(tmp_path / "absent"))
    with pytest.raises(StartupError, match=r"--engine-ca .*client.key holds no certificate"):
        ChannelTls(key).credentials()
    with pytest.raises(StartupError, match=r"--engine-key .* is not the key"):
        ChannelTls(authority.path, certificate, authority.issue("other")[1]).credentials()
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(StartupError, match="--engine-certificate and --engine-key go together"):
            ChannelTls(authority.path, *pair).credentials()
