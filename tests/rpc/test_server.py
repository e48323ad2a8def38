"""Binding, refusing to bind, and stopping."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.rpc.scripted_role import ScriptedRole
from triptych.core.errors import StartupError
from triptych.core.request import GenerateRequest
from triptych.rpc.address import Address
from triptych.rpc.server import check_address, serve_role
from triptych.wire.channel import EngineChannel

SECONDS = 20.0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_port_zero_is_reported_as_the_real_one(host: str) -> None:
    server = await serve_role(ScriptedRole(), host, 0)
    name, _, port = server.address.rpartition(":")
    assert name == ("[::1]" if host == "::1" else host)
    assert int(port) > 0
    channel = EngineChannel(server.address)
    assert (await channel.get_server_info()).engine_name == "triptych"
    await channel.close()
    await server.stop(None)


async def test_a_taken_port_is_a_startup_error_that_names_it() -> None:
    server = await serve_role(ScriptedRole(), "127.0.0.1", 0)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already in use"):
        await serve_role(ScriptedRole(), "127.0.0.1", port)
    await server.stop(None)
    again = await serve_role(ScriptedRole(), "127.0.0.1", port)
    await again.stop(None)


async def test_an_address_can_be_checked_before_there_is_a_role() -> None:
    server = await serve_role(ScriptedRole(), "127.0.0.1", 0)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already in use"):
        check_address("127.0.0.1", port)
    await server.stop(None)
    check_address("127.0.0.1", port)
    again = await serve_role(ScriptedRole(), "127.0.0.1", port)  # the check holds nothing
    await again.stop(None)
    with pytest.raises(StartupError, match="--allow-plaintext"):
        check_address("0.0.0.0", port)
    check_address("0.0.0.0", port, allow_plaintext=True)


async def test_a_host_that_is_not_ours_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        await serve_role(ScriptedRole(), "192.0.2.1", 0, allow_plaintext=True)


async def test_plaintext_for_other_machines_needs_the_flag() -> None:
    with pytest.raises(StartupError, match="--allow-plaintext"):
        await serve_role(ScriptedRole(), "0.0.0.0", 0)
    server = await serve_role(ScriptedRole(), "0.0.0.0", 0, allow_plaintext=True)
    await server.stop(None)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("engine.example", False),
        ("localhost.example", False),
    ],
)
def test_what_only_this_machine_can_reach(host: str, loopback: bool) -> None:
    assert Address(host, 1).loopback is loopback


async def test_stopping_waits_for_the_cleanup_of_what_it_ends() -> None:
    role = ScriptedRole(script=lambda request: [asyncio.Event()])
    server = await serve_role(role, "127.0.0.1", 0)
    channel = EngineChannel(server.address)
    waiting = asyncio.create_task(channel.generate(GenerateRequest("r", "scripted", "hi")))
    await asyncio.wait({waiting}, timeout=0.1)
    finish = role.answers[0].closing = asyncio.Event()
    stopping = asyncio.create_task(server.stop(None))
    done, _ = await asyncio.wait({stopping}, timeout=0.1)
    assert not done
    finish.set()
    await asyncio.wait_for(stopping, SECONDS)
    assert role.live == set()
    await asyncio.gather(waiting, return_exceptions=True)
    await channel.close()


async def test_a_stopped_server_answers_nobody() -> None:
    server = await serve_role(ScriptedRole(), "127.0.0.1", 0)
    await server.stop(None)
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), 0.3)
