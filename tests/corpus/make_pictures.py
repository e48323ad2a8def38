"""Writes the picture corpus and the table of what must come out of it: ``python -m tests.corpus.make_pictures``.

Digests of pictures that keep their samples come from how they were made. Those of lossy ones come from decoding them
here, once they were found to be near what was stored; they hold for the codecs that the table names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import shutil
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import features

from tests.corpus.bad_pictures import bad_pictures
from tests.corpus.pictures import pictures
from tests.pictures_here import decode_picture
from triptych.core.config import MediaLimits
from triptych.media.limits import RequestBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.corpus.bad_pictures import Bad
    from tests.corpus.drawn import Good

DIRECTORY = Path(__file__).parent / "pictures"
TABLE = Path(__file__).parent / "pictures.json"
CODECS = ("pil", "jpg", "libjpeg_turbo", "webp", "avif", "libtiff", "zlib_ng", "littlecms2")
MEAN_ERROR = 6.0
"""How far a lossy picture may be from what was stored, in the mean, of 255."""


def codecs() -> dict[str, str | None]:
    """What writes and reads the pictures here."""
    own = {"zlib": zlib.ZLIB_RUNTIME_VERSION, "machine": platform.machine()}
    return {name: features.version(name) for name in CODECS} | own


def digest(pixels: np.ndarray) -> str:
    """Of pixels [height, width, 3]; the size stands beside it."""
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


def is_near(pixels: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether a lossy picture is what was stored."""
    return pixels.shape == wanted.shape and float(np.abs(pixels.astype(int) - wanted).mean()) <= MEAN_ERROR


@functools.cache
def good() -> dict[str, Good]:
    """The pictures that can be used, by name."""
    return {case.name: case for case in pictures()}


@functools.cache
def bad() -> dict[str, Bad]:
    """Those that cannot."""
    return {case.name: case for case in bad_pictures()}


def files() -> dict[str, bytes]:
    """Everything that is committed, by name."""
    return {case.name: case.data for case in (*good().values(), *bad().values()) if case.committed}


def table() -> dict[str, Any]:
    """What must come out of every file."""
    wrong = {name: {"what": case.what, "stage": case.stage.value, "words": case.words} for name, case in bad().items()}
    return {"codecs": codecs(), "good": {name: _row(case) for name, case in good().items()}, "bad": wrong}


def _row(case: Good) -> dict[str, Any]:
    pixels = case.exact
    if pixels is None:
        assert case.near is not None, case.name
        pixels = decode_picture(0, case.data, RequestBudget(MediaLimits())).pixels
        assert is_near(pixels, case.near), case.name
    height, width, _ = pixels.shape
    return {"what": case.what, "size": [width, height], "exact": case.exact is not None, "sha256": digest(pixels)}


def main() -> None:
    """Replace the committed files."""
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    for name, data in files().items():
        (DIRECTORY / name).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = table()
    parts = (f'"{part}": {{\n' + ",\n".join(_lines(rows[part])) + "\n}" for part in rows)
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _lines(rows: dict[str, Any]) -> Iterator[str]:
    return (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())


if __name__ == "__main__":
    main()
