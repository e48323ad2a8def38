"""What is known of items, bounded by the memory that it takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.references import steps, timed
from tests.sessions import picture
from triptych.roles.known_items import KnownItems, size_of

if TYPE_CHECKING:
    from triptych.core.layout import ItemLayout

PICTURE, CLIP = picture(0, 2, 3), timed(tuple(0.1 + step for step in range(384)))


def named(layout: ItemLayout, key: int) -> ItemLayout:
    return replace(layout, content_key=key.to_bytes(32, "big"))


def test_a_long_video_counts_as_much_as_it_takes() -> None:
    assert size_of(PICTURE) == 1024
    assert size_of(CLIP) == 1024 + 384 * 32
    known = KnownItems(size_of(CLIP) + size_of(PICTURE))
    known.remember(named(PICTURE, 1))
    known.remember(named(PICTURE, 2))
    known.remember(named(CLIP, 3))
    assert [known.find(named(PICTURE, key).content_key) is None for key in (1, 2, 3)] == [True, False, False]
    assert known.statistics() == {"items": 2, "bytes": size_of(CLIP) + 1024, "hits": 2, "misses": 1}


def test_the_least_recently_used_goes_first() -> None:
    known = KnownItems(2048)
    for key in (1, 2):
        known.remember(named(PICTURE, key))
    known.find(named(PICTURE, 1).content_key)
    known.remember(named(PICTURE, 3))
    assert known.find(named(PICTURE, 2).content_key) is None
    assert known.find(named(PICTURE, 1).content_key) is not None


def test_one_that_comes_again_takes_the_place_of_itself() -> None:
    known = KnownItems(4096)
    for layout in (PICTURE, steps(5), PICTURE):
        known.remember(named(layout, 1))
    assert known.find(named(PICTURE, 1).content_key) == named(PICTURE, 1)
    assert known.statistics()["bytes"] == 1024


def test_one_that_is_larger_than_all_drives_nothing_out() -> None:
    known = KnownItems(2048)
    known.remember(named(PICTURE, 1))
    known.remember(named(CLIP, 2))
    assert known.statistics()["items"] == 1
    assert known.find(named(PICTURE, 1).content_key) is not None


@pytest.mark.parametrize("kind", ["pictures", "clips", "runs"])
def test_it_takes_no_more_than_it_says(kind: str) -> None:
    known = KnownItems(10 * 2**20)

    def made(key: int) -> ItemLayout:
        match kind:
            case "pictures":
                return named(picture(0, 200, 300), 2**200 + key)
            case "clips":
                return named(timed(tuple(key + step / 7 for step in range(384))), 2**200 + key)
        return named(steps(384, tuple(range(300, 900, 3))), 2**200 + key)

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for key in range(100):
            known.remember(made(key))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = known.statistics()
    assert said["items"] == 100
    assert 0.5 * said["bytes"] < after - before < said["bytes"]
