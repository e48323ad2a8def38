from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requests import item, request
from triptych.core.layout import Grid
from triptych.engine.prefix import BlockChain, chain_seed

if TYPE_CHECKING:
    from triptych.core.layout import ItemLayout

TEXT = list(range(10, 42))


def chain(
    tokens: list[int],
    items: list = (),
    *,
    salt: str = "",
    adapter: bytes = b"",
    output: tuple[int, ...] = (),
    size: int = 4,
) -> list[bytes]:
    prompt = request("r", tokens, items).plan
    blocks = BlockChain(prompt, chain_seed(salt, adapter), size)
    blocks.extend(output, (len(tokens) + len(output)) // size)
    return blocks.hashes


def one_grid(layout: ItemLayout) -> ItemLayout:
    """In place of that which follows from its rows."""
    return replace(layout, grid=Grid(1, 4, 4))


def shared(one: list[bytes], two: list[bytes]) -> int:
    """Leading blocks in common; behind the first difference nothing may agree."""
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert not set(one[common:]) & set(two[common:])
    return common


def test_only_full_blocks_have_a_name() -> None:
    assert len(chain(TEXT[:11])) == 2


def test_the_first_other_token_ends_what_is_shared() -> None:
    other = [*TEXT[:13], 99, *TEXT[14:]]
    assert shared(chain(TEXT), chain(other)) == 3


def test_salts_share_nothing() -> None:
    assert shared(chain(TEXT, salt="a"), chain(TEXT, salt="b")) == 0
    assert shared(chain(TEXT, salt="\ud800"), chain(TEXT, salt="")) == 0


def test_adapters_share_nothing_and_are_no_salts() -> None:
    assert shared(chain(TEXT, adapter=b"a" * 32), chain(TEXT, adapter=b"b" * 32)) == 0
    assert shared(chain(TEXT, adapter=b"a" * 32), chain(TEXT)) == 0
    assert shared(chain(TEXT, adapter=b"a"), chain(TEXT, salt="a")) == 0
    assert shared(chain(TEXT, salt="ab", adapter=b"c"), chain(TEXT, salt="a", adapter=b"bc")) == 0
    assert shared(chain(TEXT, salt="s", adapter=b"a"), chain(TEXT, salt="s", adapter=b"a")) == 8


def test_a_chain_goes_on_where_another_one_is() -> None:
    items = [item(1, (2, 5)), item(2, (9, 12))]
    plan = request("r", TEXT[:26], items).plan
    one = BlockChain(plan, chain_seed("", b""), 4)
    one.extend((), 4)
    two = BlockChain(plan, chain_seed("", b""), 4)
    two.adopt(one)
    one.extend((50, 51), 7)
    assert len(two.hashes) == 4
    two.extend((60, 61), 7)
    assert two.hashes == chain(TEXT[:26], items, output=(60, 61))
    assert one.hashes == chain(TEXT[:26], items, output=(50, 51))


def test_a_block_knows_its_tokens_wherever_they_come_from() -> None:
    blocks = BlockChain(request("r", TEXT[:6]).plan, chain_seed("", b""), 4)
    output = [50, 51, 52, 53, 54, 55]
    assert [blocks.token_ids(output, index) for index in range(3)] == [
        tuple(TEXT[:4]),
        (*TEXT[4:6], 50, 51),
        (52, 53, 54, 55),
    ]


def test_two_pictures_share_the_blocks_before_their_first_position() -> None:
    one, two = chain(TEXT, [item(1, (9, 12))]), chain(TEXT, [item(2, (9, 12))])
    assert shared(one, two) == 2
    assert shared(one, chain(TEXT, [item(1, (9, 12))])) == 8


def test_the_second_picture_matters_after_a_common_first_one() -> None:
    first = item(1, (4, 4))
    assert shared(chain(TEXT, [first, item(2, (13, 6))]), chain(TEXT, [first, item(3, (13, 6))])) == 3


def test_a_picture_is_not_its_placeholders() -> None:
    layout = item(1, (4, 8))
    ids = request("r", TEXT, [layout]).plan.token_ids.tolist()
    assert shared(chain(ids), chain(TEXT, [layout])) == 1


def test_which_part_of_the_picture_stands_in_a_block_is_part_of_its_name() -> None:
    # the same placeholder ids everywhere: only the offsets inside the item differ
    ids = [3] * 16
    whole = chain(ids, [one_grid(item(1, (0, 16)))])
    assert shared(whole, chain(ids, [one_grid(item(1, (0, 8))), one_grid(item(1, (8, 8)))])) == 2
    assert shared(whole, chain(ids, [one_grid(item(1, (0, 6))), one_grid(item(1, (6, 10)))])) == 1


def test_the_grid_of_a_picture_is_part_of_the_name() -> None:
    """Its rows have other positions in another one, and who claims the same content is not believed."""
    layout = item(1, (5, 8))
    assert shared(chain(TEXT, [layout]), chain(TEXT, [one_grid(layout)])) == 1


def test_sparse_runs_count_at_their_exact_positions() -> None:
    ids = [3] * 12
    one, other = (one_grid(item(1, (0, 4), run)) for run in ((6, 6), (7, 5)))
    assert shared(chain(ids, [one]), chain(ids, [other])) == 1


def test_generated_tokens_are_named_like_prompt_tokens() -> None:
    assert chain(TEXT) == chain(TEXT[:14], output=tuple(TEXT[14:]))


@given(cuts=st.lists(st.integers(0, 8), max_size=6), picture=st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_a_chain_grown_bit_by_bit_is_the_chain_made_at_once(cuts: list[int], picture: int) -> None:
    items = [item(1, (picture, 5), (picture + 6, 4))]
    plan = request("r", TEXT, items).plan
    grown = BlockChain(plan, chain_seed("", b""), 4)
    for blocks in sorted(cuts):
        grown.extend((), blocks)
    grown.extend((), 8)
    assert grown.hashes == chain(TEXT, items)
