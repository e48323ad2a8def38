"""A gateway over engines in memory, and clients that speak ASGI to it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from triptych.gateway.app import Gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.rpc.engine_twin import EngineTwin
    from triptych.gateway.limits import GatewayLimits

DATA = "data:image/png;base64,AAAA"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "what colour?"}]}
PICTURE = {"type": "image_url", "image_url": {"url": DATA}}
TEXT = [{"role": "user", "content": "what colour?"}]
WITH_PICTURE = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "what colour?"}]}]


def picture(number: int) -> dict[str, Any]:
    """One of many different pictures, by its URI."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,AA{number:02d}"}}


def uri(number: int) -> str:
    """Of one of them."""
    url: str = picture(number)["image_url"]["url"]
    return url


def asking(*numbers: int) -> list[dict[str, Any]]:
    """A question about some pictures; the i-th is content part i."""
    return [{"role": "user", "content": [*map(picture, numbers), {"type": "text", "text": "what colour?"}]}]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    while not condition():
        await asyncio.sleep(0.005)


class Running:
    """A gateway and a client."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http

    async def chat(self, **changes: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=BODY | changes)

    async def state(self, index: int, state: str) -> None:
        """Wait until the gateway has seen an engine in a state."""
        await until(lambda: self.gateway.router.engines[index].state.value == state)

    async def all_ready(self) -> None:
        """Wait until every engine was seen to be ready."""
        for index in range(len(self.gateway.router.engines)):
            await self.state(index, "ready")

    def nothing_is_held(self) -> bool:
        return not (
            self.gateway.workers.pending
            or self.gateway.router.aborts.running
            or self.gateway.chat.bytes_held.held
            or any(engine.in_flight for engine in self.gateway.router.engines)
        )


@asynccontextmanager
async def running(
    *twins: EngineTwin, limits: GatewayLimits | None = None, whole: bool = True
) -> AsyncIterator[Running]:
    """``whole``: the twins can answer what their model takes, or all are down."""
    async with Gateway(twins, limits) as gateway:
        if whole and any(twin.down is None for twin in twins):
            await gateway.router.wait_ready()
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield Running(gateway, http)
    assert all(twin.closed for twin in twins)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def sent_events(text: str) -> list[Any]:
    pieces = text.split("\n\n")
    assert pieces.pop() == ""
    return [json.loads(p.removeprefix("data: ")) if p != "data: [DONE]" else "[DONE]" for p in pieces]


class Caller:
    """A client that speaks ASGI itself, so that it can go away at any moment."""

    def __init__(self, run: Running, **changes: Any) -> None:
        self.gone = asyncio.Event()
        self.received: list[Any] = []
        self.first_chunk = asyncio.Event()
        self.blocked: asyncio.Event | None = None
        self._body = json.dumps(BODY | changes).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        self.task = asyncio.create_task(run.gateway.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Any) -> None:
        if self.blocked:
            await self.blocked.wait()
        self.received.append(event)
        if event["type"] == "http.response.body":
            self.first_chunk.set()
