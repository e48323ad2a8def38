"""What a picture costs before the tower: ours, transformers' processor, and decoding alone.

    scripts/bench pictures                        pictures per second and core, then the look-up beside a tower
    scripts/bench pictures --sizes 896x896        other pictures, height x width
    scripts/bench pictures --tower 2b             beside the tower of a random checkpoint; the demo model's otherwise

prepare    from the file to what the engine is given, with the settings of Qwen3-VL as published. ``decode`` is Pillow
           alone, the floor; ``ours`` ends with bytes, ``and numbers`` with what the tower makes of them in float32,
           which is what transformers' processor ends with
look-up    what the engine's thread does of it, beside everything else that its tower does for that picture

Processor time of one core, medians; what is compared takes turns.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from engines import random_checkpoint
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from turns import alternating

import triptych
from triptych.core.checkpoint import Section
from triptych.core.config import MIB, MediaLimits
from triptych.core.media import Picture
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture, decode
from triptych.media.limits import RequestBudget
from triptych.models.registry import load_tower
from triptych.models.vision.patches import patch_numbers
from triptych.processors.qwen3_vl import Qwen3VLProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triptych.core.encoder_input import EncoderInput

DEMO = Path(triptych.__file__).parent / "demo_model"
KINDS = {"JPEG": {"quality": 90}, "PNG": {}}
FRAMES = 2
SETTINGS = {
    "patch_size": 16,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int

    @classmethod
    def read(cls, word: str) -> Size:
        """From ``HEIGHTxWIDTH``."""
        height, width = word.split("x")
        return cls(int(height), int(width))


def photograph(size: Size) -> Image.Image:
    """Smooth, with the noise of a camera: a file of it is about as large as a real one."""
    rng = np.random.default_rng(size.height)
    coarse = rng.integers(0, 256, (size.height // 8 + 1, size.width // 8 + 1, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((size.width, size.height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + rng.normal(0, 3, (*size, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str) -> bytes:
    """A file of it."""
    out = io.BytesIO()
    picture.save(out, kind, **KINDS[kind])
    return out.getvalue()


class Preparation:
    """Ways from a file to what a tower reads."""

    def __init__(self) -> None:
        self._ours = Qwen3VLProcessor(
            Section("config.json", {}), Section("preprocessor_config.json", SETTINGS), None, bytes(32), lambda text: []
        )
        self._theirs = Qwen2VLImageProcessorPil(**SETTINGS)

    def decode(self, data: bytes) -> Image.Image:
        """Pillow alone."""
        return Image.open(io.BytesIO(data)).convert("RGB")

    def ours(self, data: bytes) -> EncoderInput:
        """As a media worker does it."""
        admitted, options = admit_picture(0, data, RequestBudget(MediaLimits())), PictureOptions()
        picture = Picture(np.asarray(decode(0, data, admitted, options, self._ours.picture_fit(options)).image))
        return self._ours.encoder_input(0, picture, bytes(32))

    def numbers(self, data: bytes) -> torch.Tensor:
        """The same, and the look-up."""
        return patch_numbers([self.ours(data)], FRAMES, torch.device("cpu"), torch.float32)

    def theirs(self, data: bytes) -> torch.Tensor:
        """Pillow and the processor of transformers."""
        seen: torch.Tensor = self._theirs(self.decode(data), return_tensors="pt")["pixel_values"]
        return seen


def medians(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of processor time; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in alternating(list(ways), turn):
            start = time.process_time()
            ways[name]()
            if turn:
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def prepare(sizes: Sequence[Size], rounds: int) -> None:
    """A row for each kind and size of file."""
    way = Preparation()
    print(f"prepare: pictures per second and core, medians of {rounds} rounds; MiB of what a picture is given on as")
    print(f"{'':9} {'':4}  {'decode':>8} {'ours':>8} {'and numbers':>12} {'transformers':>13}", end="")
    print(f"  {'of the floor':>12} {'to transformers':>16}  {'MiB':>6} {'theirs':>6}")
    for size in sizes:
        drawn = photograph(size)
        for kind in KINDS:
            data = encoded(drawn, kind)
            own, numbers, seen = way.ours(data), way.numbers(data), way.theirs(data)
            if not torch.equal(numbers, seen):
                raise SystemExit(f"{kind} of {size.height} x {size.width}: not what transformers sees")
            took = medians(
                {
                    "decode": lambda data=data: way.decode(data),
                    "ours": lambda data=data: way.ours(data),
                    "numbers": lambda data=data: way.numbers(data),
                    "theirs": lambda data=data: way.theirs(data),
                },
                rounds,
            )
            rates = "{decode:8.1f} {ours:8.1f} {numbers:12.1f} {theirs:13.1f}".format(
                **{name: 1 / seconds for name, seconds in took.items()}
            )
            shares = f"{took['decode'] / took['ours']:12.0%} {took['theirs'] / took['ours']:15.1f}x"
            print(f"{size.height:>4}x{size.width:<4} {kind:4}  {rates}  {shares}", end="")
            print(f"  {own.patches.nbytes / MIB:6.1f} {seen.nbytes / MIB:6.1f}", flush=True)


def look_up(shape: str | None, sizes: Sequence[Size], rounds: int) -> None:
    """A row for each size, of one tower in its own number format."""
    way = Preparation()
    with ExitStack() as cleanup:
        place = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-"))
        model = DEMO if shape is None else random_checkpoint(shape, Path(place) / shape, 1 << 24, "bfloat16")
        loaded = load_tower(model)
        print(f"\nlook-up: milliseconds beside the tower of {model.name}, {loaded.spec.dtype}, medians of {rounds}")
        print(f"{'':9}  {'look-up':>8} {'tower':>10} {'share':>8}")
        for size in sizes:
            entry = way.ours(encoded(photograph(size), "JPEG"))
            took = medians(
                {
                    "look-up": lambda entry=entry: patch_numbers(
                        [entry], FRAMES, loaded.spec.device, loaded.spec.dtype
                    ),
                    "tower": lambda entry=entry: loaded.tower.encode([entry]),
                },
                rounds,
            )
            both = f"{1000 * took['look-up']:8.2f} {1000 * took['tower']:10.1f}"
            print(f"{size.height:>4}x{size.width:<4}  {both} {took['look-up'] / took['tower']:8.2%}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", type=Size.read, default=[Size(224, 224), Size(896, 896), Size(2170, 1536)]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tower", help="a shape of scripts/make_checkpoint")
    parser.add_argument("--tower-sizes", nargs="+", type=Size.read, default=[Size(224, 224), Size(896, 896)])
    parser.add_argument("--tower-rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        prepare(asked.sizes, asked.rounds)
        look_up(asked.tower, asked.tower_sizes, asked.tower_rounds)


if __name__ == "__main__":
    main()
