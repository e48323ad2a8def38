"""One check, and how it says that it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_checks.stack import Stack


class Check(NamedTuple):
    """Something that must hold."""

    name: str
    run: Callable[[Stack], Awaitable[str]]
    """Returns a few words about what was seen. Raises CheckFailed."""


class CheckFailed(Exception):
    """What should hold does not; the message says what was seen instead."""


def expect(condition: bool, otherwise: str) -> None:
    """Fail unless the condition holds.

    Raises:
        CheckFailed: with that message.
    """
    if not condition:
        raise CheckFailed(otherwise)


def expect_equal(what: str, got: object, wanted: object) -> None:
    """Fail unless both are equal.

    Raises:
        CheckFailed: naming both.
    """
    expect(got == wanted, f"{what}: {got!r} instead of {wanted!r}")
