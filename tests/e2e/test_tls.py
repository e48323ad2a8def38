"""Encrypted engines behind a gateway: real processes, certificates made for the test, mutual TLS."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from tests.e2e.servers import COMMAND, engine
from tests.rpc.certificates import Authority
from triptych.wire.gen import lifecycle_pb2, openengine_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 60.0


@contextmanager
def gateway(*flags: str) -> Iterator[str]:
    """``triptych gateway`` on a free port; gives its URL."""
    process = subprocess.Popen(
        [*COMMAND, "gateway", "--http", "127.0.0.1:0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
        process.stdout.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_gateway_reaches_an_engine_that_wants_to_know_it(authority: Authority) -> None:
    certificate, key = authority.issue("engine")
    own, own_key = authority.issue("gateway")
    flags = ("--tls-certificate", f"{certificate}", "--tls-key", f"{key}", "--tls-client-ca", f"{authority.path}")
    with engine("demo", *flags) as address:
        known = ("--engine-ca", f"{authority.path}", "--engine-certificate", f"{own}", "--engine-key", f"{own_key}")
        with gateway("--engine", address, *known) as url, httpx.Client(base_url=url, timeout=SECONDS) as client:
            for _ in range(100):
                if client.get("/health").status_code == 200:
                    break
            message = {"role": "user", "content": "hello"}
            answer = client.post("/v1/chat/completions", json={"model": "demo", "messages": [message]})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]
        with grpc.insecure_channel(address) as plain, pytest.raises(grpc.RpcError) as caught:
            openengine_pb2_grpc.ControlStub(plain).Health(lifecycle_pb2.HealthRequest(), timeout=5)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_an_encrypted_engine_may_listen_to_other_machines(authority: Authority) -> None:
    certificate, key = authority.issue("engine")
    with engine("demo", "--tls-certificate", f"{certificate}", "--tls-key", f"{key}", host="0.0.0.0") as address:
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
        port = address.rpartition(":")[2]
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            health = openengine_pb2_grpc.ControlStub(channel).Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)
        assert health.state == lifecycle_pb2.HEALTH_STATE_READY
