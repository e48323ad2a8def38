"""The compiler's life: what is shared, what is kept, what is bounded, and what ends with what."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine.guides import TOKENS, answer, guide, new_compiler, spell
from triptych.core.errors import Draining, InvalidRequest, Overloaded
from triptych.engine.grammar import GrammarCompiler, guided_available

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
# a choice of this many long words takes a good part of a second to compile
SLOW = [f"{'x' * 40}{index}" for index in range(4000)]
# never finished: a rule for every step of a long way
ENDLESS = guide(
    "ebnf_grammar", "\n".join(["root ::= r0", *(f'r{n} ::= r{n + 1} | "x"' for n in range(4000)), 'r4000 ::= "y"'])
)


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = new_compiler()
    yield made
    await made.close()


def children(pid: int) -> list[int]:
    """Processes that a process has forked and that have not ended."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def forget() -> None:
    """Let go of what finished tasks still hold."""
    await asyncio.sleep(0)
    gc.collect()


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.01)


def test_the_library_is_there() -> None:
    assert guided_available()


def test_without_an_end_of_sequence_there_is_no_compiler() -> None:
    with pytest.raises(ValueError, match="ends it"):
        GrammarCompiler(TOKENS.vocabulary, frozenset())


async def test_nothing_runs_before_the_first_guide(compiler: GrammarCompiler) -> None:
    assert compiler.statistics()["starts"] == 0
    await compiler.compile(guide("json_object"))
    assert compiler.statistics()["starts"] == 1


async def test_a_guide_under_way_is_compiled_once(compiler: GrammarCompiler) -> None:
    asked = guide("choice", "", *SLOW)
    first, second, other = await asyncio.gather(
        compiler.compile(asked), compiler.compile(asked), compiler.compile(guide("regex", "a"))
    )
    assert first is second
    assert other is not first
    assert await compiler.compile(guide("choice", "", *SLOW)) is first
    found = compiler.statistics()
    assert (found["compiled"], found["hits"], found["waiting"]) == (2, 1, 0)


async def test_a_caller_who_leaves_takes_nothing_from_the_others(compiler: GrammarCompiler) -> None:
    asked = guide("choice", "", *SLOW)
    impatient, patient = (asyncio.create_task(compiler.compile(asked)) for _ in range(2))
    await until(lambda: compiler.statistics()["starts"])
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert spell(await patient, SLOW[7]) == "whole"
    alone = asyncio.create_task(compiler.compile(guide("choice", "", "z", *SLOW)))
    await asyncio.sleep(0)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    await until(lambda: compiler.statistics()["compiled"] == 2)


async def test_the_queue_is_bounded() -> None:
    compiler = new_compiler(waiting=2, at_once=1)
    try:
        first = [asyncio.create_task(compiler.compile(guide("regex", f"a{n}"))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 guides are waiting"):
            await compiler.compile(guide("regex", "a2"))
        again = asyncio.create_task(compiler.compile(guide("regex", "a1")))  # needs no place of its own
        assert await again is (await asyncio.gather(*first))[1]
        await compiler.compile(guide("regex", "a2"))
    finally:
        await compiler.close()


async def test_what_is_compiled_is_kept_as_long_as_there_is_room() -> None:
    compiler = new_compiler(cached=2)
    try:
        kept = [await compiler.compile(guide("regex", f"a{n}")) for n in range(2)]
        assert await compiler.compile(guide("regex", "a0")) is kept[0]  # used last
        await compiler.compile(guide("regex", "a2"))
        assert compiler.statistics()["cached"] == 2
        assert compiler.statistics()["in_use"] == 3
        assert await compiler.compile(guide("regex", "a0")) is kept[0]
        assert await compiler.compile(guide("regex", "a1")) is kept[1]  # somebody still holds it
        kept.clear()
        await forget()
        assert compiler.statistics()["in_use"] == compiler.statistics()["cached"] == 2
        assert compiler.statistics()["compiled"] == 3
        await compiler.compile(guide("regex", "a2"))
        assert compiler.statistics()["compiled"] == 4
    finally:
        await compiler.close()


async def test_what_is_kept_is_bounded_in_bytes() -> None:
    compiler = new_compiler(cached_bytes=1)
    try:
        grammar = await compiler.compile(guide("regex", "a"))
        assert compiler.statistics()["cached"] == 0
        assert compiler.statistics()["in_use"] == 1
        assert spell(grammar, "a") == "whole"
    finally:
        await compiler.close()


async def test_guides_in_use_are_bounded() -> None:
    compiler = new_compiler(in_use=2)
    try:
        held = [await compiler.compile(guide("regex", f"a{n}")) for n in range(2)]
        with pytest.raises(Overloaded, match="2 different guides are in use"):
            await compiler.compile(guide("regex", "a2"))
        assert await compiler.compile(guide("regex", "a1")) is held[1]
        del held[0]
        await forget()
        await compiler.compile(guide("regex", "a2"))
    finally:
        await compiler.close()


async def test_a_process_that_is_killed_while_it_compiles_fails_its_guide_only(compiler: GrammarCompiler) -> None:
    good = await compiler.compile(guide("regex", "a+"))
    host = compiler.pid
    before = set(children(host))
    doomed = asyncio.create_task(compiler.compile(ENDLESS))
    await until(lambda: set(children(host)) - before)
    for pid in set(children(host)) - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match=r"guided\.ebnf_grammar: the compiler could not cope"):
        await doomed
    assert answer(good, 1, steps=5).data.strip(b"a") == b""
    await compiler.compile(guide("regex", "b"))
    assert compiler.statistics()["starts"] == 1


async def test_a_host_that_is_killed_is_started_again(compiler: GrammarCompiler) -> None:
    good = await compiler.compile(guide("regex", "a+"))
    os.kill(compiler.pid, signal.SIGKILL)
    assert spell(good, "aa") == "whole"  # it has its own process
    assert spell(await compiler.compile(guide("regex", "b")), "b") == "whole"
    assert compiler.statistics()["starts"] == 2
    assert await compiler.compile(guide("regex", "a+")) is good


async def test_a_grammar_whose_process_is_killed_is_compiled_again(compiler: GrammarCompiler) -> None:
    lost = await compiler.compile(guide("regex", "a+"))
    matcher = lost.matcher()
    for pid in children(compiler.pid):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not lost.alive())
    assert matcher.allowed().any()  # the first mask is known
    matcher.accept(TOKENS.vocabulary.index(b"a"))
    with pytest.raises(InvalidRequest, match=r"guided\.regex"):
        matcher.allowed()
    with pytest.raises(InvalidRequest, match=r"guided\.regex"):
        matcher.allowed()
    found = await compiler.compile(guide("regex", "a+"))
    assert found is not lost
    assert spell(found, "a") == "whole"


async def test_answers_end_their_processes(compiler: GrammarCompiler) -> None:
    grammar = await compiler.compile(guide("regex", "a+"))
    (template,) = children(compiler.pid)
    a, end = TOKENS.vocabulary.index(b"a"), min(TOKENS.ends)
    whole, dropped = grammar.matcher(), grammar.matcher()
    for matcher in (whole, dropped):
        matcher.accept(a)
        matcher.allowed()
    assert len(children(template)) == 2
    whole.accept(end)
    await until(lambda: len(children(template)) == 1)
    del matcher, dropped
    gc.collect()
    await until(lambda: not children(template))


async def test_close_ends_everything(compiler: GrammarCompiler) -> None:
    grammar = await compiler.compile(guide("regex", "a+"))
    under_way = asyncio.create_task(compiler.compile(ENDLESS))
    matcher = grammar.matcher()
    matcher.accept(TOKENS.vocabulary.index(b"a"))
    matcher.allowed()
    await until(lambda: len(children(compiler.pid)) == 2)
    family = [compiler.pid, *children(compiler.pid), *children(children(compiler.pid)[0])]
    await compiler.close()
    with pytest.raises(Draining):
        await under_way
    with pytest.raises(Draining):
        await compiler.compile(guide("regex", "b"))
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
    await compiler.close()


PARENT = """
import asyncio, sys
from tests.engine.guides import TOKENS, guide, new_compiler
from tests.engine.test_grammar import ENDLESS, children, until

async def main():
    compiler = new_compiler()
    matcher = (await compiler.compile(guide("regex", "a+"))).matcher()
    matcher.accept(TOKENS.vocabulary.index(b"a"))
    matcher.allowed()
    task = asyncio.create_task(compiler.compile(ENDLESS))
    await until(lambda: len(children(compiler.pid)) == 2)
    first, second = children(compiler.pid)
    print(compiler.pid, first, second, *children(first), flush=True)
    await task

asyncio.run(main())
"""


async def test_nothing_outlives_an_engine_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    family = [int(word) for word in (await parent.stdout.readline()).split()]
    assert len(family) == 4
    parent.kill()
    await parent.wait()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
