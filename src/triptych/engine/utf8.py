"""Which tokens keep an answer valid UTF-8: one mask for every place inside a character.

The grammar library's classes let code points through that UTF-8 does not have (surrogates) and longer spellings than
it allows. Such bytes would become replacement characters in the text, which then need not match its guide any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

BETWEEN = 0
"""The place between two characters."""
NOWHERE = -1
"""Where bytes lead that are not UTF-8."""

_ONE, _TWO, _THREE = 1, 2, 3  # that many continuation bytes to come, of any value
_AFTER_E0, _AFTER_ED, _AFTER_F0, _AFTER_F4 = 4, 5, 6, 7  # first bytes that narrow the second
_PLACES = 8
_MOVES: tuple[tuple[tuple[range, int], ...], ...] = (
    (
        (range(0x80), BETWEEN),
        (range(0xC2, 0xE0), _ONE),
        (range(0xE0, 0xE1), _AFTER_E0),
        (range(0xE1, 0xED), _TWO),
        (range(0xED, 0xEE), _AFTER_ED),
        (range(0xEE, 0xF0), _TWO),
        (range(0xF0, 0xF1), _AFTER_F0),
        (range(0xF1, 0xF4), _THREE),
        (range(0xF4, 0xF5), _AFTER_F4),
    ),
    ((range(0x80, 0xC0), BETWEEN),),
    ((range(0x80, 0xC0), _ONE),),
    ((range(0x80, 0xC0), _TWO),),
    ((range(0xA0, 0xC0), _ONE),),
    ((range(0x80, 0xA0), _ONE),),
    ((range(0x90, 0xC0), _TWO),),
    ((range(0x80, 0x90), _TWO),),
)


def _table(moves: Iterable[tuple[range, int]]) -> list[int]:
    table = [NOWHERE] * 256
    for values, place in moves:
        table[values.start : values.stop] = [place] * len(values)
    return table


_TABLES = tuple(_table(moves) for moves in _MOVES)


def advance(place: int, data: bytes) -> int:
    """Where ``data`` leads from a place; ``NOWHERE`` if not on a way of UTF-8."""
    for byte in data:
        place = _TABLES[place][byte]
        if place == NOWHERE:
            break
    return place


def masks(tokens: Sequence[bytes]) -> npt.NDArray[np.int32]:
    """The tokens allowed at every place, shape [places, words], packed like a grammar's mask.

    A token without bytes is allowed between characters only.
    """
    allowed = np.zeros((_PLACES, (len(tokens) + 31) // 32 * 32), dtype=np.bool_)
    for index, data in enumerate(tokens):
        if data.isascii():
            allowed[BETWEEN, index] = True
        elif 0x80 <= data[0] < 0xC0:
            for place in range(BETWEEN + 1, _PLACES):
                allowed[place, index] = advance(place, data) != NOWHERE
        else:
            allowed[BETWEEN, index] = advance(BETWEEN, data) != NOWHERE
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
