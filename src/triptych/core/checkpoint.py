"""The text files of a model directory, JSON with types: a wrong value is named, never met later as a traceback."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.config import MIB
from triptych.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_JSON_BYTES = 64 * MIB
MAX_TEXT_BYTES = 128 * MIB
"""The largest published tokenizer.json has about 35 MB."""


@dataclass(frozen=True, slots=True)
class Section:
    """One JSON object of one file. A key that is absent, or null, takes its default; without one it is an error."""

    file: str
    """File name and path inside it, for messages: ``config.json text_config``."""
    values: Mapping[str, object]

    def error(self, key: str, reason: str) -> CheckpointError:
        """An error that names the file and the key."""
        return CheckpointError(f"{self.file}: {key} {reason}")

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number, at least ``least``.

        Raises:
            CheckpointError: absent without a default, not a whole number, or too small.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"must be a whole number >= {least}, not {value!r:.100}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: absent without a default, or not a finite number.
        """
        return self._number(key, self._value(key, default))

    def numbers(self, key: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        """A list of finite numbers.

        Raises:
            CheckpointError: absent without a default, or anything else than such a list.
        """
        value = self._value(key, default)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, f"must be a list of numbers, not {value!r:.100}")
        return tuple(self._number(key, entry) for entry in value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false.

        Raises:
            CheckpointError: absent without a default, or neither.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r:.100}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Raises:
            CheckpointError: absent without a default, or not a string.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r:.100}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A list of strings.

        Raises:
            CheckpointError: absent without a default, or anything else than such a list.
        """
        value = self._value(key, default)
        if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
            raise self.error(key, f"must be a list of strings, not {value!r:.100}")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none when absent.

        Raises:
            CheckpointError: anything else.
        """
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(entry, bool) or not isinstance(entry, int) or entry < 0 for entry in ids):
            raise self.error(key, f"must be a token id or a list of them, not {value!r:.100}")
        return tuple(ids)

    def section(self, key: str) -> Section:
        """An object inside this one; empty when absent.

        Raises:
            CheckpointError: not an object.
        """
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r:.100}")
        return Section(f"{self.file} {key}", value)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            raise self.error(key, f"must be a finite number, not {value!r:.100}")
        return value


def _is_finite(value: float) -> bool:
    """Whether a double can hold it: JSON has whole numbers of any length."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_json(directory: Path, name: str, limit: int = MAX_JSON_BYTES) -> Section:
    """One JSON file of the directory, of at most ``limit`` bytes.

    Raises:
        CheckpointError: no such directory or file, unreadable, too large, not JSON, or not an object.
    """
    path = directory / name
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {name}: it is not a Hugging Face model directory")
    try:
        values = json.loads(_read(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return Section(name, values)


def read_json_if_present(directory: Path, name: str) -> Section:
    """The same, or an object without keys where there is no such file.

    Raises:
        CheckpointError: see :func:`read_json`.
    """
    return read_json(directory, name) if (directory / name).exists() else Section(name, {})


def read_text(path: Path) -> str:
    """A file's content.

    Raises:
        CheckpointError: the file is missing, too large or not UTF-8.
    """
    try:
        return _read(path, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.start}") from None


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} has more than {limit // MIB} MiB")
    return data


def architecture_of(config: Section) -> str:
    """The first entry of ``architectures`` in config.json.

    Raises:
        CheckpointError: there is none.
    """
    names = config.texts("architectures", ())
    if not names:
        raise CheckpointError(f"{config.file}: architectures is missing, so the model class is unknown")
    return names[0]
