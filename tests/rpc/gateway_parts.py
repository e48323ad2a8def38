"""Engines in memory that do a part of a request each, and keep count of what they hand to each other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from tests.rpc.engine_twin import SPANS, EngineTwin
from triptych.core.encoded import SealedReference
from triptych.core.errors import ReferenceNotFound
from triptych.core.events import EncoderReady, Failed, PrefillReady, Span, Usage
from triptych.core.media import DataUri, Modality, Url
from triptych.core.session import SealedSession
from triptych.wire.gen import generation_pb2, model_pb2, server_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from tests.rpc.engine_twin import Step
    from triptych.core.encoded import Reference
    from triptych.core.errors import TriptychError
    from triptych.core.events import Event
    from triptych.core.request import GenerateRequest

MARKER = 77
ENCODE_SPANS = (Span("prepare", 0.5, 0.6), Span("encode", 0.6, 0.9))


class Shelf:
    """Encoder outputs of all encoders of a test, and what became of each."""

    def __init__(self) -> None:
        self.fates: dict[str, list[str]] = {}
        """By name: empty while it waits."""
        self.items: dict[str, str] = {}
        """Of what each was made, by name."""

    def put(self, items: dict[str, str]) -> None:
        """Outputs wait from now on."""
        assert not set(items) & set(self.fates)
        self.fates.update((name, []) for name in items)
        self.items.update(items)

    def take(self, names: list[str]) -> None:
        """A reader uses them all, or none."""
        for index, name in enumerate(names):
            if self.fates[name]:
                raise ReferenceNotFound(f"media item {index}: {name} was {self.fates[name][0]} before")
        for name in names:
            self.fates[name].append("used")

    def release(self, names: list[str]) -> None:
        """Nobody uses them; what was used is not touched."""
        for name in names:
            if self.fates[name] != ["used"]:
                self.fates[name].append("released")

    def each(self, *fates: str) -> bool:
        """Whether these became of all outputs, and exactly one of them of each."""
        return bool(self.fates) and all(len(found) == 1 and found[0] in fates for found in self.fates.values())


class _Encoded(asyncio.Event):
    """A step at which outputs come to be."""

    def __init__(self, shelf: Shelf, items: dict[str, str]) -> None:
        super().__init__()
        self.items = items
        self._shelf = shelf

    async def wait(self) -> Literal[True]:
        self._shelf.put(self.items)
        self.set()
        return True


class Failing(EngineTwin):
    """Fails first, if the test says so: one failure for each request."""

    def __init__(self, directory: Path, address: str) -> None:
        super().__init__(directory, address)
        self.failures: list[TriptychError] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.refusal = self.failures.pop(0) if self.failures else None
        return await super().generate(request)


class Encoder(Failing):
    """Encodes pictures."""

    def __init__(self, directory: Path, shelf: Shelf, address: str = "e:1") -> None:
        super().__init__(directory, address)
        self.role = server_pb2.ENGINE_ROLE_ENCODER
        self.modalities, self.max_context, self.image_token_id = [], 0, MARKER
        self.capabilities = model_pb2.EncoderCapabilities(
            producer=True,
            transfer_backends=["shared-dir"],
            supports_abort_cleanup=True,
            modalities=[generation_pb2.MODALITY_IMAGE],
            fingerprint="f",
        )
        self.before: list[asyncio.Event] = []
        """What encoding waits for."""
        self.on_the_way: list[asyncio.Event] = []
        """What the answer waits for when everything is encoded."""
        self.sends: Callable[[tuple[Reference, ...]], tuple[Reference, ...]] = tuple
        """Which of the references are sent."""
        self.lost: TriptychError | None = None
        """What happens to the answer when everything is encoded."""
        self.instead: list[Step] = []
        """What it does, if not what it was asked for."""
        self.released: list[str] = []
        """References that it was told to let go of."""
        self._shelf = shelf
        self._made: dict[str, _Encoded] = {}
        """By the request."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        assert request.encode is not None
        markers = {Modality.IMAGE: MARKER, Modality.VIDEO: self.video_token_id}
        assert request.prompt == tuple(markers[item.modality] for item in request.media)
        names = [f"{self.address}/{len(self.requests)}/{index}" for index in range(len(request.media))]
        references = tuple(SealedReference(name, name.encode()) for name in names)
        ready = EncoderReady(request.request_id, self.sends(references), ENCODE_SPANS)
        encoded = _Encoded(self._shelf, dict(zip(names, _uris(request), strict=True)))
        end = Failed("any", self.lost) if self.lost else ready
        self.script = self.instead or [*self.before, encoded, *self.on_the_way, end]
        self._made[request.request_id] = encoded
        return await super().generate(request)

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        if request_id in self._made and self._made[request_id].is_set():
            self._shelf.release(list(self._made[request_id].items))

    async def abort_reference(self, reference: SealedReference) -> None:
        self._answer_if_up()
        self.released.append(reference.cache_id)
        self._shelf.release([reference.cache_id])

    async def get_model_info(self, model: str) -> model_pb2.ModelInfo:
        info = await super().get_model_info(model)
        info.encoder.CopyFrom(self.capabilities)
        return info

    @property
    def items(self) -> list[str]:
        """The media it was asked to encode, by their URIs or URLs."""
        return [uri for request in self.requests for uri in _uris(request)]


class Reader(Failing):
    """Reads prompts, and takes encoder outputs where the test gives it a shelf to take them from."""

    def __init__(self, directory: Path, address: str = "pd:1", shelf: Shelf | None = None) -> None:
        super().__init__(directory, address)
        self.capabilities = model_pb2.EncoderCapabilities(
            consumer=shelf is not None,
            requires_handoff=shelf is not None,
            transfer_backends=["shared-dir"] if shelf else [],
            modalities=[generation_pb2.MODALITY_IMAGE] if shelf else [],
            fingerprint="f" if shelf else "",
        )
        self.takes_late = False
        """Whether outputs are taken when the first event is there, not at once."""
        self.spends = False
        """Whether outputs are taken also by requests that fail."""
        self._shelf = shelf

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if not self.takes_late and (self.spends or not self.failures):
            self._take(request)
        events = await super().generate(request)
        if self.takes_late:
            self._take(request)
        return events

    def _take(self, request: GenerateRequest) -> None:
        if request.references:
            assert self._shelf is not None
            assert self.capabilities.consumer
            try:
                self._shelf.take(_names(request))
            except ReferenceNotFound as error:
                self.failures.insert(0, error)

    async def get_model_info(self, model: str) -> model_pb2.ModelInfo:
        info = await super().get_model_info(model)
        info.encoder.CopyFrom(self.capabilities)
        return info

    @property
    def offered(self) -> list[list[str]]:
        """The references of each request."""
        return [_names(request) for request in self.requests]


class Prefill(Reader):
    """Hands each prompt over under a name of its own."""

    def __init__(self, directory: Path, address: str = "p:1", shelf: Shelf | None = None) -> None:
        super().__init__(directory, address, shelf)
        self.role = server_pb2.ENGINE_ROLE_PREFILL
        self.kv_backend = ""
        self.before: list[asyncio.Event] = []

    async def get_server_info(self) -> server_pb2.ServerInfo:
        return _with_kv(await super().get_server_info(), self.kv_backend)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        name = f"{self.address}/{len(self.requests)}"
        self.script = [*self.before, PrefillReady("any", SealedSession(name, name.encode()), Usage(12, 1, 8), SPANS)]
        return await super().generate(request)


class Decode(Failing):
    """Goes on from what it is given."""

    def __init__(self, directory: Path, address: str = "d:1") -> None:
        super().__init__(directory, address)
        self.role = server_pb2.ENGINE_ROLE_DECODE
        self.kv_backend = ""

    async def get_server_info(self) -> server_pb2.ServerInfo:
        return _with_kv(await super().get_server_info(), self.kv_backend)

    @property
    def sessions(self) -> list[str]:
        return [request.session.session_id for request in self.requests if isinstance(request.session, SealedSession)]


def _with_kv(info: server_pb2.ServerInfo, backend: str) -> server_pb2.ServerInfo:
    info.kv_connector.transfer_backend = backend
    return info


def _names(request: GenerateRequest) -> list[str]:
    return [reference.cache_id for reference in request.references if isinstance(reference, SealedReference)]


def _uris(request: GenerateRequest) -> list[str]:
    sources = [item.source for item in request.media if isinstance(item.source, Url | DataUri)]
    return [source.url if isinstance(source, Url) else source.uri for source in sources]
