"""``triptych doctor``: does this machine have what Triptych needs, and does a real request work?"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from triptych.cli.flags import DEMO, model_directory
from triptych.core.config import GIB
from triptych.core.errors import TriptychError

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "grpcio", "protobuf", "pillow", "starlette")
GOOD, BAD = "[green]ok[/green]", "[red]failed[/red]"


def run() -> int:
    """Print one row a check; returns 1 if any failed."""
    console = Console(highlight=False)
    table = Table("check", "", "found", box=None, padding=(0, 2))
    failed = False
    checks: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs",
        "libraries": _libraries,
        "devices": _devices,
        "memory": _memory,
        "media": _media,
        "demo model": _demo_answers,
    }
    for name, check in checks.items():
        try:
            table.add_row(name, GOOD, check())
        except (TriptychError, OSError, ImportError, importlib.metadata.PackageNotFoundError) as error:
            failed = True
            table.add_row(name, BAD, str(error))
    console.print(table)
    return int(failed)


def _libraries() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)


def _devices() -> str:
    import torch

    threads = f"cpu ({torch.get_num_threads()} threads)"
    cuda = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return ", ".join([threads, *cuda])


def _memory() -> str:
    import torch

    from triptych.engine.kv_pool import available_bytes

    free = available_bytes(torch.device("cpu"))
    return "this system does not say" if free is None else f"{free / GIB:.1f} GiB free"


def _media() -> str:
    """What can be opened here: depends on what Pillow and PyAV were built with, and is found out by asking them."""
    import av
    from PIL import features

    from triptych.media.av_file import SOUND_CODECS, VIDEO_CODECS

    absent = [codec for codec in (*VIDEO_CODECS, *SOUND_CODECS) if codec not in av.codecs_available]
    pictures = "pictures with AVIF" if features.check("avif") else "pictures, but no AVIF (this Pillow lacks it)"
    lacking = f", but not {', '.join(absent)}" if absent else ""
    library = ".".join(map(str, av.library_versions["libavcodec"]))
    return f"{pictures}; video and sound by PyAV {av.__version__} (libavcodec {library}){lacking}"


def _demo_answers() -> str:
    """Ask the shipped model about every shipped picture, through the whole engine."""
    from triptych.cli.ask import MEDIA, OPTIONS, ask_once, read_item
    from triptych.cli.loaded import load

    directory = model_directory(DEMO)
    loaded = load(DEMO, OPTIONS, lambda done, total: None, MEDIA)
    said = []
    for example in json.loads((directory / "examples.json").read_text()):
        items = [read_item(directory / name) for name in example["pictures"]]
        answer = asyncio.run(ask_once(loaded, items, example["question"])).strip()
        if answer != example["answer"]:
            raise TriptychError(f"{example['question']} {answer!r}, but the picture shows {example['answer']!r}")
        said.append(f"{example['question']} {answer}")
    return f"{len(said)} of {len(said)} questions answered rightly, such as: {said[0]}"
