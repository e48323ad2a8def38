"""Grammars without a model: the demo model's tokens, and answers that pick among what is allowed at random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import triptych
from triptych.core.guide import Guide, GuideKind
from triptych.engine.grammar import GrammarCompiler, GrammarLimits
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from triptych.core.guide import Grammar

DEMO = Path(triptych.__file__).parent / "demo_model"
FIELDS = {kind: f"guided.{kind.value}" for kind in GuideKind}


class Tokens(NamedTuple):
    """A vocabulary as the compiler takes it."""

    vocabulary: list[bytes]
    ends: frozenset[int]


class Answer(NamedTuple):
    """What was picked."""

    data: bytes
    ended: bool


def demo_tokens() -> Tokens:
    tokenizer = Tokenizer.load(DEMO)
    size = json.loads((DEMO / "config.json").read_text())["text_config"]["vocab_size"]
    hidden = tokenizer.special_ids
    vocabulary = [b"" if index in hidden else tokenizer.token_bytes(index) for index in range(size)]
    return Tokens(vocabulary, tokenizer.eos_token_ids)


TOKENS = demo_tokens()


def new_compiler(**limits: float) -> GrammarCompiler:
    return GrammarCompiler(TOKENS.vocabulary, TOKENS.ends, GrammarLimits(**limits))


def guide(kind: str, text: str = "", *choices: str) -> Guide:
    return Guide(GuideKind(kind), text, choices)


def answer(grammar: Grammar, seed: int, steps: int = 1000, end: float | None = None) -> Answer:
    """An answer of a model whose every logit is the same; with ``end``, that much more probability for the ends."""
    matcher, rng, data = grammar.matcher(), random.Random(seed), b""
    ends = np.array(sorted(TOKENS.ends))
    for _ in range(steps):
        allowed = matcher.allowed()
        token = int(rng.choice(np.flatnonzero(allowed)))
        if end is not None and allowed[ends].any() and rng.random() < end:
            token = int(ends[0])
        matcher.accept(token)
        if token in TOKENS.ends:
            return Answer(data, ended=True)
        data += TOKENS.vocabulary[token]
    return Answer(data, ended=False)


def spell(grammar: Grammar, text: str | bytes) -> str:
    """Feed a text byte by byte.

    Returns:
        "whole" where an answer may end there, "part" where it may only go on, else "no".
    """
    matcher = grammar.matcher()
    for byte in text if isinstance(text, bytes) else text.encode():
        token = TOKENS.vocabulary.index(bytes([byte]))
        if not matcher.allowed()[token]:
            return "no"
        matcher.accept(token)
    return "whole" if matcher.allowed()[sorted(TOKENS.ends)].any() else "part"
