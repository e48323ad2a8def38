"""Stop strings in a stream: held back while one may be beginning, found the moment one is complete."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopStep(NamedTuple):
    """What a delta made visible, and whether it completed a stop string."""

    text: str
    stop: str | None = None
    """The stop string that was completed. Nothing may be fed after it."""


class _Node(NamedTuple):
    """A state of the automaton: the longest end of the text that begins some stop string."""

    depth: int
    """Its length in characters."""
    children: dict[str, int]
    is_stop: bool


class StopMatcher:
    """Watches one growing text for several stop strings (an Aho-Corasick automaton; constant work a character).

    The text stops at the first character that completes a stop string. Where several end on the same character the
    longest counts, so that the least is shown. How the text was split into deltas makes no difference. What is visible
    is, at any moment, everything but the longest end that could still become a stop string.

    Args:
        stops: the stop strings, none empty; memory grows with their characters, which a request bounds.
        include_stop: show the stop string that was completed.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        self._include = include_stop
        self._held = ""
        self._nodes = _trie(stops)
        self._fail, self._stop_length = _links(self._nodes)
        self._state = 0

    def feed(self, delta: str, *, armed: bool = True) -> StopStep:
        """Add text: one token's at a time where the token that completes a stop string is wanted.

        Args:
            delta: what is new.
            armed: whether a stop string that is completed now counts (min_tokens may not be reached yet).
        """
        text = self._held + delta
        for at, character in enumerate(delta, start=len(self._held) + 1):
            self._advance(character)
            length = self._stop_length[self._state]
            if armed and length:
                self._held = ""
                return StopStep(text[: at if self._include else at - length], text[at - length : at])
        kept = self._pending()
        self._held = text[len(text) - kept :]
        return StopStep(text[: len(text) - kept])

    def finish(self, tail: str = "", *, armed: bool = True) -> StopStep:
        """The end of the text: ``tail`` as ``feed`` takes it, and what is held back, unless ``tail`` completes it."""
        step = self.feed(tail, armed=armed)
        held, self._held, self._state = self._held, "", 0
        return StopStep(step.text + held, step.stop)

    def _advance(self, character: str) -> None:
        state = self._state
        while character not in self._nodes[state].children:
            if state == 0:
                self._state = 0
                return
            state = self._fail[state]
        self._state = self._nodes[state].children[character]

    def _pending(self) -> int:
        """Characters at the end of the text that a stop string may still continue."""
        state = self._state
        while state and not self._nodes[state].children:  # a whole stop string that did not count begins no other
            state = self._fail[state]
        return self._nodes[state].depth


def _trie(stops: Iterable[str]) -> list[_Node]:
    nodes = [_Node(0, {}, False)]
    for stop in stops:
        state = 0
        for character in stop:
            children = nodes[state].children
            if character not in children:
                children[character] = len(nodes)
                nodes.append(_Node(nodes[state].depth + 1, {}, False))
            state = children[character]
        nodes[state] = nodes[state]._replace(is_stop=True)
    return nodes


def _links(nodes: list[_Node]) -> tuple[list[int], list[int]]:
    """For each state: the state of its longest proper end, and the length of the longest stop string it ends with."""
    fail = [0] * len(nodes)
    stop_length = [0] * len(nodes)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        node = nodes[state]
        stop_length[state] = node.depth if node.is_stop else stop_length[fail[state]]
        for character, child in node.children.items():
            other = fail[state]
            while other and character not in nodes[other].children:
                other = fail[other]
            target = nodes[other].children.get(character, 0)
            fail[child] = target if target != child else 0
            queue.append(child)
    return fail, stop_length
