"""References of other engines: what is of no use here is refused, naming the item and what is wrong with it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.roles.fake_engine import frontend
from tests.roles.fake_sessions import BLUE, RED, plan_of
from tests.roles.row_fakes import BLOCKS, LAYOUT, ROW_BYTES, layout_of, reference, terms
from triptych.core.encoded import SealedReference
from triptych.core.errors import InvalidRequest, ReferenceMismatch, ReferenceNotFound, UnsupportedFeature
from triptych.core.handles import RowLayout
from triptych.core.layout import Grid, Run
from triptych.core.media import Modality
from triptych.roles.reference_checks import check_references

if TYPE_CHECKING:
    from triptych.core.encoded import EncodedItem, EncoderReference, Reference
    from triptych.roles.reference_checks import RowTerms


def check(*references: Reference, of: RowTerms | None = None, now: int | None = None) -> tuple[EncodedItem, ...]:
    return check_references(references, of or terms(), frontend().processor, time.time_ns() if now is None else now)


def moved(**changes: Any) -> EncoderReference:
    """With another handle than the layout needs, or one of another kind."""
    right = reference()
    return replace(right, item=replace(right.item, handle=replace(right.item.handle, **changes)))


def shaped(**changes: Any) -> EncoderReference:
    """A layout that contradicts itself, with as many blocks as it needs."""
    return reference(replace(layout_of(), **changes))


def test_what_an_encoder_engine_makes_is_taken() -> None:
    layouts = [replace(item, runs=(Run(0, item.span),)) for item in plan_of(RED, BLUE, RED).items]
    given = [reference(layout) for layout in layouts]
    items = check(*given)
    assert [item.layout for item in items] == layouts
    assert [item.handle for item in items] == [each.item.handle for each in given]


def test_no_reference_is_no_trouble() -> None:
    assert check() == ()


SQUARE = layout_of(4, 4)
WRONG = {
    # made elsewhere
    "fingerprint": (reference(fingerprint=bytes(32)), ReferenceMismatch, "another model revision .* 0000000000000000"),
    "dtype": (reference(dtype="bfloat16"), ReferenceMismatch, "dtype: float32 against bfloat16$"),
    "row bytes": (reference(row_bytes=96), ReferenceMismatch, f"row_bytes: {ROW_BYTES} against 96$"),
    "blocks of another size": (moved(layout=RowLayout(512)), ReferenceMismatch, "block_bytes: 1024 against 512$"),
    "all of it": (
        reference(dtype="float16", row_bytes=24, handle=moved(layout=RowLayout(1)).item.handle),
        ReferenceMismatch,
        "dtype: .*, row_bytes: .*, block_bytes: ",
    ),
    "transport": (moved(backend="nixl"), InvalidRequest, r"by 'nixl'; .* by 'memory' \(--encoder-transport\)"),
    "sealed": (SealedReference("rows", b""), UnsupportedFeature, "encoder_cache is not supported"),
    # what no encoder of this model makes
    "modality": (shaped(modality=Modality.VIDEO), InvalidRequest, "it is video, which this model does not read"),
    "begins elsewhere": (shaped(runs=(Run(1, 16),)), InvalidRequest, r"1 run\(s\) from 1 to 17; .* one stretch from 0"),
    "two runs": (shaped(runs=(Run(0, 8), Run(8, 8))), InvalidRequest, r"2 run\(s\) from 0 to 16"),
    "a gap": (shaped(runs=(Run(0, 8), Run(9, 8))), InvalidRequest, r"2 run\(s\) from 0 to 17"),
    "time steps": (
        shaped(grid=Grid(2, 4, 8), encoder_tokens=64),
        InvalidRequest,
        r"one time step, not that of \(2, 4, 8\)",
    ),
    "encoder tokens": (shaped(encoder_tokens=65), InvalidRequest, r"\(1, 8, 8\) has 64 patches, .* are 65$"),
    "grid": (shaped(grid=Grid(1, 8, 16), encoder_tokens=128), InvalidRequest, r"16 rows .* grid \(1, 8, 16\) merged 2"),
    "half a cell": (
        shaped(grid=Grid(1, 1, 64)),
        InvalidRequest,
        r"16 rows in 16 positions are not its grid \(1, 1, 64\) merged 2 x 2",
    ),
    "framing": (
        reference(replace(SQUARE, framing=(0,), rows=15)),
        InvalidRequest,
        "15 rows in 16 positions are not its grid",
    ),
    # what contradicts itself
    "too few blocks": (
        reference(layout_of(8, 8), moved(blocks=2).item.handle),
        InvalidRequest,
        "lie in 2 blocks of 1024 bytes; 64 rows of 48 bytes fill 3$",
    ),
    "too many blocks": (moved(blocks=2), InvalidRequest, "16 rows of 48 bytes fill 1$"),
    # what never fits
    "encoder cache": (
        reference(layout_of(46, 48)),
        InvalidRequest,
        f"take {46 * 48 * ROW_BYTES} bytes, .* start with --encoder-cache-bytes {46 * 48 * ROW_BYTES}$",
    ),
    "quota": (reference(layout_of(16, 17)), InvalidRequest, r"13312 bytes up to here, .* 12288 .* \(--encoder-quota\)"),
}


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_no_use_here(name: str, index: int) -> None:
    wrong, error, match = WRONG[name]
    given: list[Reference] = [reference(layout_of(1, 1, key)) for key in range(5, 8)]
    given[index] = wrong
    if name == "quota" and index:
        match = match.replace("13312", str(15 * 1024))
    with pytest.raises(error, match=match) as caught:
        check(*given)
    assert str(caught.value).startswith(f"media item {index}: ")
    assert "\n" not in str(caught.value)


def test_the_clock_of_this_machine_decides() -> None:
    one = reference()
    assert check(one, now=one.expires_unix_nanos - 1)
    for late, said in ((0, r"0\.0 s"), (2_500_000_000, r"2\.5 s")):
        with pytest.raises(ReferenceNotFound, match=f"media item 1: its reference expired {said} ago .* encode it"):
            check(reference(expires_unix_nanos=2**63), one, now=one.expires_unix_nanos + late)


def test_one_output_is_not_two_items() -> None:
    one = reference(layout_of(1, 1, 1))
    other = reference(layout_of(1, 1, 2), one.item.handle)
    with pytest.raises(InvalidRequest, match=r"media item 2: its reference 'rows-\d+' is that of media item 0 too"):
        check(one, reference(layout_of(1, 1, 3)), other)


def test_the_same_picture_encoded_twice_is_two_outputs() -> None:
    items = check(reference(), reference())
    assert items[0].layout == items[1].layout
    assert items[0].handle != items[1].handle


def test_one_identity_has_one_shape() -> None:
    with pytest.raises(InvalidRequest, match=r"media item 1: its content key is that of media item 0, .* \(1, 4, 16\)"):
        check(reference(layout_of(4, 4)), reference(layout_of(2, 8)))


def test_all_items_together_have_to_fit() -> None:
    """12 blocks: 4 items of 3 blocks do, a fifth of 1 does not."""
    fitting = [reference(layout_of(8, 8, key)) for key in range(4)]
    assert len(check(*fitting)) == BLOCKS // LAYOUT.blocks(64 * ROW_BYTES) == 4
    with pytest.raises(InvalidRequest, match="media item 4: the request's encoder rows take 13312 bytes up to here"):
        check(*fitting, reference(layout_of(1, 1, 9)))


@pytest.mark.parametrize("side", [2**10, 2**20, 2**31, 2**62])
def test_nothing_is_allocated_for_a_number(side: int) -> None:
    """A grid of any size is only multiplied; what it comes to is refused."""
    huge = layout_of(side, side)
    with pytest.raises(InvalidRequest, match="media item 0: its encoder rows take"):
        check(reference(huge))
    with pytest.raises(InvalidRequest, match="media item 0: its rows are said to lie in 1 blocks"):
        check(reference(huge, moved().item.handle))
