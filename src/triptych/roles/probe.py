"""Whether an engine still answers: one real token, or one real media item, through all of it."""

from __future__ import annotations

import asyncio
import struct
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.encoded import EncoderReference
from triptych.core.errors import Internal, Overloaded, TriptychError
from triptych.core.events import EncoderReady, Failed, PrefillReady
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, EncodeOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import KvSession
from triptych.roles.contract import HealthCheck, HealthState

if TYPE_CHECKING:
    from triptych.roles.contract import ModelDescription, Role

PROBE_SECONDS = 30.0
"""How long an inference probe may take."""
NAME = "inference_probe"
_SIDE = 32
"""Pixels along a probe's picture."""


class InferenceProbe:
    """Concurrent probes share one request.

    Args:
        role: what is probed.
        sample: what it is asked, each time under another id and another salt, so that no cache can answer.
    """

    def __init__(self, role: Role, sample: GenerateRequest) -> None:
        self._role = role
        self._sample = sample
        self._running: asyncio.Task[HealthCheck] | None = None

    async def check(self) -> HealthCheck:
        """Ask, or wait for the answer to what was asked already."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._infer_once())
        return await asyncio.shield(self._running)

    async def _infer_once(self) -> HealthCheck:
        name = f"health-probe-{uuid.uuid4().hex}"
        request = replace(self._sample, request_id=name, cache=CacheOptions(salt=name))
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answer = await self._role.accept(request)
                try:
                    async for event in answer:
                        match event:
                            case Failed(error=error):
                                return HealthCheck(NAME, HealthState.NOT_READY, str(error))
                            case PrefillReady(session=KvSession(handle=handle)):
                                await self._role.abort_session(handle.session_id)
                            case EncoderReady(references=references):
                                for one in references:
                                    if isinstance(one, EncoderReference):
                                        await self._role.abort_rows(one.item.handle.session_id)
                finally:
                    await answer.aclose()
        except TimeoutError:
            return HealthCheck(NAME, HealthState.DEGRADED, f"no answer within {PROBE_SECONDS:.0f} s")
        except Overloaded as error:
            return HealthCheck(NAME, HealthState.DEGRADED, str(error))
        except TriptychError as error:
            return HealthCheck(NAME, HealthState.NOT_READY, str(error))
        return HealthCheck(NAME, HealthState.READY)


def one_token(model: ModelDescription, token: int) -> GenerateRequest:
    """A prompt of one token, for the one that follows it."""
    return GenerateRequest(
        request_id=NAME,
        model=model.served_name,
        prompt=(token,),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=1, ignore_eos=True),
        detokenize=False,
        priority=2**31 - 1,  # the engine is asked, not its queue
    )


def one_picture(model: ModelDescription) -> GenerateRequest:
    """A small black picture, to be encoded."""
    if model.image_token_id is None:
        raise Internal("an encoder of a model that accepts no pictures cannot be probed")
    pixels = bytes(_SIDE * _SIDE * 3)
    header = struct.pack("<2sIII", b"BM", 54 + len(pixels), 0, 54)
    header += struct.pack("<IiiHHIIiiII", 40, _SIDE, _SIDE, 1, 24, 0, len(pixels), 0, 0, 0, 0)
    return GenerateRequest(
        request_id=NAME,
        model=model.served_name,
        prompt=(model.image_token_id,),
        media=(MediaItem(Modality.IMAGE, RawBytes(header + pixels)),),
        priority=2**31 - 1,
        encode=EncodeOptions(),
    )
