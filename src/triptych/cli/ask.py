"""``triptych ask``: one question about some picture files, answered in this process."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from triptych.cli.assemble import LoadedModel, aggregated, load
from triptych.cli.flags import model_directory
from triptych.cli.options import EngineOptions
from triptych.cli.progress import loading_bar
from triptych.core.config import MIB, MediaLimits, SchedulerConfig
from triptych.core.errors import InvalidRequest, StartupError
from triptych.core.events import Failed, Finished, Span, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.text.chat import ChatMessage, ChatTemplate

ANSWER_TOKENS = 256


class Answered(NamedTuple):
    """One answer and what it cost."""

    text: str
    ttft: float
    """Seconds from asking to the first token."""
    spans: tuple[Span, ...]


def run(words: list[str], model: str) -> int:
    """Print the answer; returns the exit code."""
    if len(words) < 2:
        raise InvalidRequest(
            'ask needs at least one picture file and, last, a question: triptych ask cat.png "what is it?"'
        )
    *files, question = words
    pictures = [read_picture(Path(file)) for file in files]
    with loading_bar(model) as bar:
        loaded = load(model_directory(model), ask_options(model), bar)
    answer = asyncio.run(ask_once(loaded, pictures, question))
    print(answer.text.strip())
    return 0


def ask_options(model: str) -> EngineOptions:
    """An engine for one question at a time."""
    config = SchedulerConfig()
    return EngineOptions(
        model=model,
        device="cpu",
        dtype="auto",
        kv_cache_bytes=256 * MIB,
        max_batched_tokens=config.max_batched_tokens,
        max_running_requests=1,
        served_name=None,
    )


def read_picture(path: Path) -> bytes:
    """A file's bytes, bounded as for a client's.

    Raises:
        InvalidRequest: it is not there, not a file or too large.
    """
    limit = MediaLimits().max_item_bytes
    try:
        if path.stat().st_size > limit:
            raise InvalidRequest(f"{path}: larger than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or 'cannot be read'}") from error


async def ask_once(loaded: LoadedModel, pictures: list[bytes], question: str) -> Answered:
    """Run one request through the aggregated role.

    Raises:
        TriptychError: the request was refused or failed.
    """
    model = loaded.frontend.model
    items = tuple(MediaItem(Modality.IMAGE, RawBytes(picture)) for picture in pictures)
    template = ChatTemplate.load(loaded.directory, loaded.frontend.tokenizer)
    prompt = template.render([ChatMessage("user", (*items, question))], max_tokens=model.max_context)
    request = GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=model.served_name,
        prompt=prompt.token_ids,
        media=prompt.media,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=ANSWER_TOKENS),
    )
    role = aggregated(loaded, instance_id=uuid.uuid4().hex)
    try:
        asked = time.monotonic()
        first = 0.0
        pieces: list[str] = []
        spans: tuple[Span, ...] = ()
        answer = await role.accept(request)
        async for event in answer:
            match event:
                case Tokens():
                    first = first or time.monotonic() - asked
                    pieces.append(event.text)
                case Finished():
                    spans = event.spans
                case Failed():
                    raise event.error
        await answer.aclose()
    finally:
        await role.drain(0)
    if not pieces:
        raise StartupError("the model answered with nothing")
    return Answered("".join(pieces), first, spans)
