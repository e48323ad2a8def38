"""A LoRA adapter's tensors, in PEFT's adapter_model.safetensors.

Names, types and shapes are compared with the decoder's before a tensor is read. Then the file is read, not mapped: an
adapter is loaded beside running requests, and a mapped file that somebody writes to meanwhile ends the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.config import MIB
from triptych.core.errors import CheckpointError
from triptych.models.lora_config import CONFIG
from triptych.models.projections import NAMES
from triptych.models.weights import read_header, some

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import BufferedReader
    from pathlib import Path

    from triptych.models.lora_config import LoraConfig
    from triptych.models.projections import Module
    from triptych.models.weights import Stored

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_LENGTH_BYTES = 8
"""The file begins with the header's length; the tensors follow the header."""
_MAX_HEADER_BYTES = 16 * MIB
"""A thousand layers need 2."""


def name_of_a(module: Module) -> str:
    """The tensor [rank, inputs]."""
    return f"{_PREFIX}{module.name}.lora_A.weight"


def name_of_b(module: Module) -> str:
    """The tensor [outputs, rank]."""
    return f"{_PREFIX}{module.name}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class _Place:
    stored: Stored
    offset: int
    """From the beginning of the file."""


class LoraFile:
    """The file of one directory. Opening reads its header only."""

    def __init__(self, directory: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: no such file; damaged, or with tensors of a type that holds no plain weights.
        """
        self._path = directory / WEIGHTS
        if not self._path.is_file():
            also = " (only pickled weights, which are never loaded)" if (directory / _PICKLED).is_file() else ""
            raise CheckpointError(f"{directory} has no {WEIGHTS}{also}")
        with self._path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{self._path} is damaged: its header has {length} bytes")
        offset = _LENGTH_BYTES + length
        self._places: dict[str, _Place] = {}
        for name, stored in read_header(self._path):
            self._places[name] = _Place(stored, offset)
            try:
                offset += stored.size
            except CheckpointError as error:
                raise CheckpointError(f"{name!r:.200}: {error}") from error

    def match(self, modules: Sequence[Module], config: LoraConfig) -> list[Module]:
        """Compare names and shapes with the modules of the decoder; those that the file adapts.

        Raises:
            CheckpointError: a tensor is missing, left over or misshapen; names it.
        """
        self._refuse_unknown(modules)
        used, extra, missing = [], [], []
        for module in modules:
            names = (name_of_a(module), name_of_b(module))
            there = [name for name in names if name in self._places]
            covered = config.covers(module)
            if there and covered is False:
                extra += there
            if there or covered:
                used.append(module)
                missing += [name for name in names if name not in self._places]
        if extra:
            raise CheckpointError(f"{WEIGHTS}: {len(extra)} tensor(s) that {CONFIG} does not cover: {some(extra)}")
        if missing:
            raise CheckpointError(f"{WEIGHTS}: {len(missing)} tensor(s) missing: {some(missing)}")
        if not used:
            raise CheckpointError(f"{WEIGHTS} holds no tensors")
        for module in used:
            rank = config.rank_of(module)
            self._check_shape(name_of_a(module), (rank, module.projection.inputs), rank)
            self._check_shape(name_of_b(module), (module.projection.outputs, rank), rank)
        return used

    def stored(self, name: str) -> Stored:
        """Type and shape of a tensor."""
        return self._places[name].stored

    def open(self) -> BufferedReader:
        """For :meth:`read`.

        Raises:
            OSError: the file is gone.
        """
        return self._path.open("rb")

    def read(self, file: BufferedReader, name: str) -> bytearray:
        """A tensor's bytes.

        Raises:
            CheckpointError: the file has become shorter.
            OSError: it cannot be read.
        """
        place = self._places[name]
        data = bytearray(place.stored.size)
        file.seek(place.offset)
        if file.readinto(data) != len(data):
            raise CheckpointError(f"{WEIGHTS} was changed while it was read: {name} is cut off")
        return data

    def _refuse_unknown(self, modules: Sequence[Module]) -> None:
        known = {name for module in modules for name in (name_of_a(module), name_of_b(module))}
        unknown = [f"{name!r:.200}" for name in self._places if name not in known]
        if unknown:
            stem = name_of_a(modules[0]).partition(".0.")[0]
            raise CheckpointError(
                f"{WEIGHTS}: {len(unknown)} tensor(s) that are not lora_A.weight or lora_B.weight of a text decoder's "
                f"projection ({stem}.N, {NAMES}): {some(unknown)}"
            )

    def _check_shape(self, name: str, expected: tuple[int, int], rank: int) -> None:
        shape = self._places[name].stored.shape
        if shape != expected:
            raise CheckpointError(
                f"{WEIGHTS}: {name} is {list(shape)} in the file; rank {rank} on this model makes it {list(expected)}"
            )
