"""Writes the corpus of videos and sounds and the table of what comes out of it: ``python -m tests.corpus.make_clips``.

What is small is committed; the rest, which is large or cut from these, is made anew wherever it is tried. The frames
that are looked at and their times hold everywhere; digests of pixels and samples hold for the libraries and the
processor that the table names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np

from tests.corpus import bombs, clips, sounds
from tests.corpus.clips import Recipe, encoded
from tests.decoding_here import decode_clip, decode_sound
from triptych.core.clip import FrameSampling
from triptych.core.config import MediaLimits

if TYPE_CHECKING:
    from triptych.core.clip import Clip
    from triptych.core.sound import Sound

DIRECTORY = Path(__file__).parent / "clips_and_sounds"
TABLE = Path(__file__).parent / "clips_and_sounds.json"
SMALL = 32 * 1024
"""Bytes of a file that is committed, at most."""
FOUR = FrameSampling(num_frames=4)
RATE = 16000


@functools.cache
def good_clips() -> dict[str, tuple[bytes, list[int]]]:
    """Each with the numbers of the frames that are looked at."""
    evenly = [0, 10, 19, 29]
    files = {name: (encoded(recipe), evenly) for name, recipe in clips.KINDS.items()}
    for name, recipe in clips.VARYING.items():
        files[f"{name}, variable rate"] = (encoded(recipe), [0, 5, 7, 9])
    for degrees in (90, 180, 270):
        files[f"turned by {degrees}"] = (encoded(Recipe(degrees=degrees)), evenly)
    files["one frame"] = (encoded(Recipe(frames=1)), [0])
    files["ten seconds at one frame a second"] = (encoded(Recipe(frames=10, fps=Fraction(1))), [0, 3, 6, 9])
    files["avi, broken index"] = (clips.broken_index(Recipe("avi", "mpeg4"), b"idx1"), evenly)
    files["matroska, broken index"] = (clips.broken_index(Recipe("matroska", "mpeg4"), b"\x1c\x53\xbb\x6b"), evenly)
    files["growing"] = (clips.growing(), [0, 1, 2, 3])
    files["growing vp9"] = (clips.changing(1, 1, 2, 2, codec="libvpx-vp9"), [0, 1, 2, 3])
    for codec in ("libvpx", "libvpx-vp9"):
        files[f"shrinking {codec}"] = (clips.changing(2, 2, 1, 1, codec=codec, header=2), [0, 1, 2, 3])
    files["vp9 larger than its header"] = (clips.changing(2, 2, 2, 2, codec="libvpx-vp9"), [0, 1, 2, 3])
    files["trailing bytes"] = (encoded() + b"and so on" * 9, evenly)
    return files


@functools.cache
def bad_clips() -> dict[str, tuple[bytes, str]]:
    """Each with a pattern of its reason."""
    files = {name: (bad.make(), bad.reason) for name, bad in clips.HOSTILE.items()}
    for name, (make, reason) in bombs.CLIPS.items():
        files[name] = (make(), re.escape(reason))
    for recipe in (Recipe(), clips.KINDS["mp4 in fragments"], Recipe("matroska", "mpeg4"), clips.KINDS["gif"]):
        for point, part in enumerate(clips.truncations(encoded(recipe))):
            files[f"{recipe.container} {recipe.flags} cut off at {point} of 20"] = (part, "decode: ")
    files["only sound"] = (sounds.encoded(sounds.KINDS["m4a"]), "decode: it has no video: only sound")
    return files


@functools.cache
def good_sounds() -> dict[str, tuple[bytes, float, float]]:
    """Each with its seconds and its loudness."""
    files = {
        name: (sounds.encoded(recipe), recipe.seconds, sounds.loudness(recipe.channels))
        for name, recipe in sounds.KINDS.items()
    }
    for rate in (8000, 16000, 44100, 48000):
        for channels in range(1, 9):
            name = f"wav, {rate} a second, {channels} channels"
            files[name] = (sounds.wav(rate, channels), 1.0, sounds.loudness(channels))
    files["forty seconds"] = (sounds.wav(8000, seconds=40), 40.0, 0.1)
    return files


@functools.cache
def bad_sounds() -> dict[str, tuple[bytes, str]]:
    """Each with a pattern of its reason."""
    files = {name: (bad.make(), bad.reason) for name, bad in sounds.HOSTILE.items()}
    for name, (make, reason) in bombs.SOUNDS.items():
        files[name] = (make(), re.escape(reason))
    for kind in ("flac", "m4a", "ogg opus", "webm opus", "avi mp3"):
        for point, part in enumerate(clips.truncations(sounds.encoded(sounds.KINDS[kind]))):
            files[f"{kind} cut off at {point} of 20"] = (part, "decode: ")
    return files


def codecs() -> dict[str, Any]:
    """What writes and reads them here."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    own = {"machine": platform.machine(), "vectors": sorted({"avx2", "avx512bw", "avx512f", "fma"} & {*flags})}
    return {"av": av.__version__, "ffmpeg": av.ffmpeg_version_info, **own}


def files() -> dict[str, bytes]:
    """Everything that is committed, by its name."""
    made = {**good_clips(), **good_sounds()}
    whole = {name: case for name, case in {**bad_clips(), **bad_sounds()}.items() if "cut off at" not in name}
    made |= {f"bad {name}": case for name, case in whole.items()}
    return {name: case[0] for name, case in made.items() if len(case[0]) <= SMALL}


def path_of(name: str) -> Path:
    """Where a file is committed."""
    return DIRECTORY / re.sub(r"[^a-z0-9]+", "-", name.lower())


def clip_row(clip: Clip) -> dict[str, Any]:
    """What is told of a video: the frames that are looked at, when, their size, their pixels."""
    _, height, width, _ = clip.frames.shape
    times = [round(time, 6) for time in clip.plan.timestamps]
    return {"frames": list(clip.plan.indices), "times": times, "size": [width, height], "sha256": digest(clip.frames)}


def sound_row(sound: Sound) -> dict[str, Any]:
    """What is told of a sound at the model's rate."""
    return {"seconds": round(sound.seconds, 3), "sha256": digest(sound.samples)}


def digest(values: np.ndarray) -> str:
    """Of pixels or samples; the shape stands beside it."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def table() -> dict[str, Any]:
    """What must come out of every committed file."""
    limits = MediaLimits()
    rows: dict[str, Any] = {"codecs": codecs(), "videos": {}, "sounds": {}, "bad": {}}
    for name, data in files().items():
        if name in good_clips():
            rows["videos"][name] = clip_row(decode_clip(0, data, FOUR, limits, None))
        elif name in good_sounds():
            rows["sounds"][name] = sound_row(decode_sound(0, data, RATE, limits))
        else:
            _, rows["bad"][name] = {**bad_clips(), **bad_sounds()}[name.removeprefix("bad ")]
    return rows


def main() -> None:
    """Replace the committed files."""
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    for name, data in files().items():
        path_of(name).write_bytes(data)
    parts = []
    for part, rows in table().items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        parts.append(f'"{part}": {{\n{lines}\n}}')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
