"""Conversations as token rows: several questions share one picture without seeing each other.

A row in `branch` mode holds the picture once and then each question with its answer as if it were
the first one: a question sees the head of the row and itself, and its positions start right after
the head. In `talk` mode the questions follow each other as in a real conversation. In `after` mode
the first question stands before the picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from .questions import Turn

IGNORE = -100


@cache
def encoder(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Speller:
    """Text to token ids, remembered."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = encoder(folder)
        self.memory: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """The ids of a text."""
        ids = self.memory.get(text)
        if ids is None:
            ids = self.memory[text] = self.tokenizer.encode(text).ids
        return ids


@dataclass
class Row:
    """One row under construction."""

    length: int
    ids: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    targets: list[tuple[int, int, int]] = field(default_factory=list)
    """(column, token that follows it, number of the turn)."""
    slots: list[int] = field(default_factory=list)
    next_position: int = 0
    turns: list[Turn] = field(default_factory=list)

    def text(self, ids: list[int], segment: int = 0) -> None:
        """Append text."""
        at = self.next_position
        self.positions += [(p, p, p) for p in range(at, at + len(ids))]
        self.ids += ids
        self.segments += [segment] * len(ids)
        self.next_position = at + len(ids)

    def picture(self, pad: int, grid: tuple[int, int]) -> None:
        """Append a picture's tokens: all at one time, spread over rows and columns."""
        high, wide, at = grid[0] // 2, grid[1] // 2, self.next_position
        self.slots += range(len(self.ids), len(self.ids) + high * wide)
        self.positions += [(at, at + r, at + c) for r in range(high) for c in range(wide)]
        self.ids += [pad] * (high * wide)
        self.segments += [0] * (high * wide)
        self.next_position = at + max(high, wide)

    def answer(self, ids: list[int], segment: int) -> None:
        """Append an answer that is to be learned, each token from the one before it."""
        start = len(self.ids) - 1
        self.targets += [(start + i, token, len(self.turns)) for i, token in enumerate(ids)]
        self.text(ids, segment)


class RowBuilder:
    """Builds rows of one length."""

    def __init__(self, spell: Speller, length: int) -> None:
        self.spell = spell
        self.length = length
        self.pad = spell("<|image_pad|>")[0]

    def build(self, grid: tuple[int, int], pictures: int, turns: list[Turn], mode: str, system: str | None) -> Row:
        """A row with as many of the turns as fit."""
        row, spell = Row(self.length), self.spell
        if system:
            row.text(spell(f"<|im_start|>system\n{system}<|im_end|>\n"))
        row.text(spell("<|im_start|>user\n"))
        if mode == "after":
            row.text(spell(turns[0].question))
        for _ in range(pictures):
            row.text(spell("<|vision_start|>"))
            row.picture(self.pad, grid)
            row.text(spell("<|vision_end|>"))
        head = row.next_position
        for number, turn in enumerate(turns):
            segment = number + 1 if mode == "branch" else 0
            opening = [] if number == 0 or mode == "branch" else spell("\n<|im_start|>user\n")
            question = [] if number == 0 and mode == "after" else spell(turn.question)
            body = [*opening, *question, *spell("<|im_end|>\n<|im_start|>assistant\n")]
            answer = [*spell(turn.answer), *spell("<|im_end|>")]
            if len(row.ids) + len(body) + len(answer) > self.length:
                continue
            if mode == "branch":
                row.next_position = head
            row.text(body, segment)
            row.answer(answer, segment)
            row.turns.append(turn)
        return row


def stack(rows: list[Row]) -> dict[str, np.ndarray]:
    """Rows as arrays: ids, positions, mask, picture slots, and the flat places and tokens of the answers."""
    length = rows[0].length
    ids = np.zeros((len(rows), length), np.int64)
    segments = np.full((len(rows), length), -1, np.int64)
    positions = np.zeros((3, len(rows), length), np.int64)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n], segments[i, :n] = row.ids, row.segments
        positions[:, i, :n] = np.array(row.positions).T
    queries, keys = segments[:, :, None], segments[:, None, :]
    mask = ((queries == keys) | (keys == 0)) & np.tril(np.ones((length, length), bool))
    flat = [(i * length + c, token, i, turn) for i, row in enumerate(rows) for c, token, turn in row.targets]
    at, tokens, row_of, turn_of = np.array(flat).T
    slots = np.array([i * length + c for i, row in enumerate(rows) for c in row.slots], np.int64)
    return {
        "ids": ids,
        "positions": positions,
        "mask": mask[:, None],
        "slots": slots,
        "at": at,
        "tokens": tokens,
        "row_of": row_of,
        "turn_of": turn_of,
    }
