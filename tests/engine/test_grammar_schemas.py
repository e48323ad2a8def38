"""Guided output always parses and is valid: random schemas, answers picked at random among what is allowed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.guides import answer, guide, new_compiler
from tests.engine.json_schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.engine.grammar import GrammarCompiler


class Bench(NamedTuple):
    runner: asyncio.Runner
    compiler: GrammarCompiler


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:

        async def make() -> GrammarCompiler:
            return new_compiler(cached=4)

        compiler = runner.run(make())
        yield Bench(runner, compiler)
        runner.run(compiler.close())


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_answer_is_valid_by_its_schema(bench: Bench, schema: dict[str, Any], seed: int) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    grammar = bench.runner.run(bench.compiler.compile(guide("json_schema", json.dumps(schema))))
    written = answer(grammar, seed, steps=20_000)
    assert written.ended
    jsonschema.validate(json.loads(written.data.decode()), schema, cls=jsonschema.Draft202012Validator)
