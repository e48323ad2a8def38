"""The order in which things that are compared are measured: each gets its share of whatever the machine does."""

from __future__ import annotations


def alternating(names: list[str], turn: int) -> list[str]:
    """Another one begins each time, and every second time they come backwards."""
    at = turn % len(names)
    turned = names[at:] + names[:at]
    return turned[::-1] if turn % 2 else turned
