"""Tensors of a Hugging Face directory, read by name, each straight into the memory where it stays.

Only safetensors: nothing that arrives as a file is unpickled. Files are mapped while they are read and
let go after every ``_MAPPED_BYTES``, the largest tensors first, so that loading peaks near the model's own size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from triptych.core.checkpoint import read_json
from triptych.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAPPED_BYTES = 64 * 1024 * 1024
_NAMES_SHOWN = 5
_STORED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Slot:
    """A stored tensor's name and the memory it fills; a view of a fused weight where several share one."""

    name: str
    target: torch.Tensor
    repeated: bool = False
    """The stored tensor is one row, copied to each row of the target."""

    def under(self, prefix: str) -> Slot:
        """The same with a longer name."""
        return replace(self, name=prefix + self.name)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape that the file must have."""
        return tuple(self.target.shape[1:] if self.repeated else self.target.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not yet read."""

    path: Path
    shape: tuple[int, ...]
    kind: str
    """The file's word for the element type: F32, F16, BF16, ..."""

    @property
    def size(self) -> int:
        """Bytes in the file, for the types that can be loaded."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type.

        Raises:
            CheckpointError: a type that holds no plain weights.
        """
        if self.kind not in _STORED_TYPES:
            raise CheckpointError(f"{self.path.name} stores {self.kind}; supported: {', '.join(_STORED_TYPES)}")
        return _STORED_TYPES[self.kind]


class Checkpoint:
    """The tensors of one directory by name. Opening reads headers only."""

    def __init__(self, directory: Path) -> None:
        """Read every header.

        Raises:
            CheckpointError: no safetensors, or a file that is missing, damaged or disagrees with the index.
        """
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        if (directory / INDEX).is_file():
            self._read_index()
        elif (directory / SINGLE).is_file():
            self.stored = dict(read_header(directory / SINGLE))
        else:
            also = " (only pickled weights, which are never loaded)" if any(directory.glob("*.bin")) else ""
            raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}{also}: safetensors are needed")

    def _read_index(self) -> None:
        named = read_json(self.directory, INDEX).section("weight_map")
        files = {name: named.text(name) for name in named.values}
        for file in sorted(set(files.values())):
            if "/" in file or "\\" in file or file.startswith(".") or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{named.file} names {file!r:.200}, which is not a safetensors file of this directory"
                )
            self.stored.update(read_header(self.directory / file))
        for name, file in files.items():
            if name not in self.stored or self.stored[name].path.name != file:
                raise CheckpointError(f"{INDEX} places {name} in {file}, which does not have it")

    def fill(self, slots: Iterable[Slot], progress: Callable[[int, int], None] | None = None) -> None:
        """Copy stored tensors into their slots, which have been matched.

        Args:
            slots: Places with memory, each name once.
            progress: Called with bytes copied and bytes in all.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        by_name = {slot.name: slot for slot in slots}
        total = sum(self.stored[name].size for name in by_name)
        done = 0
        reader = _Reader()
        with torch.no_grad():
            for name in sorted(by_name, key=lambda n: (-self.stored[n].size, n)):
                reader.copy(name, self.stored[name], by_name[name].target)
                done += self.stored[name].size
                if progress is not None:
                    progress(done, total)

    def match(self, slots: Iterable[Slot], *, ignored: Callable[[str], bool]) -> None:
        """Compare names and shapes with the places they are meant for.

        Args:
            slots: All places; they need no memory.
            ignored: Names that may be left over.

        Raises:
            CheckpointError: a tensor is missing, left over, of another shape or of a type without plain weights.
        """
        by_name = {slot.name: slot for slot in slots}
        missing = [name for name in by_name if name not in self.stored]
        if missing:
            raise CheckpointError(f"{self.directory}: {len(missing)} tensor(s) missing: {some(missing)}")
        extra = [name for name in self.stored if name not in by_name and not ignored(name)]
        if extra:
            raise CheckpointError(f"{self.directory}: {len(extra)} tensor(s) that no part uses: {some(extra)}")
        for name, slot in by_name.items():
            _ = self.stored[name].dtype  # raises for a type that cannot be loaded
            if self.stored[name].shape != slot.stored_shape:
                raise CheckpointError(
                    f"{self.directory}: {name} is {list(self.stored[name].shape)} in the file; "
                    f"config.json makes it {list(slot.stored_shape)}"
                )


class _Reader:
    """Copies tensors out of mapped files, and lets a mapping go before its pages add up."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._mapped = 0

    def copy(self, name: str, stored: Stored, target: torch.Tensor) -> None:
        if stored.path != self._path or self._mapped > _MAPPED_BYTES:
            self._file = None  # the old mapping ends before the new one begins
            self._file = _open(stored.path)
            self._path, self._mapped = stored.path, 0
        try:
            target.copy_(self._file.get_tensor(name))
        except SafetensorError as error:
            raise CheckpointError(f"{stored.path}: {name} cannot be read: {error}") from error
        self._mapped += stored.size


def read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Names and shapes, in the order in which the tensors lie in the file, without gaps.

    Raises:
        CheckpointError: the file is missing, damaged or cut off.
    """
    file = _open(path)
    for name in file.offset_keys():
        entry = file.get_slice(name)
        yield name, Stored(path, tuple(entry.get_shape()), entry.get_dtype())


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off: {error}") from error


def some(names: Sequence[str]) -> str:
    """The first of them, for a message."""
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, ..."
