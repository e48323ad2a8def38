"""A whole engine around a fake model, without its thread."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.engine.fakes import FakeTower, HashModel
from triptych.core.config import SchedulerConfig
from triptych.core.events import Admitted, Failed, Finished, Prefilled, Prompt, Tokens
from triptych.core.step import TokenSlice
from triptych.engine.kv_pool import allocate
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler
from triptych.models.contract import Model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triptych.core.events import EngineEvent
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.request import Request
    from triptych.core.step import StepPlan, StepResult

ROOMY = SchedulerConfig(
    max_batched_tokens=512,
    max_running_requests=16,
    max_context=512,
    block_size=16,
    num_blocks=256,
    encoder_items=8,
    encoder_tokens=4096,
    encoder_cache_bytes=1 << 20,
)


class Bench:
    """Scheduler, runner, fake model and what came out."""

    def __init__(self, model: object = None, tower: FakeTower | None = None, **changes: int) -> None:
        self.config = dataclasses.replace(ROOMY, **changes)
        self.model = model or HashModel()
        self.tower = tower or FakeTower()
        spec = self.model.spec
        self.kv = allocate(spec, self.config.num_blocks, self.config.block_size)
        self.runner = Runner(Model(self.model, self.tower), self.kv, self.config)
        self.scheduler = Scheduler(self.config, spec.row_width * spec.dtype.itemsize)
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, Prompt] = {}
        self.ends: dict[str, Finished | Prefilled | Failed] = {}
        self.admitted: list[str] = []
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        """Those of the sampled tokens, as the runner gave them."""
        self.prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def step(self) -> StepResult:
        plan = self.scheduler.plan(0.0)
        result = self.runner.run(plan)
        self.plans.append(plan)
        self.results.append(result)
        for request_id, logprob in result.logprobs.items():
            self.logprobs.setdefault(request_id, []).append(logprob)
        for request_id, logprobs in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(request_id, []).extend(logprobs)
        self.hear(self.scheduler.apply(result, 0.0))
        self.scheduler.check_integrity()
        return result

    def hear(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, Prompt):
                self.prompts[event.request_id] = event
            elif isinstance(event, Admitted):
                self.admitted.append(event.request_id)
            else:
                self.ends[event.request_id] = event

    def run(self, requests: Iterable[Request] = ()) -> dict[str, list[int]]:
        """Add the requests and step until nothing is live; the tokens of all so far."""
        for request in requests:
            self.scheduler.add([request])
        while self.scheduler.busy:
            self.step()
        statistics = self.scheduler.statistics()
        assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
        return self.tokens


def piece(name: str, start: int, length: int, blocks: tuple[int, ...] = (), **more: object) -> TokenSlice:
    """A slice of a plan made by hand."""
    options = {"table_from": 0, "rows": (), "samples": True} | more
    return TokenSlice(name, start, length, blocks=blocks, **options)


def alone(request: Request, model: object = None, **changes: int) -> list[int]:
    """The answer of a fresh engine that has nothing else to do."""
    return Bench(model, **changes).run([request])[request.request_id]
