"""``triptych ask``: one question about some picture files, answered in this process."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from triptych.cli.assemble import aggregated
from triptych.cli.loaded import LoadedModel, load
from triptych.cli.options import EngineOptions
from triptych.cli.progress import loading_bar
from triptych.core.config import MIB
from triptych.core.errors import InvalidRequest, MediaError
from triptych.core.events import Failed, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.text.chat import ChatMessage, ChatTemplate

ANSWER_TOKENS = 256
OPTIONS = EngineOptions(kv_cache_bytes=256 * MIB, max_running_requests=1)
"""An engine for one question at a time."""


def run(words: list[str], model: str) -> int:
    """Print the answer; returns the exit code."""
    if len(words) < 2:
        raise InvalidRequest(
            'ask needs at least one picture file and, last, a question: triptych ask cat.png "what is it?"'
        )
    *files, question = words
    if not question.strip():
        raise InvalidRequest("the question is empty")
    for file in files:
        if not Path(file).suffix and not Path(file).exists():
            raise InvalidRequest(f'{file}: no such picture; a question of several words needs quotes: "what is it?"')
    pictures = [read_picture(Path(file)) for file in files]
    with loading_bar(model) as bar:
        loaded = load(model, OPTIONS, bar)
    try:
        print(asyncio.run(ask_once(loaded, pictures, question)).strip())
    except MediaError as error:
        raise InvalidRequest(f"{files[error.index]}: {error.reason}") from None
    return 0


def read_picture(path: Path) -> bytes:
    """A file's bytes, bounded as for a client's.

    Raises:
        InvalidRequest: it is not there, not a file or too large.
    """
    limit = OPTIONS.max_item_bytes
    try:
        if path.stat().st_size > limit:
            raise InvalidRequest(f"{path}: larger than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or 'cannot be read'}") from error


async def ask_once(loaded: LoadedModel, pictures: list[bytes], question: str) -> str:
    """Run one request through the aggregated role; greedy.

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
        answer = await role.accept(request)
        pieces: list[str] = []
        async for event in answer:
            match event:
                case Tokens():
                    pieces.append(event.text)
                case Failed():
                    raise event.error
        await answer.aclose()
    finally:
        await role.drain(0)
    return "".join(pieces)
