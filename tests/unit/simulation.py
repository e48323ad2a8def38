"""A runner without tensors, for the scheduler's tests: obeys plans to the letter and checks them on the way.

A slot holds what its token was: id, index and, for media, picture and row. The next token is a hash of all
slots of the sequence read through its block table, so a wrong block or a missing row shows in the tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.requests import EOS
from triptych.core.errors import Internal
from triptych.core.events import Finished, Tokens
from triptych.core.step import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triptych.core.config import SchedulerConfig
    from triptych.core.events import Event
    from triptych.core.request import Request
    from triptych.engine.scheduler import Scheduler

Entry = tuple[int, int, bytes, int]
"""(token id, index, content key or nothing, row number)."""
ROW_BYTES = 1


def entries(request: Request) -> list[Entry]:
    """What the slots of the prompt must hold."""
    found: list[Entry] = [(int(token), index, b"", 0) for index, token in enumerate(request.plan.token_ids)]
    for layout in request.plan.items:
        row = 0
        for run in layout.runs:
            for index in range(run.start, run.end):
                if index not in layout.framing:
                    found[index] = (0, index, layout.content_key, row)
                    row += 1
    return found


def next_token(history: list[Entry]) -> int:
    """2 (eos) to 40."""
    return zlib.crc32(repr(history).encode()) % 39 + 2


def answer_alone(request: Request, context: int) -> list[int]:
    """All tokens of the answer, its end token included."""
    history = entries(request)
    tokens: list[int] = []
    limit = min(request.stopping.max_tokens, context - len(history))
    while len(tokens) < limit:
        token = next_token(history)
        tokens.append(token)
        if token == EOS and len(tokens) > request.stopping.min_tokens and not request.stopping.ignore_eos:
            break
        history.append((token, len(history), b"", 0))
    return tokens


@dataclass
class SimulatedRunner:
    config: SchedulerConfig
    bad_pictures: set[bytes] = field(default_factory=set)
    """Keys whose encoding fails."""
    bad_requests: set[str] = field(default_factory=set)
    """Requests whose next slice fails."""
    plans: list[StepPlan] = field(default_factory=list)
    slots: dict[tuple[int, int], Entry] = field(default_factory=dict)
    rows: dict[bytes, int] = field(default_factory=dict)
    known: dict[str, list[Entry]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.ends:
            del self.known[request_id], self.tables[request_id]
        for key in plan.evictions:
            del self.rows[key]
        for request in plan.starts:
            assert request.request_id not in self.known
            self.known[request.request_id] = entries(request)
            self.tables[request.request_id] = []
        self._check_budgets(plan)
        encoded, failures = self._encode(plan)
        sampled = {}
        for piece in plan.tokens:
            if piece.request_id in self.bad_requests:
                failures.setdefault(piece.request_id, Internal("broken on purpose"))
            if piece.request_id not in failures:
                token = self._compute(piece)
                if token is not None:
                    sampled[piece.request_id] = token
        return StepResult(sampled, tuple(encoded), failures, 0.25 * len(encoded), 0.0)

    def _check_budgets(self, plan: StepPlan) -> None:
        assert sum(piece.length for piece in plan.tokens) <= self.config.max_batched_tokens
        assert len(self.known) <= self.config.max_running_requests
        assert len({piece.request_id for piece in plan.tokens}) == len(plan.tokens)
        assert len(plan.encode) <= self.config.encoder_items
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

    def _compute(self, piece: object) -> int | None:
        table, known = self.tables[piece.request_id], self.known[piece.request_id]
        del table[piece.table_from :]
        assert len(table) == piece.table_from
        table.extend(piece.blocks)
        size = self.config.block_size
        given = {key for _, key in piece.rows}
        for index in range(piece.start, piece.start + piece.length):
            key = known[index][2]
            if key and (key not in self.rows or key not in given):
                return None if self.bad_pictures else self._missing(key)
            self.slots[table[index // size], index % size] = known[index]
        end = piece.start + piece.length
        assert piece.samples == (end == len(known))
        if not piece.samples:
            return None
        token = next_token([self.slots[table[index // size], index % size] for index in range(end)])
        known.append((token, end, b"", 0))
        return token

    def _missing(self, key: bytes) -> None:
        raise AssertionError(f"rows of {key.hex()} are read but not there")


@dataclass
class Heard:
    """What came out for each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Event] = field(default_factory=dict)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event after the end"
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            else:
                self.ends[event.request_id] = event

    def finish(self, request_id: str) -> Finished:
        end = self.ends[request_id]
        assert isinstance(end, Finished), end
        return end


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
