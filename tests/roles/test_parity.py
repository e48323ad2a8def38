"""The comparison of one engine with several finds nothing where nothing is wrong, and something where something is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import pytest

from triptych.cli import eval as parity
from triptych.cli.flags import DEMO
from triptych.cli.loaded import LoadedModel, load
from triptych.cli.main import main
from triptych.cli.parity import Compared, Sides, Topology
from triptych.cli.parity_cases import GROUPS, TITLES, Case, Material
from triptych.core.config import MIB
from triptych.transport.memory import MemoryFetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.cli.transports import Transport
    from triptych.core.handles import KvHandle
    from triptych.transport.contract import BlockMemory, Fetch, Fetcher, FetchResult, Move


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(DEMO, replace(parity.OPTIONS, kv_cache_bytes=8 * MIB), lambda done, total: None)


@pytest.fixture(scope="module")
def material(loaded: LoadedModel) -> Material:
    return Material(loaded)


def of(material: Material, group: str, *, every: int) -> list[Case]:
    """Some cases of a group, the last among them."""
    return list(GROUPS[group](material))[::-1][::every]


async def compare(
    loaded: LoadedModel,
    transport: Transport,
    cases: list[Case],
    placeholder: int | None,
    topology: Topology = "p+d",
) -> list[Compared]:
    async with Sides(loaded, transport, topology, cases[0].chunk) as sides:
        return [await sides.compare(case, placeholder) for case in cases]


def test_every_group_has_a_title_and_cases(material: Material) -> None:
    assert TITLES.keys() == GROUPS.keys()
    for name in GROUPS:
        cases = list(GROUPS[name](material))
        assert len(cases) == len({case.name for case in cases}), name
        assert max(len(case.media) for case in cases) == (3 if name == "alike" else 4)


@pytest.mark.parametrize("topology", get_args(Topology))
async def test_engines_apart_answer_as_one(loaded: LoadedModel, material: Material, topology: Topology) -> None:
    every = 23 if topology == "p+d" else 47
    cases = [case for group in GROUPS if group != "chunks" for case in of(material, group, every=every)]
    cases = [case for case in cases if parity.possible(case, topology)]
    for one in await compare(loaded, parity.Memory(), cases, material.placeholder, topology):
        assert one.differences == (), one.case.name
        assert one.tokens >= one.case.outputs
        if one.case.reuse is not None and one.case.reuse.tokens == len(one.case.prompt):
            assert one.reused > 0


@pytest.mark.parametrize("topology", ["e+pd", "e+p+d"])
async def test_alike_pictures_are_not_taken_for_one_another(
    loaded: LoadedModel, material: Material, topology: Topology
) -> None:
    for one in await compare(loaded, parity.Memory(), of(material, "alike", every=2), material.placeholder, topology):
        assert one.differences == (), one.case.name


async def test_a_small_step_is_a_step_of_its_own(loaded: LoadedModel, material: Material) -> None:
    (case, *_) = GROUPS["chunks"](material)
    assert case.chunk == 16
    (one,) = await compare(loaded, parity.Memory(), [case], material.placeholder)
    assert one.differences == ()


class LosesABlock(parity.Memory):
    """Moves all blocks but the first."""

    def fetcher(self, pool: BlockMemory, instance_id: str) -> Fetcher:
        return _LosesABlock(pool, self._exchange)


class _LosesABlock(MemoryFetcher):
    def fetch(
        self, handle: KvHandle, moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> Fetch:
        return super().fetch(handle, moves[1:], seconds, done)


async def test_a_block_that_is_lost_is_found_out(loaded: LoadedModel, material: Material) -> None:
    cases = of(material, "logprobs", every=4)
    for one in await compare(loaded, LosesABlock(), cases, material.placeholder):
        assert one.differences, one.case.name


def test_the_command_prints_a_row_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "parity", "--only", "greedy"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert "greedy, 0-4 pictures" in said
    assert "equal" in said


def test_the_command_ends_with_1_when_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "Memory", LosesABlock)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "parity", "--only", "logprobs", "--kv-transport", "memory"])
    assert ended.value.code == 1
    assert "15 differ" in capsys.readouterr().out


def test_the_names_of_groups_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "parity", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in GROUPS:
        assert name in said
