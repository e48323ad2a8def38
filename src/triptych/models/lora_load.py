"""From a PEFT directory to a LoRA adapter in a decoder's type and on its device.

Everything that can be wrong is an InvalidRequest of one line: adapters come and go while an engine serves.
"""

from __future__ import annotations

import struct
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from triptych.core.errors import CheckpointError, InvalidRequest, Overloaded, one_line
from triptych.models.contract import is_out_of_memory
from triptych.models.lora import LoraAdapter, Update
from triptych.models.lora_config import LoraConfig
from triptych.models.lora_file import WEIGHTS, LoraFile, name_of_a, name_of_b

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from io import BufferedReader

    from triptych.core.adapter import AdapterInfo
    from triptych.models.contract import TextSpec
    from triptych.models.projections import Matrix, Module

_DOMAIN = b"triptych.lora-adapter.v1"
_LENGTH = struct.Struct("<Q")
_SCALING = struct.Struct("<d")


def load_adapter(info: AdapterInfo, max_rank: int, modules: Sequence[Module], spec: TextSpec) -> LoraAdapter:
    """Read a PEFT adapter for the decoder that has these modules, of all its layers and in order.

    Raises:
        InvalidRequest: the directory or the adapter cannot be used; names the file, the tensor or the setting.
        Overloaded: there is not enough memory for it.
    """
    directory = Path(info.path)
    try:
        config = LoraConfig.read(directory, modules, max_rank)
        stored = LoraFile(directory)
        used = frozenset(stored.match(modules, config))
        layers: list[dict[Matrix, Update]] = [{} for _ in range(spec.layers)]
        with stored.open() as file:
            reader = _Reader(stored, file, config, spec)
            for (layer, matrix), members in groupby(modules, lambda module: (module.layer, module.projection.matrix)):
                update = reader.update(list(members), used)
                if update is not None:
                    layers[layer][matrix] = update
        return LoraAdapter(info, reader.digest(), tuple(layers))
    except CheckpointError as error:
        raise InvalidRequest(f"LoRA adapter {info.name!r}: {one_line(error)}") from error
    except OSError as error:
        reason = f"{info.path!r:.200} cannot be read: {error.strerror or error}"
        raise InvalidRequest(f"LoRA adapter {info.name!r}: {reason}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise Overloaded(f"LoRA adapter {info.name!r}: not enough memory on {spec.device}") from error


class _Reader:
    """Puts matched tensors where they stay, and hashes all that makes an adapter's answers.

    The hash is over a domain tag and fields with their lengths before them: for each tensor its name, type, shape,
    scaling and bytes, in the decoder's order.
    """

    def __init__(self, stored: LoraFile, file: BufferedReader, config: LoraConfig, spec: TextSpec) -> None:
        self._stored = stored
        self._file = file
        self._config = config
        self._spec = spec
        self._hasher = blake3()
        self._hash(_DOMAIN)

    def digest(self) -> bytes:
        """32 bytes over what was read."""
        return self._hasher.digest()

    def update(self, members: Sequence[Module], used: Collection[Module]) -> Update | None:
        """The update of one matrix; None where the adapter leaves it alone.

        Raises:
            CheckpointError: numbers that are not finite, or a file that changes meanwhile.
            OSError: the file cannot be read.
        """
        ranks = [self._config.rank_of(module) if module in used else 0 for module in members]
        if not any(ranks):
            return None
        down = self._empty(sum(ranks), members[0].projection.inputs)
        ups = [self._empty(module.projection.outputs, rank) for module, rank in zip(members, ranks, strict=True)]
        for module, rows, up in zip(members, down.split(ranks), ups, strict=True):
            if module in used:
                self._fill(rows, name_of_a(module), 1.0)
                self._fill(up, name_of_b(module), self._config.scaling_of(module))
        return Update(down, ranks, ups)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._spec.dtype, device=self._spec.device)

    def _fill(self, target: torch.Tensor, name: str, scaling: float) -> None:
        stored, data = self._stored.stored(name), self._stored.read(self._file, name)
        self._hash(name.encode(), stored.kind.encode(), repr(stored.shape).encode(), _SCALING.pack(scaling), data)
        scaled = torch.frombuffer(data, dtype=stored.dtype).view(stored.shape).float() * scaling
        value = scaled.to(self._spec.dtype)
        if not value.isfinite().all():
            raise CheckpointError(
                f"{WEIGHTS}: {name}, scaled by {scaling:g}, has numbers that are not finite in {value.dtype}"
            )
        target.copy_(value)

    def _hash(self, *fields: bytes | bytearray) -> None:
        for field in fields:
            self._hasher.update(_LENGTH.pack(len(field)))
            self._hasher.update(field)
