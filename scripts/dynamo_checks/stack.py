"""Engines, a sidecar of Dynamo's for each, and Dynamo's frontend on the loopback."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import httpx

from dynamo_checks.check import CheckFailed
from dynamo_checks.child import Child
from dynamo_checks.client import TEXT, Client
from dynamo_checks.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

START_SECONDS = 120
READY_SECONDS = 60
"""Dynamo avoids a worker for some seconds after most kinds of failure."""
LOOK_SECONDS = 0.1
LONGEST_COMPLAINT = 300
HOST = "127.0.0.1"
AGGREGATED = "aggregated"
_COMPLAINT = re.compile(r"Generate Error: (.*?)(?= otel\.|\s*$)", re.MULTILINE)


class Served(NamedTuple):
    """An engine and what stands before it."""

    role: str
    port: int
    metrics: str
    """URL of its Prometheus metrics."""


class Stack:
    """The processes and their clients, which belong to the running event loop. End it whatever happens."""

    def __init__(self, directory: Path, python: Path, model: Path, roles: Sequence[str]) -> None:
        """Start everything.

        Args:
            directory: an empty one, for logs and for what Dynamo writes.
            python: the interpreter that has Dynamo.
            model: the model's directory, by whose path clients name it.
            roles: of the engines, in the order in which a request meets them.
        """
        self.directory = directory
        self._sessions = directory / "sessions"
        self._environment = _dynamo_environment(directory)
        self._python = str(python)
        self._children: list[Child] = []
        *ports, http_port = free_ports(2 * len(roles) + 1)
        self._served = [Served(role, ports.pop(), f"http://{HOST}:{ports.pop()}/metrics") for role in roles]
        frontend = ["-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(http_port)]
        try:
            self.engines = {served.role: self._start_engine(served) for served in self._served}
            self._sidecars = [self._start_sidecar(served, model) for served in self._served]
            self._start("frontend", [self._python, *frontend], self._environment)
            self.client = Client(f"http://{HOST}:{http_port}", str(model))
            self.reference = Reference(f"{HOST}:{self._served[-1].port}", model)
        except BaseException:
            self.end()
            raise

    @property
    def engine(self) -> Child:
        """The engine that answers."""
        return self.engines[self._served[-1].role]

    def restart(self, role: str) -> None:
        """Start an engine on the port of the one that has ended."""
        served = next(served for served in self._served if served.role == role)
        self.engines[role] = self._start_engine(served)

    def restart_engine(self) -> None:
        """Start the engine that answers once more."""
        self.restart(self._served[-1].role)

    def _start_engine(self, served: Served) -> Child:
        words = ["demo", "--role", served.role, "--grpc", f"{HOST}:{served.port}"]
        words += ["--metrics", served.metrics.removeprefix("http://").removesuffix("/metrics")]
        if served.role != AGGREGATED:
            words += ["--kv-directory", str(self._sessions)]
        command = [sys.executable, "-m", "triptych.cli.main", "engine", *words]
        return self._start(f"{served.role}-engine", command, {"OMP_NUM_THREADS": "1", **os.environ})

    def _start_sidecar(self, served: Served, model: Path) -> Child:
        words = ["--grpc-endpoint", f"{HOST}:{served.port}", "--model-path", str(model)]
        if served.role != AGGREGATED:
            words += ["--disaggregation-mode", served.role]
        command = [self._python, "-m", "dynamo.trtllm.sidecar", *words]
        return self._start(f"{served.role}-sidecar", command, self._environment)

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> Child:
        child = Child(name, command, environment, self.directory / f"{name}.log")
        self._children.append(child)
        return child

    async def counter(self, role: str, name: str) -> float:
        """One number of an engine's metrics.

        Raises:
            CheckFailed: it has none of this name.
        """
        url = next(served.metrics for served in self._served if served.role == role)
        text = (await self.client.http.get(url)).text
        found = re.search(rf"^triptych_{name} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise CheckFailed(f"the {role} engine has no metric triptych_{name}")
        return float(found[1])

    def sessions(self) -> list[str]:
        """Files of sessions that lie in the directory that the engines share."""
        return [path.name for path in self._sessions.iterdir() if path.suffix != ".alive"]

    def logged(self) -> tuple[int, ...]:
        """How far the sidecars' logs have come, for ``complaint``."""
        return tuple(len(sidecar.written()) for sidecar in self._sidecars)

    async def started(self) -> float:
        """Wait until the model is listed; returns the seconds since this was asked.

        Raises:
            CheckFailed: a process has ended, or it takes too long.
        """
        begin = time.monotonic()
        while True:
            ended = [child for child in self._children if child.exit_code is not None]
            if ended:
                raise CheckFailed(f"the {ended[0].name} ended at its start with exit code {ended[0].exit_code}")
            try:
                if (await self.client.http.get("/v1/models")).json()["data"]:
                    return time.monotonic() - begin
            except (httpx.TransportError, ValueError, KeyError):
                pass
            if time.monotonic() - begin > START_SECONDS:
                raise CheckFailed(f"no model is listed after {START_SECONDS} s")
            await asyncio.sleep(LOOK_SECONDS)

    async def ready(self) -> float:
        """Wait until a request is served; returns the seconds that took.

        Raises:
            CheckFailed: none was, within READY_SECONDS.
        """
        begin = time.monotonic()
        body = {"model": self.client.model, "prompt": "hello", "max_tokens": 1}
        while True:
            try:
                status = await self.client.status(TEXT, body)
            except httpx.TransportError as error:
                raise CheckFailed(f"the frontend does not answer: {type(error).__name__} {error}") from None
            if status == 200:
                return time.monotonic() - begin
            if time.monotonic() - begin > READY_SECONDS:
                raise CheckFailed(f"after {READY_SECONDS} s a plain request still gets HTTP {status}")
            await asyncio.sleep(LOOK_SECONDS)

    def complaint(self, since: tuple[int, ...]) -> str:
        """Why a sidecar last failed a request, behind what was ``logged``; empty where none did.

        Dynamo does not tell its clients.
        """
        for sidecar, behind in zip(self._sidecars, since, strict=True):
            found = _COMPLAINT.findall(sidecar.written()[behind:])
            if found:
                return f"{sidecar.name}: {found[-1][:LONGEST_COMPLAINT]}"
        return ""

    async def close(self) -> None:
        """Close the clients."""
        await self.client.http.aclose()
        await self.reference.close()

    def end(self) -> None:
        """End every process. A second Ctrl-C does not get in between."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in self._children:
            child.signal(signal.SIGTERM)
        for child in self._children:
            child.end()
        signal.signal(signal.SIGINT, before)


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _dynamo_environment(directory: Path) -> dict[str, str]:
    """No etcd, no NATS, nothing off the loopback, nothing written outside the directory."""
    store = directory / "discovery"
    store.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTHON"))}
    return {
        **kept,
        "HOME": str(directory),  # the frontend caches model files in ~/.cache
        "XDG_CACHE_HOME": str(directory / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    }
