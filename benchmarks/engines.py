"""Engine processes over a random model, and requests for them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from triptych.cli.child import EngineProcess
from triptych.cli.options import SECRET_VARIABLE
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.text.chat import ChatMessage, ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AsyncExitStack

ROOT = Path(__file__).resolve().parent.parent
NAME = "bench"
"""Of the model, to be given to the engines as ``--served-name``."""


def random_checkpoint(shape: str, directory: Path, max_pixels: int, dtype: str = "float32") -> Path:
    """A model with random weights that takes pictures as large as they come."""
    make = [sys.executable, str(ROOT / "scripts" / "make_checkpoint"), shape, str(directory), "--dtype", dtype]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    settings = directory / "preprocessor_config.json"
    if settings.exists():
        said = json.loads(settings.read_text())
        said["size"]["longest_edge"] = max_pixels
        settings.write_text(json.dumps(said))
    return directory


class Engines:
    """Engine processes, ended with the stack."""

    def __init__(self, cleanup: AsyncExitStack, model: Path, flags: Sequence[str] = ()) -> None:
        self._cleanup = cleanup
        self._words = [str(model), "--served-name", NAME, *flags]

    async def start(self, role: str, flags: Sequence[str], secret: str | None = None) -> EngineChannel:
        """One of them, ready."""
        channel, _ = await self.start_process(role, flags, secret)
        return channel

    async def start_process(
        self, role: str, flags: Sequence[str], secret: str | None = None
    ) -> tuple[EngineChannel, EngineProcess]:
        """The same, with its process."""
        environment = {} if secret is None else {SECRET_VARIABLE: secret}
        engine = await EngineProcess.start(role, [*self._words, *flags], environment)
        self._cleanup.push_async_callback(engine.stop)
        await engine.wait_ready(lambda done, total: None)
        channel = EngineChannel(engine.address)
        self._cleanup.push_async_callback(channel.close)
        return channel, engine


class Questions:
    """Requests about pictures, no two of which are alike."""

    def __init__(self, model: Path, size: int) -> None:
        """``size``: width and height of the pictures."""
        self._template = ChatTemplate.load(model, Tokenizer.load(model))
        self._drawn = _pictures(size)

    def ask(self, pictures: int = 1) -> GenerateRequest:
        """A new one."""
        items = tuple(MediaItem(Modality.IMAGE, RawBytes(next(self._drawn))) for _ in range(pictures))
        prompt = self._template.render([ChatMessage("user", (*items, "what is it?"))], max_tokens=1_000_000)
        return two_tokens(prompt.token_ids, prompt.media)


def _pictures(size: int) -> Iterator[bytes]:
    """JPEG files of smooth random pictures."""
    rng = np.random.default_rng(size)
    while True:
        coarse = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        yield out.getvalue()


def two_tokens(prompt: tuple[int, ...], media: tuple[MediaItem, ...] = ()) -> GenerateRequest:
    """Greedy, under a salt of its own."""
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=NAME,
        prompt=prompt,
        media=media,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=2, ignore_eos=True),
        cache=CacheOptions(salt=uuid.uuid4().hex),
    )
