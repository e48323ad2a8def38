"""Obeys a step plan: drops, encodes, computes, samples.

What goes wrong with one request fails that request. A call that fails for a batch is repeated for each part
alone, so that only the bad part is lost; repeating is safe because a slice writes the same slots again. Memory
that runs out is no exception: a part that does not fit even alone is refused as overload, and what was allocated
for it is free again. Only a lost device is passed on: no later step could be trusted.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from triptych.core.errors import Internal, InvalidRequest, Overloaded, one_line
from triptych.core.step import StepResult
from triptych.engine.batch import BatchBuilder
from triptych.engine.sampler import Draw, choose_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triptych.core.config import SchedulerConfig
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.errors import TriptychError
    from triptych.core.request import Request
    from triptych.core.step import EncodeTask, StepPlan, TokenSlice
    from triptych.models.contract import KvCache, Model

logger = logging.getLogger(__name__)


class _Trouble(NamedTuple):
    """Why a media item has no rows: the kind of error, and what follows the item's name in its message."""

    kind: type[TriptychError]
    reason: str

    def error(self, item: int) -> TriptychError:
        """For one of the requests that need the rows; ``item`` is its own index of them."""
        return self.kind(f"media item {item} {self.reason}")


class _Encoded(NamedTuple):
    """The keys that are stored now, and what went wrong with the others."""

    stored: tuple[bytes, ...]
    troubles: Mapping[bytes, _Trouble]


class Runner:
    """Owns the KV storage, the encoder rows and the state of started requests. Belongs to the engine thread."""

    def __init__(self, model: Model, kv: KvCache, config: SchedulerConfig) -> None:
        self._model = model
        self._spec = model.text.spec
        self._kv = kv
        self._builder = BatchBuilder(self._spec, config)
        self._rows: dict[bytes, torch.Tensor] = {}
        """Encoder rows by key, each [rows, row width] in the decoder's dtype."""

    def check(self, request: Request) -> None:
        """Refuse what the model cannot read. Reads only constants: safe from any thread.

        Raises:
            InvalidRequest: a token id outside the vocabulary, positions of the wrong shape, or media without a tower.
        """
        low, high = int(request.plan.token_ids.min()), int(request.plan.token_ids.max())
        if low < 0 or high >= self._spec.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {self._spec.vocab_size}")
        axes = request.positions.table.shape[0]
        if axes != self._spec.position_axes:
            raise InvalidRequest(f"positions have {axes} axes, the model has {self._spec.position_axes}")
        if request.inputs and self._model.tower is None:
            raise InvalidRequest("the request has media but the model has no tower")

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step. Nothing of a request in ``failures`` was committed."""
        for request_id in plan.ends:
            self._builder.end(request_id)
        for key in plan.evictions:
            del self._rows[key]
        for request in plan.starts:
            self._builder.start(request)
        failures: dict[str, TriptychError] = {}
        begin = time.perf_counter()
        encoded = self._encode(plan.encode, failures) if plan.encode else _Encoded((), {})
        middle = time.perf_counter()
        sampled = self._compute(plan.tokens, encoded.troubles, failures) if plan.tokens else {}
        return StepResult(
            sampled=sampled,
            encoded=encoded.stored,
            failures=failures,
            encode_seconds=middle - begin if plan.encode else 0.0,
            token_seconds=time.perf_counter() - middle,
        )

    # -- encoder -------------------------------------------------------------------------------

    def _encode(self, tasks: Sequence[EncodeTask], failures: dict[str, TriptychError]) -> _Encoded:
        """Encode the items in one call, or one by one when that fails."""
        inputs = [self._builder.state(task.request_id).request.inputs[task.item] for task in tasks]
        outputs = self._encode_batch(inputs)
        if len(tasks) > 1 and any(isinstance(output, _Trouble) for output in outputs):
            outputs = [self._encode_batch([single])[0] for single in inputs]
        stored = []
        troubles = {}
        for task, output in zip(tasks, outputs, strict=True):
            if isinstance(output, _Trouble):
                logger.error("request %s: media item %d %s", task.request_id, task.item, output.reason)
                failures.setdefault(task.request_id, output.error(task.item))
                troubles[task.key] = output
            else:
                self._rows[task.key] = output
                stored.append(task.key)
        return _Encoded(tuple(stored), troubles)

    def _encode_batch(self, inputs: list[EncoderInput]) -> list[torch.Tensor | _Trouble]:
        """For each input its valid rows, or what is wrong with them."""
        tower = self._model.tower
        if tower is None:
            return [_Trouble(Internal, "needs a tower that the model does not have")] * len(inputs)
        try:
            outputs = tower.encode(inputs)
            if len(outputs) == len(inputs):
                return [self._checked(rows, single.layout.rows) for rows, single in zip(outputs, inputs, strict=True)]
        except Exception as error:
            if not _is_out_of_memory(error):
                _raise_if_lost(error)
                logger.exception("the encoder failed for %d media item(s)", len(inputs))
                return [_Trouble(Internal, "could not be encoded")] * len(inputs)
            logger.warning("no memory to encode %d media item(s) at once: %s", len(inputs), one_line(error))
            return [_too_large(single) for single in inputs]
        return [_Trouble(Internal, f"came back in {len(outputs)} outputs for {len(inputs)} items")] * len(inputs)

    def _checked(self, rows: torch.Tensor, expected: int) -> torch.Tensor | _Trouble:
        if rows.shape != (expected, self._spec.row_width):
            return _Trouble(Internal, f"was encoded to {list(rows.shape)}, not [{expected}, {self._spec.row_width}]")
        if not bool(torch.isfinite(rows).all()):
            return _Trouble(Internal, "was encoded to numbers that are not finite")
        return self._own(rows)

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in the decoder's dtype, in storage of their own: a view would keep its whole batch alive."""
        rows = rows.to(device=self._spec.device, dtype=self._spec.dtype)
        own = rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
        return rows if own else rows.clone(memory_format=torch.contiguous_format)

    # -- decoder -------------------------------------------------------------------------------

    def _compute(
        self, pieces: Sequence[TokenSlice], troubles: Mapping[bytes, _Trouble], failures: dict[str, TriptychError]
    ) -> dict[str, int]:
        """The next tokens by request. ``troubles``: of the keys that this step failed to encode, whoever asked."""
        sampled: dict[str, int] = {}
        ready = []
        for piece in pieces:
            self._builder.extend(piece)
            missing = next(((item, key) for item, key in piece.rows if key not in self._rows), None)
            if missing is not None:
                item, key = missing
                trouble = troubles.get(key) or _Trouble(Internal, "has no encoder rows")
                failures.setdefault(piece.request_id, trouble.error(item))
            elif piece.request_id not in failures:
                ready.append(piece)
        error = self._forward(ready, sampled, failures) if ready else None
        if error is not None:
            for piece in ready:
                if len(ready) > 1:
                    error = self._forward([piece], sampled, failures)
                if error is not None:
                    self._scrub(piece.request_id)
                    failures[piece.request_id] = error
        return sampled

    def _forward(
        self, pieces: list[TokenSlice], sampled: dict[str, int], failures: dict[str, TriptychError]
    ) -> TriptychError | None:
        """Compute the slices together and sample; when that fails nothing is committed, and the reason comes back."""
        try:
            batch, order = self._builder.build(pieces, self._rows)
            logits = self._model.text.forward(batch, self._kv)
            tokens = self._choose(logits, order)
        except Exception as error:
            if not _is_out_of_memory(error):
                _raise_if_lost(error)
                logger.exception("the model failed on a batch of %d request(s)", len(pieces))
                return Internal("the model failed on this request")
            logger.warning("no memory to compute a batch of %d request(s): %s", len(pieces), one_line(error))
            count, context = sum(piece.length for piece in pieces), max(piece.start + piece.length for piece in pieces)
            return Overloaded(
                f"not enough memory to compute {count} token(s) of a sequence of {context}; retry later, "
                "or lower --max-batched-tokens"
            )
        for piece, token in zip(order, tokens, strict=True):
            if token is None:
                self._scrub(piece.request_id)
                failures[piece.request_id] = Internal("the model produced logits that are not finite numbers")
            elif piece.samples:
                sampled[piece.request_id] = token
                self._builder.append(piece.request_id, piece.start + piece.length, token)
        return None

    def _choose(self, logits: torch.Tensor, order: Sequence[TokenSlice]) -> list[int | None]:
        """The next token for each slice that samples, 0 for the others, None where the logits are not finite."""
        draws = [
            Draw(self._builder.state(piece.request_id).chooser, piece.start + piece.length)
            for piece in order
            if piece.samples
        ]
        if len(draws) == len(order):
            return choose_tokens(logits, draws)
        finite = torch.isfinite(logits.amax(dim=1)).tolist()
        sampling = [row for row, piece in enumerate(order) if piece.samples]
        tokens = iter(choose_tokens(logits[sampling], draws) if draws else ())
        return [
            next(tokens) if piece.samples else 0 if good else None for piece, good in zip(order, finite, strict=True)
        ]

    def _scrub(self, request_id: str) -> None:
        """Make the blocks of a request finite again: attention multiplies masked slots too, and 0 * NaN is NaN."""
        # In place, block by block: there may be no memory left for a copy.
        for block in self._builder.blocks(request_id):
            for storage in (*self._kv.keys, *self._kv.values):
                torch.nan_to_num_(storage[block], posinf=0.0, neginf=0.0)


def _too_large(single: EncoderInput) -> _Trouble:
    tokens = single.layout.encoder_tokens
    return _Trouble(
        Overloaded,
        f"does not fit into memory: {tokens} encoder tokens at once; retry later, send a smaller one, "
        "or lower longest_edge (max_pixels) in preprocessor_config.json",
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; the words are those of torch on a CPU, and of CUDA outside torch's allocator."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def _raise_if_lost(error: Exception) -> None:
    """Pass on what no later step survives: a device that is lost.

    Raises:
        AcceleratorError: the error itself.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
