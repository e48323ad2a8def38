"""Plans of other engines: what could not have been made here is refused, and what is another prompt's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requests import item
from tests.roles.fake_engine import frontend
from tests.roles.fake_sessions import BLUE, RED, folded, media, plan_of
from triptych.core.errors import InvalidRequest, PlaceholderMismatch, SessionMismatch
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.core.request import GenerateRequest
from triptych.roles.session_checks import check_plan, check_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.media import MediaItem

VOCABULARY = 2048
PLAN = plan_of(RED, BLUE)
MARKER = frontend().model.image_token_id


def tokens(change: Callable[[np.ndarray], None]) -> PromptPlan:
    ids = PLAN.token_ids.copy()
    change(ids)
    return replace(PLAN, token_ids=ids)


def put(at: int, token_id: int) -> PromptPlan:
    return tokens(lambda ids: ids.__setitem__(at, token_id))


def moved(by: int) -> PromptPlan:
    first = PLAN.items[0]
    runs = tuple(run._replace(start=run.start + by) for run in first.runs)
    return replace(PLAN, items=(replace(first, runs=runs), *PLAN.items[1:]))


SECOND = PLAN.items[1]
WRONG = {
    "fingerprint": (replace(PLAN, fingerprint=bytes(32)), SessionMismatch, "processor settings"),
    "rule": (replace(PLAN, rule=PositionRule.LINEAR), InvalidRequest, "rule is .*LINEAR"),
    "merge": (replace(PLAN, spatial_merge=4), InvalidRequest, "spatial_merge is 4; this model has 2"),
    "vocabulary": (put(0, VOCABULARY), InvalidRequest, "token id 2048"),
    "negative": (put(0, -1), InvalidRequest, "token id -1"),
    "marker outside": (put(len(PLAN) - 1, MARKER), InvalidRequest, f"token {len(PLAN) - 1} "),
    "text inside": (put(SECOND.start, 5), InvalidRequest, f"token {SECOND.start} .* is 5"),
    "moved": (moved(-1), InvalidRequest, "token 0 "),
    "fewer items": (replace(PLAN, items=PLAN.items[:1]), InvalidRequest, f"token {SECOND.start} "),
    "modality": (
        replace(PLAN, items=(replace(PLAN.items[0], modality=Modality.AUDIO), SECOND)),
        InvalidRequest,
        "media item 0 is audio",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_could_not_have_been_made_here(name: str) -> None:
    plan, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        check_plan(plan, frontend().processor, VOCABULARY)


@pytest.mark.parametrize("pictures", [(), (RED,), (RED, BLUE)])
def test_what_was_made_by_the_same_processor(pictures: tuple[bytes, ...]) -> None:
    check_plan(plan_of(*pictures), frontend().processor, VOCABULARY)


def request(prompt: str | tuple[int, ...], items: tuple[MediaItem, ...] = ()) -> GenerateRequest:
    return GenerateRequest("r", "demo", prompt, media=items)


SHORT = folded(RED, BLUE)
LONG = tuple(PLAN.token_ids.tolist())


@pytest.mark.parametrize("items", [(), media(RED, BLUE)])
@pytest.mark.parametrize("prompt", ["anything at all", SHORT, LONG])
def test_the_same_prompt_in_each_of_its_forms(prompt: str | tuple[int, ...], items: tuple[MediaItem, ...]) -> None:
    check_prompt(request(prompt, items), PLAN, frontend().processor)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ((*SHORT[:-1], 5), f"token {len(SHORT) - 1} is 5 in token_ids and {SHORT[-1]} in"),
        ((5, *SHORT[1:]), f"token 0 is 5 in token_ids and {SHORT[0]} in"),
        ((*LONG[:-1], 5), f"token {len(LONG) - 1} is 5 in token_ids and {LONG[-1]} in"),
        (SHORT[:-1], rf"has {len(SHORT) - 1} tokens, the session's plan {len(LONG)} \({len(SHORT)} before"),
        ((*LONG, 5), f"has {len(LONG) + 1} tokens"),
        ((2**31,) * len(LONG), "token 0 is 2147483648"),
    ],
)
def test_another_prompt(prompt: tuple[int, ...], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        check_prompt(request(prompt), PLAN, frontend().processor)


@pytest.mark.parametrize("items", [media(RED), media(RED, BLUE, RED)])
def test_another_number_of_media(items: tuple[MediaItem, ...]) -> None:
    with pytest.raises(PlaceholderMismatch):
        check_prompt(request(SHORT, items), PLAN, frontend().processor)


def test_a_text_prompt_has_one_form() -> None:
    plan = plan_of()
    check_prompt(request(folded()), plan, frontend().processor)
    with pytest.raises(InvalidRequest, match=r"has 3 tokens, the session's plan \d+$"):
        check_prompt(request((1, 2, 3)), plan, frontend().processor)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6), st.integers(1, 3))
def test_folding_undoes_the_expansion(layout: list[tuple[int, int]], tail: int) -> None:
    """Items of any length between any texts; text ids count up from 100, a marker is 3."""
    short: list[int] = []
    long: list[int] = []
    items = []
    for text, rows in layout:
        words = list(range(100 + len(short), 100 + len(short) + text))
        items.append(item(len(items), (len(long) + text, rows)))
        short += [*words, 3]
        long += [*words, *[3] * rows]
    end = list(range(100 + len(short), 100 + len(short) + tail))
    plan = PromptPlan(np.array(long + end, np.int32), tuple(items), PositionRule.LINEAR, 1, bytes(32))
    check_prompt(request(tuple(short + end)), plan, frontend().processor)
    check_prompt(request(tuple(long + end)), plan, frontend().processor)
    with pytest.raises(InvalidRequest):
        check_prompt(request((*short, *end[:-1], 99)), plan, frontend().processor)


def test_an_item_of_several_runs_folds_into_one_marker() -> None:
    ids = np.array([7, 3, 3, 8, 3, 3, 9], np.int32)
    plan = PromptPlan(ids, (item(1, (1, 2), (4, 2)),), PositionRule.LINEAR, 1, bytes(32))
    check_prompt(request((7, 3, 9)), plan, frontend().processor)
