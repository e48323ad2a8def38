"""Obeys a step plan: drops, moves KV, encodes, computes, samples, and looks up wanted log probabilities.

What goes wrong with one request fails that request. A call that fails for a batch is repeated for each part
alone, so that only the bad part is lost; repeating is safe because a slice writes the same slots again, and because
the tokens of a batch are committed (to the history, the penalties, the grammar) only when all of it is computed. Memory
that runs out is no exception: a part that does not fit even alone is refused as overload, and what was allocated
for it is free again. Only a lost device is passed on: no later step could be trusted.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from triptych.core.config import MIB
from triptych.core.errors import Internal, InvalidRequest, Overloaded, TriptychError, one_line
from triptych.core.logprobs import GivenIds
from triptych.core.step import StepResult
from triptych.engine.batch import BatchBuilder
from triptych.engine.encoder import Encoder, Trouble
from triptych.engine.logprobs import token_logprobs
from triptych.engine.sampler import Draw, choose_tokens, not_finite
from triptych.engine.transfers import Transfers
from triptych.models.contract import is_lost, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triptych.core.config import SchedulerConfig
    from triptych.core.logprobs import Candidates, TokenLogprob
    from triptych.core.request import Request
    from triptych.core.step import EncodeTask, StepPlan, TokenSlice
    from triptych.engine.batch import PromptRows
    from triptych.models.contract import KvCache, Model

logger = logging.getLogger(__name__)

PROMPT_LOGIT_BYTES = 32 * MIB
"""Logits that are had at once for the log probabilities of prompt tokens: a chunk's together may be gigabytes."""


class _Encoded(NamedTuple):
    """The keys that are stored now, and what went wrong with the others."""

    stored: tuple[bytes, ...]
    troubles: Mapping[bytes, Trouble]


class _Outcome(NamedTuple):
    """What the slices of a step have given so far, each by request id."""

    sampled: dict[str, int]
    logprobs: dict[str, TokenLogprob]
    prompt_logprobs: dict[str, tuple[TokenLogprob, ...]]
    failures: dict[str, TriptychError]


_Choice = int | TriptychError | None
"""What a slice came to: its next token, why there is none, or nothing where it does not reach the last known token."""


class Runner:
    """Owns the KV storage, the encoder rows and the state of started requests. Belongs to the engine thread.

    Args:
        model: what computes.
        kv: of as many blocks as ``config`` says.
        config: bounds.
        transfers: moves KV between engines; None where none is moved.
    """

    def __init__(self, model: Model, kv: KvCache, config: SchedulerConfig, transfers: Transfers | None = None) -> None:
        self._model = model
        self._spec = model.text.spec
        self._kv = kv
        self._transfers = transfers or Transfers.none()
        self._builder = BatchBuilder(self._spec, config)
        self._encoder = Encoder(model.tower, self._spec.rows)
        self._rows: dict[bytes, torch.Tensor] = {}
        """Encoder rows by key, each [rows, row width] in the decoder's dtype."""

    def check(self, request: Request) -> None:
        """Refuse what the model cannot read. Reads only constants: safe from any thread.

        Raises:
            InvalidRequest: a token id outside the vocabulary, in the prompt, among the candidates for log
                probabilities or as the first token of a KV session; positions of the wrong shape; media without a
                tower, or with rows of the wrong shape; or a KV session that no transport here can read.
            UnsupportedFeature: there is no KV transport for what is asked.
            SessionMismatch: the KV session's blocks are not shaped as these.
        """
        low, high = int(request.plan.token_ids.min()), int(request.plan.token_ids.max())
        if low < 0 or high >= self._spec.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {self._spec.vocab_size}")
        axes = request.positions.table.shape[0]
        if axes != self._spec.position_axes:
            raise InvalidRequest(f"positions have {axes} axes, the model has {self._spec.position_axes}")
        for index, item in enumerate(request.inputs):
            self._encoder.check(index, item)
        for name in ("prompt_candidates", "output_candidates"):
            candidates = getattr(request.logprobs, name)
            self._check_ids(f"response.{name}", candidates.token_ids if isinstance(candidates, GivenIds) else ())
        if request.resume is not None:
            self._check_ids("the KV session's first token", (request.resume.token_id,))
        self._transfers.check(request, self._kv.layout)

    def statistics(self) -> dict[str, dict[str, float]]:
        """What the KV transports count and hold, by ledger name; from any thread, without waiting."""
        return self._transfers.statistics()

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        outside = next((token for token in ids if not 0 <= token < self._spec.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"{name}: token id {outside} is outside the vocabulary of {self._spec.vocab_size}")

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step. Nothing of a request in ``failures`` was committed."""
        for request_id in plan.ends:
            self._builder.end(request_id)
        for key in plan.evictions:
            del self._rows[key]
        for copy in plan.copies:
            self._kv.storage[copy.target].copy_(self._kv.storage[copy.source])
        self._scrub(plan.scrubs)
        self._transfers.begin(plan)
        outcome = _Outcome({}, {}, {}, {})
        for request in plan.starts:
            self._start(request, outcome.failures)
        begin = time.perf_counter()
        encoded = self._encode(plan.encode, outcome.failures) if plan.encode else _Encoded((), {})
        middle = time.perf_counter()
        if plan.tokens:
            self._compute(plan.tokens, encoded.troubles, outcome)
        end = time.perf_counter()
        stored = self._transfers.store(plan.stores, outcome.failures)
        return StepResult(
            sampled=outcome.sampled,
            encoded=encoded.stored,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            failures=outcome.failures,
            encode_seconds=middle - begin if plan.encode else 0.0,
            token_seconds=end - middle,
            stored=stored,
        )

    def _start(self, request: Request, failures: dict[str, TriptychError]) -> None:
        self._builder.start(request)
        if request.resume is not None:
            try:
                self._builder.resume(request.request_id, request.resume.token_id)
            except TriptychError as error:
                failures[request.request_id] = error

    # -- encoder -------------------------------------------------------------------------------

    def _encode(self, tasks: Sequence[EncodeTask], failures: dict[str, TriptychError]) -> _Encoded:
        outputs = self._encoder.encode(
            [self._builder.state(task.request_id).request.inputs[task.item] for task in tasks]
        )
        stored = []
        troubles = {}
        for task, output in zip(tasks, outputs, strict=True):
            if isinstance(output, Trouble):
                logger.error("request %s: media item %d %s", task.request_id, task.item, output.reason)
                failures.setdefault(task.request_id, output.error(task.item))
                troubles[task.key] = output
            else:
                self._rows[task.key] = output
                stored.append(task.key)
        return _Encoded(tuple(stored), troubles)

    # -- decoder -------------------------------------------------------------------------------

    def _compute(self, pieces: Sequence[TokenSlice], troubles: Mapping[bytes, Trouble], outcome: _Outcome) -> None:
        """The slices of a step. ``troubles``: of the keys that this step failed to encode, whoever asked."""
        ready = []
        for piece in pieces:
            self._builder.extend(piece)
            missing = next(((item, key) for item, key in piece.rows if key not in self._rows), None)
            if missing is not None:
                item, key = missing
                trouble = troubles.get(key) or Trouble(Internal, "has no encoder rows")
                outcome.failures.setdefault(piece.request_id, trouble.error(item))
            elif piece.request_id not in outcome.failures:
                ready.append(piece)
        error = self._forward(ready, outcome) if ready else None
        if error is not None:
            for piece in ready:
                if len(ready) > 1:
                    error = self._forward([piece], outcome)
                if error is not None:
                    self._fail(piece, error, outcome)

    def _forward(self, pieces: list[TokenSlice], outcome: _Outcome) -> TriptychError | None:
        """Compute the slices together and sample; when that fails nothing is committed, and the reason comes back."""
        text = self._model.text
        try:
            batch, order, prompts = self._builder.build(pieces, self._rows)
            hidden = text.forward(batch, self._kv)
            logits = text.logits(hidden[: len(order)])
            chosen = self._choose(logits, order)
            output = self._output_logprobs(logits, order, chosen)
            prompt = self._prompt_logprobs(hidden[len(order) :], prompts) if prompts else {}
        except Exception as error:
            if is_lost(error):
                raise
            if not is_out_of_memory(error):
                logger.exception("the model failed on a batch of %d request(s)", len(pieces))
                return Internal("the model failed on this request")
            logger.warning("no memory to compute a batch of %d request(s): %s", len(pieces), one_line(error))
            count, context = sum(piece.length for piece in pieces), max(piece.start + piece.length for piece in pieces)
            return Overloaded(
                f"not enough memory to compute {count} token(s) of a sequence of {context}; retry later, "
                "or lower --max-batched-tokens"
            )
        for row, (piece, choice) in enumerate(zip(order, chosen, strict=True)):
            self._settle(piece, choice, output.get(row), prompt.get(piece.request_id, ()), outcome)
        return None

    def _choose(self, logits: torch.Tensor, order: Sequence[TokenSlice]) -> Sequence[_Choice]:
        """The choice of each slice, whose last token has the logits of the same row."""
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
            next(tokens) if piece.samples else None if good else not_finite()
            for piece, good in zip(order, finite, strict=True)
        ]

    def _output_logprobs(
        self, logits: torch.Tensor, order: Sequence[TokenSlice], chosen: Sequence[_Choice]
    ) -> dict[int, TokenLogprob]:
        """Those of the sampled tokens, by row."""
        rows, tokens, wanted = [], [], []
        for row, (piece, token) in enumerate(zip(order, chosen, strict=True)):
            options = self._builder.state(piece.request_id).request.logprobs
            if options.output and isinstance(token, int):
                rows.append(row)
                tokens.append(token)
                wanted.append(options.output_candidates)
        if not rows:
            return {}
        found = token_logprobs(logits if len(rows) == len(logits) else logits[rows], tokens, wanted)
        return {row: logprob for row, logprob in zip(rows, found, strict=True) if logprob is not None}

    def _prompt_logprobs(
        self, hidden: torch.Tensor, prompts: Sequence[PromptRows]
    ) -> dict[str, tuple[TokenLogprob, ...] | None]:
        """Those of the prompt tokens that the rows of ``hidden`` predict; None where one of a request is not finite.

        The rows of all requests go through the head together, a bounded number at a time.
        """
        tokens: list[int] = []
        wanted: list[Candidates | None] = []
        for request_id, first, end in prompts:
            request = self._builder.state(request_id).request
            tokens += request.plan.token_ids[first:end].tolist()
            wanted += [request.logprobs.prompt_candidates] * (end - first)
        at_once = max(1, PROMPT_LOGIT_BYTES // (4 * self._spec.vocab_size))
        found: list[TokenLogprob | None] = []
        for begin in range(0, len(tokens), at_once):
            some = slice(begin, begin + at_once)
            found += token_logprobs(self._model.text.logits(hidden[some]), tokens[some], wanted[some])
        rest = iter(found)
        answers: dict[str, tuple[TokenLogprob, ...] | None] = {}
        for request_id, first, end in prompts:
            own = [logprob for logprob in itertools.islice(rest, end - first) if logprob is not None]
            answers[request_id] = tuple(own) if len(own) == end - first else None
        return answers

    def _settle(
        self,
        piece: TokenSlice,
        choice: _Choice,
        logprob: TokenLogprob | None,
        prompt: tuple[TokenLogprob, ...] | None,
        outcome: _Outcome,
    ) -> None:
        """Commit what a slice gave, or fail its request; ``prompt`` is None where a number of it is not finite."""
        request_id = piece.request_id
        if prompt is None:
            choice = not_finite()
        if isinstance(choice, int):
            try:
                self._builder.append(request_id, piece.start + piece.length, choice)
            except TriptychError as error:
                choice = error
        if isinstance(choice, TriptychError):
            self._fail(piece, choice, outcome)
            return
        if choice is not None:
            outcome.sampled[request_id] = choice
        if logprob is not None:
            outcome.logprobs[request_id] = logprob
        if prompt:
            outcome.prompt_logprobs[request_id] = prompt

    def _fail(self, piece: TokenSlice, error: TriptychError, outcome: _Outcome) -> None:
        self._scrub(self._builder.blocks(piece.request_id))
        outcome.failures[piece.request_id] = error

    def _scrub(self, blocks: Sequence[int]) -> None:
        """Make blocks finite again: attention multiplies masked slots too, and 0 * NaN is NaN."""
        # In place, block by block: there may be no memory left for a copy.
        for block in blocks:
            torch.nan_to_num_(self._kv.storage[block], posinf=0.0, neginf=0.0)
