"""A runner without tensors, for the scheduler's tests: obeys plans to the letter and checks them on the way.

Runners of two schedulers share an ``Exchange``: one stores prompts there, the other loads them, when the test says so.

A slot holds what its token was: id, index, adapter and, for media, picture and row. The next token is a hash of the
seed and of all slots of the sequence read through its block table, so a wrong block or a missing row shows in the
tokens. Log probabilities are such hashes too.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.requests import EOS
from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import Internal, KvSessionNotFound, TriptychError
from triptych.core.events import Admitted, Finished, Prefilled, Prompt, Tokens
from triptych.core.handles import Handle, KvHandle, KvLayout
from triptych.core.kv_events import BlockRemoved, BlockStored
from triptych.core.logprobs import TokenLogprob
from triptych.core.step import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from triptych.core.config import SchedulerConfig
    from triptych.core.events import EngineEvent
    from triptych.core.kv_events import KvChange
    from triptych.core.request import Request
    from triptych.core.step import Load, Store, TokenSlice
    from triptych.engine.scheduler import Scheduler

Entry = tuple[int, int, bytes, int, int]
"""(token id, index, content key or nothing, row number, adapter's id or 0)."""
RUBBISH: Entry = (-1, -1, b"", -1, -1)
"""What a load may leave in its blocks before it has ended well."""
ROW_BYTES = 1


def entries(request: Request) -> list[Entry]:
    """What the slots of the prompt must hold."""
    lora = _lora(request)
    found: list[Entry] = [(int(token), index, b"", 0, lora) for index, token in enumerate(request.plan.token_ids)]
    for layout in request.plan.items:
        row = 0
        for run in layout.runs:
            for index in range(run.start, run.end):
                if index not in layout.framing:
                    found[index] = (0, index, layout.content_key, row, lora)
                    row += 1
    return found


def _lora(request: Request) -> int:
    return request.adapter.info.lora_id if request.adapter else 0


def next_token(request: Request, history: list[Entry]) -> int:
    """2 (eos) to 40."""
    return zlib.crc32(repr((request.sampling.seed, history)).encode()) % 39 + 2


def logprob(history: list[Entry], token: int) -> float:
    """Of ``token`` after ``history``, whoever asks."""
    return -(zlib.crc32(repr((token, history)).encode()) % 10_000) / 1000


def prompt_logprobs(request: Request) -> list[float | None]:
    """What a request that asked for them hears of its prompt."""
    history, start = entries(request), max(request.logprobs.prompt_start, 1)
    tokens = request.plan.token_ids.tolist()
    return [None] * start + [logprob(history[:index], tokens[index]) for index in range(start, len(history))]


def answer_alone(request: Request, context: int) -> list[int]:
    """All tokens of the answer, its end token included."""
    history = entries(request)
    tokens: list[int] = []
    limit = min(request.stopping.max_tokens, context - len(history))
    while len(tokens) < limit:
        token = next_token(request, history)
        tokens.append(token)
        counts = len(tokens) > request.stopping.min_tokens and not request.stopping.ignore_eos
        if token == EOS and (counts or request.grammar is not None):
            break
        history.append((token, len(history), b"", 0, _lora(request)))
    return tokens


@dataclass
class Session:
    """One prompt's blocks in their runner."""

    runner: SimulatedRunner
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    sealed: bool = False


@dataclass
class Exchange:
    """The sessions of all runners. Whose blocks are read no more is told to nobody but the test."""

    sessions: dict[str, Session] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    """Names of sessions that are over."""

    def end(self, session_id: str) -> None:
        if self.sessions.pop(session_id, None) is not None:
            self.freed.append(session_id)

    def take_freed(self) -> list[str]:
        freed, self.freed = self.freed, []
        return freed


@dataclass
class SimulatedRunner:
    config: SchedulerConfig
    exchange: Exchange = field(default_factory=Exchange)
    generations: npt.NDArray[np.int64] | None = None
    """The ledger's; None where nothing is stored."""
    bad_stores: set[str] = field(default_factory=set)
    """Requests whose next store goes wrong."""
    loads: dict[int, Load] = field(default_factory=dict)
    """Those under way."""
    cancelled: set[int] = field(default_factory=set)
    bad_pictures: set[bytes] = field(default_factory=set)
    """Keys whose encoding fails."""
    bad_requests: set[str] = field(default_factory=set)
    """Requests whose next slice fails."""
    plans: list[StepPlan] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    """Those that have state here."""
    slots: dict[tuple[int, int], Entry] = field(default_factory=dict)
    rows: dict[bytes, int] = field(default_factory=dict)
    known: dict[str, list[Entry]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.ends:
            del self.known[request_id], self.tables[request_id], self.requests[request_id]
        for key in plan.evictions:
            del self.rows[key]
        self._move(plan)
        for request in plan.starts:
            assert request.request_id not in self.known
            self.requests[request.request_id] = request
            self.known[request.request_id] = entries(request)
            if request.resume is not None:
                known = self.known[request.request_id]
                known.append((request.resume.token_id, len(known), b"", 0, _lora(request)))
            self.tables[request.request_id] = []
        self._check_budgets(plan)
        encoded, failures = self._encode(plan)
        result = StepResult({}, tuple(encoded), {}, {}, failures, 0.25 * len(encoded))
        for piece in plan.tokens:
            if piece.request_id in self.bad_requests:
                failures.setdefault(piece.request_id, Internal("broken on purpose"))
            if piece.request_id not in failures:
                self._compute(piece, result)
        for store in plan.stores:
            if store.request_id not in failures:
                self._store(store, result, failures)
        return result

    def _move(self, plan: StepPlan) -> None:
        for session_id in plan.withdrawals:
            self.exchange.end(session_id)
        for number in plan.cancels:
            assert number not in self.cancelled
            self.cancelled.add(number)
        for copy in plan.copies:
            self._copy(self, copy.source, copy.target)
        for block in plan.scrubs:
            assert block not in self._loading()
            for slot in self._slots_of(block):
                if self.slots.get(slot) == RUBBISH:
                    del self.slots[slot]
        for load in plan.loads:
            targets = [target for _, target in load.moves]
            assert len(set(targets)) == len(targets)
            assert not self._loading() & set(targets)
            self.loads[load.number] = load
            self.slots.update((slot, RUBBISH) for target in targets for slot in self._slots_of(target))

    def _slots_of(self, block: int) -> list[tuple[int, int]]:
        return [(block, offset) for offset in range(self.config.block_size)]

    def _copy(self, producer: SimulatedRunner, source: int, target: int) -> None:
        for theirs, ours in zip(self._slots_of(source), self._slots_of(target), strict=True):
            if theirs in producer.slots:
                self.slots[ours] = producer.slots[theirs]
            else:
                self.slots.pop(ours, None)

    def _loading(self) -> set[int]:
        return {target for load in self.loads.values() for _, target in load.moves}

    def fetch(self, number: int, *, broken: bool = False) -> TriptychError | None:
        """A load comes to its end: what the scheduler is to be told."""
        load = self.loads.pop(number)
        session = self.exchange.sessions.get(load.handle.session_id)
        if broken or session is None or not session.sealed:
            return KvSessionNotFound("the session is not there")
        producer = session.runner
        for source, target in load.moves:
            block = session.blocks[source]
            assert producer.generations is not None
            assert producer.generations[block] == session.generations[source], "a block of a session was given away"
            self._copy(producer, block, target)
        self.exchange.end(load.handle.session_id)
        return None

    def _store(self, store: Store, result: StepResult, failures: dict[str, TriptychError]) -> None:
        if store.opens:
            assert store.session_id not in self.exchange.sessions
            self.exchange.sessions[store.session_id] = Session(self)
        if store.request_id in self.bad_stores:
            self.exchange.end(store.session_id)
            failures[store.request_id] = Internal("could not be stored, on purpose")
            return
        session = self.exchange.sessions.get(store.session_id)
        if session is None:  # it was withdrawn
            failures[store.request_id] = Internal("the session is gone")
            return
        assert not session.sealed
        assert self.generations is not None
        session.blocks += store.blocks
        session.generations += (int(self.generations[block]) for block in store.blocks)
        session.sealed = store.seals
        result.stored[store.session_id] = handle(store.session_id, len(session.blocks)) if store.seals else None

    def _check_budgets(self, plan: StepPlan) -> None:
        assert sum(piece.length for piece in plan.tokens) <= self.config.max_batched_tokens
        assert len(plan.tokens) <= self.config.max_running_requests
        assert len({piece.request_id for piece in plan.tokens}) == len(plan.tokens)
        fresh = [
            task for task in plan.encode if isinstance(self.requests[task.request_id].inputs[task.item], EncoderInput)
        ]
        assert len(fresh) <= self.config.encoder_items
        requests = {task.request_id for task in plan.encode}
        assert requests <= {piece.request_id for piece in plan.tokens}

    def _encode(self, plan: StepPlan) -> tuple[list[bytes], dict[str, Internal]]:
        encoded: list[bytes] = []
        failures: dict[str, Internal] = {}
        for task in plan.encode:
            assert task.key not in self.rows
            if task.key in self.bad_pictures:
                failures[task.request_id] = Internal("a bad picture")
                continue
            self.rows[task.key] = len({entry[3] for entry in self.known[task.request_id] if entry[2] == task.key})
            encoded.append(task.key)
        assert sum(self.rows.values()) * ROW_BYTES <= self.config.encoder_cache_bytes
        return encoded, failures

    def _compute(self, piece: TokenSlice, result: StepResult) -> None:
        table, known = self.tables[piece.request_id], self.known[piece.request_id]
        del table[piece.table_from :]
        assert len(table) == piece.table_from
        table.extend(piece.blocks)
        assert not self._loading() & set(table), "a block is computed with while it is loaded"
        size = self.config.block_size
        given = {key for _, key in piece.rows}
        for index in range(piece.start, piece.start + piece.length):
            key = known[index][2]
            if key and (key not in self.rows or key not in given):
                assert self.bad_pictures, f"rows of {key.hex()} are read but not there"
                return
            self.slots[table[index // size], index % size] = known[index]
        end = piece.start + piece.length
        assert piece.samples == (end == len(known))
        # what lies behind the last token is multiplied too
        assert all(self.slots.get(slot) != RUBBISH for block in table for slot in self._slots_of(block))
        history = [self.slots[table[index // size], index % size] for index in range(end)]
        request = self.requests[piece.request_id]
        if request.logprobs.prompt:
            tokens = request.plan.token_ids.tolist()
            due = range(max(piece.start + 1, request.logprobs.prompt_start), min(end + 1, len(tokens)))
            result.prompt_logprobs[piece.request_id] = tuple(
                TokenLogprob(logprob(history[:index], tokens[index]), 1) for index in due
            )
        if piece.samples:
            token = result.sampled[piece.request_id] = next_token(request, history)
            if request.logprobs.output:
                result.logprobs[piece.request_id] = TokenLogprob(logprob(history, token), 1)
            known.append((token, end, b"", 0, _lora(request)))


def handle(session_id: str, blocks: int) -> KvHandle:
    return Handle(session_id, "simulated", "p", KvLayout(1, 1, 1, 1, "float32", 4), blocks, b"")


@dataclass
class Heard:
    """What came out for each request."""

    admitted: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    ends: dict[str, EngineEvent] = field(default_factory=dict)

    def take(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event after the end"
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.logprobs.setdefault(event.request_id, []).extend(each.logprob for each in event.logprobs)
            elif isinstance(event, Admitted):
                assert event.request_id not in self.admitted
                assert event.request_id not in self.tokens
                self.admitted.append(event.request_id)
            elif isinstance(event, Prompt):
                assert event.request_id not in self.prompts
                assert event.request_id not in self.tokens, "the prompt came after tokens"
                self.prompts[event.request_id] = event
            else:
                self.ends[event.request_id] = event

    def finish(self, request_id: str) -> Finished:
        end = self.ends[request_id]
        assert isinstance(end, Finished), end
        return end

    def prefilled(self, request_id: str) -> Prefilled:
        end = self.ends[request_id]
        assert isinstance(end, Prefilled), end
        return end


@dataclass
class Mirror:
    """What a listener knows of the prefix cache."""

    block_size: int
    findable: set[bytes] = field(default_factory=set)
    stored: dict[bytes, BlockStored] = field(default_factory=dict)
    """Everything that ever was."""

    def take(self, changes: Iterable[KvChange]) -> None:
        for change in changes:
            if isinstance(change, BlockStored):
                assert change.block_hash not in self.findable
                assert change.parent is None or change.parent in self.stored
                assert len(change.token_ids) == self.block_size
                self.findable.add(change.block_hash)
                self.stored[change.block_hash] = change
            else:
                assert isinstance(change, BlockRemoved)
                self.findable.remove(change.block_hash)

    def prefix(self, stored: BlockStored) -> list[int]:
        """All tokens up to the end of the block."""
        before = self.prefix(self.stored[stored.parent]) if stored.parent is not None else []
        return before + list(stored.token_ids)


def step(scheduler: Scheduler, runner: SimulatedRunner, heard: Heard, now: float = 0.0) -> StepPlan:
    plan = scheduler.plan(now)
    heard.take(scheduler.apply(runner.run(plan), now))
    scheduler.check_integrity()
    return plan


def run_all(scheduler: Scheduler, runner: SimulatedRunner, heard: Heard, limit: int = 2000) -> int:
    """Steps until nothing is live; returns how many."""
    for number in range(limit):
        if not scheduler.busy:
            return number
        step(scheduler, runner, heard)
    raise AssertionError(f"not done after {limit} steps")
