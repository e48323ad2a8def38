"""The gateway: routes over a router, and everything that it owns."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from triptych.core.errors import ModelNotFound, RequestNotFound, TriptychError
from triptych.gateway.chat import ChatCompletions
from triptych.gateway.errors import ErrorReply, reply, to_reply
from triptych.gateway.limits import GatewayLimits
from triptych.gateway.pool import misfits, no_encoder, reason
from triptych.gateway.route import Router
from triptych.gateway.timeline import Timelines
from triptych.gateway.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from triptych.gateway.engine import Channel, ServedModel


class Gateway:
    """OpenAI's API in front of some engines. Serve ``app`` while it is entered."""

    def __init__(self, channels: Sequence[Channel], limits: GatewayLimits | None = None) -> None:
        """``channels`` lead to the engines and are closed in the end."""
        limits = limits or GatewayLimits()
        self.workers = Workers(limits.worker_threads, limits.max_pending_work)
        self.router = Router(channels, self.workers, limits)
        self.timelines = Timelines()
        self.chat = ChatCompletions(self.router, self.workers, self.timelines, limits)
        self._started = int(time.time())
        self._cleanup = AsyncExitStack()
        self.app = Starlette(
            routes=[
                Route("/", self._paths),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/timeline/{request_id}", self._timeline),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _http_error, TriptychError: _typed_error},
        )

    async def __aenter__(self) -> Gateway:
        """Begin to watch the engines."""
        self._cleanup.callback(self.workers.close)
        await self._cleanup.enter_async_context(self.router)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect from the engines."""
        await self._cleanup.aclose()

    async def _paths(self, _: Request) -> Response:
        paths = [route.path for route in self.app.routes if isinstance(route, Route)]
        return _json(200, {"name": "triptych", "paths": paths})

    async def _models(self, _: Request) -> Response:
        models = [self._describe(model) for model in self.router.models()]
        return _json(200, {"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for model in self.router.models():
            if name in model.names:
                return _json(200, self._describe(model))
        raise ModelNotFound(f"The model {name!r} does not exist")

    def _describe(self, model: ServedModel) -> dict[str, object]:
        return {"id": model.served_name, "object": "model", "created": self._started, "owned_by": "triptych"}

    async def _health(self, _: Request) -> Response:
        pool = self.router.pool
        answered = [model for model in self.router.models() if pool.can_answer(model)]
        blind = [no_encoder(model, pool.serving(model)) for model in answered if pool.unreadable(model)]
        status = "unavailable" if not answered else "degraded" if blind else "ok"
        body: dict[str, object] = {"status": status}
        if status != "ok":
            body["detail"] = "; ".join(blind) or reason(pool.engines)
        body["engines"] = [
            {
                "address": engine.address,
                "role": engine.part.value if engine.part else None,
                "state": engine.state.value,
                "detail": engine.detail,
                "model": engine.model.served_name if engine.model else None,
                "in_flight": engine.in_flight,
            }
            for engine in self.router.engines
        ]
        body["misfits"] = list(misfits(pool.engines))
        return _json(200 if answered else 503, body)

    async def _timeline(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        timeline = self.timelines.get(request_id)
        if timeline is None:
            raise RequestNotFound(f"no request {request_id!r} is remembered")
        return _json(200, {"id": request_id, "spans": sorted(timeline.spans, key=lambda span: span.start)})


def _json(status: int, content: object) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(what: ErrorReply) -> Response:
    return Response(what.body, what.status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or another method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "no such path" if status == 404 else "this path has no such method" if status == 405 else "refused"
    answer = _error(reply(status, f"{request.method} {request.url.path}: {what}"))
    answer.headers.update(dict(getattr(error, "headers", None) or {}))
    return answer


async def _typed_error(_: Request, error: Exception) -> Response:
    return _error(
        to_reply(error) if isinstance(error, TriptychError) else reply(500, "unexpected", kind="server_error")
    )
