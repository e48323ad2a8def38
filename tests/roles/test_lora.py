"""Real PEFT adapters behind the role: named by requests, kept by those that run, told apart by the prefix cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.adapters import make_adapter
from tests.roles.running import ask, ask_all, load_model, options, running
from triptych.cli.flags import DEMO, model_directory
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import AdapterNotFound, InvalidRequest
from triptych.core.events import Finished, Tokens
from triptych.core.kv_events import BlockStored
from triptych.core.request import GenerateRequest, Sampling, Stopping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from triptych.cli.loaded import LoadedModel
    from triptych.roles.desk import Desk


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(options())


@pytest.fixture
async def role(loaded: LoadedModel) -> AsyncIterator[Desk]:
    async with running(loaded) as one:
        yield one


@pytest.fixture(scope="module")
def infos(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterInfo]:
    directory = tmp_path_factory.mktemp("adapters")
    base = model_directory(DEMO)
    return [
        AdapterInfo(seed, f"adapter {seed}", str(make_adapter(base, directory / f"{seed}", seed=seed)))
        for seed in (1, 2)
    ]


def request(name: str = "", **changes: object) -> GenerateRequest:
    plain = GenerateRequest(
        request_id=f"for {name}",
        model="demo",
        prompt="<|im_start|>user\ndescribe the picture in some detail, please: what is in it?<|im_end|>\n" * 2,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=16, ignore_eos=True),
        lora_name=name,
    )
    return replace(plain, **changes)


async def test_each_adapter_answers_in_its_own_way_alone_and_together(role: Desk, infos: list[AdapterInfo]) -> None:
    for info in infos:
        assert await role.load_adapter(info) is False
    assert role.adapters() == tuple(infos)
    names = ["", *(info.name for info in infos)]
    alone = [(await ask(role, request(name))).token_ids for name in names]
    assert len(set(alone)) == 3
    together = await asyncio.gather(*(ask_all(role, request(name, num_sequences=2)) for name in names))
    assert [[one.token_ids for one in outputs] for outputs in together] == [[ids, ids] for ids in alone]


async def test_what_runs_is_not_touched_by_unloading(role: Desk, infos: list[AdapterInfo]) -> None:
    info = infos[0]
    await role.load_adapter(info)
    long = request(info.name, stopping=Stopping(max_tokens=200, ignore_eos=True))
    expected = (await ask(role, long)).token_ids
    answer = await role.accept(long)
    first = await anext(answer)
    assert isinstance(first, Tokens)
    assert await role.unload_adapter(info.name) == info
    with pytest.raises(AdapterNotFound):
        await role.accept(request(info.name, request_id="late"))
    await role.load_adapter(replace(infos[1], name=info.name))  # another one under the same name
    token_ids = list(first.token_ids)
    async for event in answer:
        if isinstance(event, Tokens):
            token_ids += event.token_ids
    assert tuple(token_ids) == expected
    await answer.aclose()
    assert (await ask(role, long)).token_ids != expected


async def test_cached_blocks_are_an_adapters_own_and_say_so(role: Desk, infos: list[AdapterInfo]) -> None:
    follower = role.subscribe_kv(snapshot=False, start=0)
    await role.load_adapter(infos[0])
    for name in ("", infos[0].name):
        answered = await ask(role, request(name))
        assert isinstance(answered.end, Finished)
        assert answered.end.usage is not None
        assert answered.end.usage.cached_prompt_tokens == 0
    stored: dict[str, list[BlockStored]] = {"": [], infos[0].name: []}
    while not stored[infos[0].name]:
        for change in (await anext(follower)).changes:
            if isinstance(change, BlockStored):
                stored[change.lora_name].append(change)
                assert change.request_id == f"for {change.lora_name}"
    base, adapted = stored[""][0], stored[infos[0].name][0]
    assert base.token_ids == adapted.token_ids
    assert base.block_hash != adapted.block_hash
    assert (base.lora_id, adapted.lora_id) == (0, infos[0].lora_id)


async def test_a_directory_without_an_adapter(role: Desk, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await role.load_adapter(AdapterInfo(1, "none", str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert role.adapters() == ()
    assert isinstance((await ask(role, request())).end, Finished)
