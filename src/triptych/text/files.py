"""Reading a checkpoint's text files with limits and clear refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from triptych.core.config import MIB
from triptych.core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES = 128 * MIB
"""The largest published tokenizer.json has about 35 MB."""


def read_text(path: Path) -> str:
    """The file's content.

    Raises:
        CheckpointError: the file is missing, too large or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES // MIB} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.start}") from None


def read_object(path: Path) -> dict[str, object]:
    """The file's content as a JSON object.

    Raises:
        CheckpointError: the file is missing, too large, or holds no JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_object_if_present(path: Path) -> dict[str, object]:
    """The file's JSON object, or an empty one where there is no such file.

    Raises:
        CheckpointError: the file is there and is broken.
    """
    return read_object(path) if path.exists() else {}
