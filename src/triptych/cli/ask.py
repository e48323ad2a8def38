"""``triptych ask``: one question about some files, pictures or videos, answered in this process."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from triptych.cli.assemble import aggregated
from triptych.cli.loaded import LoadedModel, load
from triptych.cli.media import MediaFlags
from triptych.cli.options import EngineOptions
from triptych.cli.progress import loading_bar
from triptych.core.config import MIB
from triptych.core.errors import InvalidRequest, MediaError, UnsupportedFeature
from triptych.core.events import Failed, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.media.containers import VIDEO_CONTAINERS
from triptych.media.header import recognise
from triptych.text.chat import ChatMessage, ChatTemplate

ANSWER_TOKENS = 256
OPTIONS = EngineOptions(kv_cache_bytes=256 * MIB, max_running_requests=1)
"""An engine for one question at a time."""
MEDIA = MediaFlags(decode_workers=1, fetch_hosts=())
"""It opens a few files, and nothing else."""


def run(words: list[str], model: str) -> int:
    """Print the answer; returns the exit code."""
    if len(words) < 2:
        raise InvalidRequest(
            'ask needs at least one picture or video file and, last, a question: triptych ask cat.png "what is it?"'
        )
    *files, question = words
    if not question.strip():
        raise InvalidRequest("the question is empty")
    for file in files:
        if not Path(file).suffix and not Path(file).exists():
            raise InvalidRequest(f'{file}: no such file; a question of several words needs quotes: "what is it?"')
    items = [read_item(Path(file)) for file in files]
    with loading_bar(model) as bar:
        loaded = load(model, OPTIONS, bar, MEDIA)
    accepted = loaded.frontend.model.modalities
    for file, item in zip(files, items, strict=True):
        if item.modality not in accepted:
            raise UnsupportedFeature(
                f"{file}: a {item.modality.value}, which {loaded.frontend.model.served_name} cannot read"
            )
    try:
        print(asyncio.run(ask_once(loaded, items, question)).strip())
    except MediaError as error:
        raise InvalidRequest(f"{files[error.index]}: {error.reason}") from None
    return 0


def read_item(path: Path) -> MediaItem:
    """A file, bounded as a client's; a video if its first bytes are those of one, else taken for a picture.

    Raises:
        InvalidRequest: it is not there, not a file or too large.
    """
    limit = MEDIA.max_item_bytes
    try:
        if path.stat().st_size > limit:
            raise InvalidRequest(f"{path}: larger than {limit} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or 'cannot be read'}") from error
    # GIF and AVIF are containers too; as files they are pictures.
    is_video = recognise(data) is None and any(kind.matches(data) for kind in VIDEO_CONTAINERS)
    return MediaItem(Modality.VIDEO if is_video else Modality.IMAGE, RawBytes(data))


async def ask_once(loaded: LoadedModel, items: list[MediaItem], question: str) -> str:
    """Run one request through the aggregated role; greedy.

    Raises:
        TriptychError: the request was refused or failed.
    """
    model = loaded.frontend.model
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
