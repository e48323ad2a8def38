"""Guided output always parses: random JSON schemas through the whole engine, on a model of random weights."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.checkpoints import write_checkpoint
from tests.engine.json_schemas import SCHEMAS
from tests.roles.running import ask, options, running
from triptych.cli.loaded import load
from triptych.core.events import EosToken, Finished, FinishReason
from triptych.core.guide import Guide, GuideKind
from triptych.core.request import GenerateRequest, Sampling, Stopping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.roles.desk import Desk

WINDOW = 1024


class Served:
    """A role on a loop that runs between the questions."""

    def __init__(self, runner: asyncio.Runner, role: Desk) -> None:
        self._runner = runner
        self._role = role

    def ask(self, *requests: GenerateRequest) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*(ask(self._role, request) for request in requests))

        return self._runner.run(together())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_checkpoint("qwen3", tmp_path_factory.mktemp("random") / "model")
    loaded = load(str(directory), options(served_name="random", max_context=WINDOW), lambda done, total: None)
    with asyncio.Runner() as runner:
        context = running(loaded)
        yield Served(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


def request(schema: dict[str, Any], temperature: float, seed: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model="random",
        prompt="answer",
        sampling=Sampling(temperature=temperature, seed=seed),
        stopping=Stopping(ignore_eos=True),
        guide=Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)),
    )


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
PAIRS = {"schemas": st.lists(SCHEMAS, min_size=2, max_size=2), "seed": st.integers(0, 2**64 - 1)}


def answers_are_valid(served: Served, schemas: list[dict[str, Any]], seed: int) -> None:
    """Greedy, as the model would have it, and sampled; two different schemas in one batch."""
    requests = [request(schema, temperature, seed) for schema, temperature in zip(schemas, (0.0, 5.0), strict=True)]
    for schema, got in zip(schemas, served.ask(*requests), strict=True):
        assert isinstance(got.end, Finished), got.end
        if got.end.reason is FinishReason.LENGTH:
            # White space and digits are bounded, and still a random model may fill the window with them.
            assert len(got.token_ids) > WINDOW / 2
            event("cut off by the window")
            continue
        assert isinstance(got.end.stop, EosToken)
        jsonschema.validate(json.loads(got.text), schema, cls=jsonschema.Draft202012Validator)
        event("complete")


@settings(max_examples=20, suppress_health_check=CHECKS)
@given(**PAIRS)
def test_answers_of_a_random_model_are_valid(served: Served, schemas: list[dict[str, Any]], seed: int) -> None:
    answers_are_valid(served, schemas, seed)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=CHECKS)
@given(**PAIRS)
def test_many_answers_of_a_random_model_are_valid(served: Served, schemas: list[dict[str, Any]], seed: int) -> None:
    answers_are_valid(served, schemas, seed)
