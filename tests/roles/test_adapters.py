"""Loading and unloading adapters by name and id, alone and at the same time; the loader is a fake."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace

import pytest

from triptych.core.adapter import AdapterInfo
from triptych.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    Internal,
    InvalidRequest,
    Overloaded,
    UnsupportedFeature,
    WrongState,
)
from triptych.roles.adapters import Adapters

FIRST = AdapterInfo(1, "first", "/adapters/first")
SECOND = AdapterInfo(2, "second", "/adapters/second")


@dataclass(frozen=True)
class FakeAdapter:
    info: AdapterInfo
    digest: bytes = bytes(32)


@dataclass
class Loader:
    """Remembers what it was asked for; waits while ``gate`` is closed, and raises what ``trouble`` says."""

    asked: list[AdapterInfo] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    trouble: Exception | None = None

    def __call__(self, info: AdapterInfo) -> FakeAdapter:
        self.asked.append(info)
        assert self.gate.wait(60)
        if self.trouble is not None:
            raise self.trouble
        return FakeAdapter(info)


@pytest.fixture
def loader() -> Loader:
    one = Loader()
    one.gate.set()
    return one


async def test_loading_naming_and_forgetting(loader: Loader) -> None:
    adapters = Adapters(loader, 2)
    assert adapters.resolve("") is None
    assert await adapters.load(FIRST) is False
    assert await adapters.load(SECOND) is False
    assert adapters.infos == (FIRST, SECOND)
    held = adapters.resolve("first")
    assert held is not None
    assert adapters.unload("first") == FIRST
    assert held.info == FIRST
    assert adapters.infos == (SECOND,)
    with pytest.raises(AdapterNotFound, match="no LoRA adapter 'first' is loaded; loaded: 'second'"):
        adapters.resolve("first")
    with pytest.raises(AdapterNotFound):
        adapters.unload("first")
    assert await adapters.load(FIRST) is False
    assert adapters.statistics() == {"loaded": 2, "loading": 0, "loads": 3, "failures": 0}
    await adapters.close()


async def test_the_very_same_again_is_loaded_already(loader: Loader) -> None:
    adapters = Adapters(loader, 1)
    await adapters.load(FIRST)
    assert await adapters.load(FIRST) is True  # also where the limit is reached
    assert loader.asked == [FIRST]


@pytest.mark.parametrize("loading", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        replace(FIRST, path="/adapters/elsewhere"),
        replace(FIRST, lora_id=7),
        replace(SECOND, lora_id=FIRST.lora_id),
        replace(SECOND, name=FIRST.name),
    ],
)
async def test_a_name_or_an_id_that_is_taken(loader: Loader, other: AdapterInfo, loading: bool) -> None:
    adapters = Adapters(loader, 8)
    if loading:
        loader.gate.clear()
    first = asyncio.create_task(adapters.load(FIRST))
    while not loader.asked or (not loading and not first.done()):
        await asyncio.sleep(0.001)
    with pytest.raises(AdapterConflict, match=r"'first' with id 1, (being )?loaded from '/adapters/first'"):
        await adapters.load(other)
    loader.gate.set()
    assert await first is False
    assert adapters.infos == (FIRST,)


async def test_two_loads_of_the_same_are_one(loader: Loader) -> None:
    adapters = Adapters(loader, 8)
    loader.gate.clear()
    both = asyncio.gather(adapters.load(FIRST), adapters.load(FIRST))
    while not loader.asked:
        await asyncio.sleep(0.001)
    loader.gate.set()
    assert await both == [False, True]
    assert loader.asked == [FIRST]


async def test_a_load_that_fails_fails_whoever_waits_and_leaves_nothing(loader: Loader) -> None:
    adapters = Adapters(loader, 1)
    loader.trouble = InvalidRequest("no such directory")
    outcomes = await asyncio.gather(adapters.load(FIRST), adapters.load(FIRST), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no such directory"] * 2
    loader.trouble = RuntimeError("a bug")
    with pytest.raises(Internal) as caught:
        await adapters.load(FIRST)
    assert "bug" not in str(caught.value)
    loader.trouble = None
    assert await adapters.load(SECOND) is False
    assert adapters.infos == (SECOND,)
    assert adapters.statistics() == {"loaded": 1, "loading": 0, "loads": 1, "failures": 2}


async def test_those_being_loaded_count(loader: Loader) -> None:
    adapters = Adapters(loader, 2)
    loader.gate.clear()
    loads = [asyncio.create_task(adapters.load(info)) for info in (FIRST, SECOND)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="--max-loras"):
        await adapters.load(AdapterInfo(3, "third", "/adapters/third"))
    loader.gate.set()
    assert await asyncio.gather(*loads) == [False, False]


async def test_a_load_goes_on_without_its_caller_and_cannot_be_unloaded_before_it_has_ended(loader: Loader) -> None:
    adapters = Adapters(loader, 2)
    loader.gate.clear()
    load = asyncio.create_task(adapters.load(FIRST))
    while not loader.asked:
        await asyncio.sleep(0.001)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    with pytest.raises(WrongState, match="being loaded"):
        adapters.unload("first")
    with pytest.raises(AdapterNotFound):
        adapters.resolve("first")
    closing = asyncio.create_task(adapters.close())
    loader.gate.set()
    await closing
    assert adapters.unload("first") == FIRST


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora_id": 0}, "lora_id"),
        ({"lora_id": -1}, "lora_id"),
        ({"name": ""}, "lora_name"),
        ({"name": "n" * 1025}, "lora_name"),
        ({"path": ""}, "source_path"),
        ({"path": "adapters/first"}, "source_path"),
        ({"path": "/a\0b"}, "source_path"),
        ({"path": "/" + "a" * 5000}, "source_path"),
    ],
)
async def test_what_cannot_be_an_adapter(loader: Loader, changes: dict[str, object], field: str) -> None:
    adapters = Adapters(loader, 2)
    with pytest.raises(InvalidRequest, match=field):
        await adapters.load(replace(FIRST, **changes))
    assert loader.asked == []


async def test_switched_off(loader: Loader) -> None:
    off = Adapters(loader, 0)
    with pytest.raises(WrongState, match="--max-loras"):
        await off.load(FIRST)
    with pytest.raises(WrongState, match="--max-loras"):
        off.unload("first")
    with pytest.raises(UnsupportedFeature, match="--max-loras"):
        off.resolve("first")
    assert off.resolve("") is None
    assert off.infos == ()


async def test_an_error_names_a_few_of_many(loader: Loader) -> None:
    adapters = Adapters(loader, 100)
    for number in range(1, 31):
        await adapters.load(AdapterInfo(number, f"{number}" + "x" * 1000, "/adapters"))
    with pytest.raises(AdapterNotFound, match="22 more") as caught:
        adapters.resolve("y" * 1000)
    assert len(str(caught.value)) < 1000
