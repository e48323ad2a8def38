"""The exam: questions about pictures that were never trained on, in fixed order, from a fixed seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from . import easy
from .batches import Drawn
from .digits import HELD_OUT_DIGITS
from .draw import SOURCE_SIDES, draw
from .phrases import CHAT, HELD_OUT
from .questions import PAIR_KINDS, Asker
from .scenes import digit_scene, echo_scene, multi_scene, single_scene

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .world import Scene

SEED = 7_000_003
SINGLE_KINDS = (
    "what",
    "shape",
    "colour",
    "ground",
    "place",
    "is it",
    "is it coloured",
    "is there",
    "either",
    "describe",
)
MULTI_KINDS = (
    "colour of",
    "shape of",
    "place",
    "at",
    "side",
    "count",
    "count some",
    "is there",
    "is there not",
    "is side",
    "beside",
    "describe",
)
OBLONG_KINDS = ("what", "place")
OBLONG_SIZES = ((320, 240), (240, 320), (300, 200), (150, 200), (120, 90), (640, 400))
"""Width and height of pictures that are not square."""
DIGIT_KINDS = ("digit", "colour", "is it digit")
TITLES = {
    "what": "shape and colour",
    "shape": "shape",
    "colour": "colour",
    "ground": "background",
    "place": "where is it",
    "is it": "is it a circle",
    "is it coloured": "is it red",
    "is there": "is there a red circle",
    "is there not": "is there not a red circle",
    "either": "this or that",
    "describe": "caption",
    "colour of": "colour of the circle",
    "shape of": "shape of the red one",
    "at": "what is at the top left",
    "side": "what is on the left",
    "count": "how many",
    "count some": "how many of a shape or colour",
    "is side": "is it left of, above",
    "beside": "what is left of, above",
    "digit": "which digit",
    "is it digit": "is it a 7",
    "what in": "what is in the second",
    "colour in": "colour in the second",
    "shape in": "shape in the second",
    "digit in": "digit in the second",
    "which": "which one shows a circle",
    "same shape": "the same shape",
    "same colour": "the same colour",
    "pictures": "how many pictures",
}
"""How the table calls each kind."""
MANY = frozenset({"count", "count some"})
"""Kinds that are asked of one to four things; others of several mean two to four."""


class Item(NamedTuple):
    """One question of the exam."""

    group: str
    """What the table's row is called."""
    pictures: tuple[Image.Image, ...]
    question: str
    answer: str


def items(count: int, words: Sequence[str] = ("",)) -> Iterator[Item]:
    """The exam, `count` questions per drawn kind; every held-out digit and easy-vqa test question once.

    Only groups whose name holds one of the words are asked.
    """
    makers = {
        **{f"one shape: {TITLES[k]}": (one_shape, k) for k in SINGLE_KINDS},
        **{f"several shapes: {TITLES[k]}": (several, k) for k in MULTI_KINDS},
        **{f"real digit: {TITLES[k]}": (real_digits, k) for k in DIGIT_KINDS},
        **{f"two pictures: {TITLES[k]}": (two_pictures, k) for k in PAIR_KINDS},
        **{f"oblong picture: {TITLES[k]}": (oblong, k) for k in OBLONG_KINDS},
        **{f"new wording: {TITLES[k]}": (new_wording, k) for k in HELD_OUT},
    }
    for number, (group, (make, kind)) in enumerate(makers.items()):
        if not any(word in group for word in words):
            continue
        rng = np.random.default_rng((SEED, number))
        yield from (Item(group, *rest) for rest in make(rng, kind, count))
    for q in easy.test_questions() if any(word in "easy-vqa test" for word in words) else ():
        yield Item("easy-vqa test", (Image.open(q.path).convert("RGB"),), q.question, q.answer)
    if any(word in "no picture" for word in words):
        yield from (Item("no picture", (), q + "?", answer) for questions, answer in CHAT for q in questions)


Question = tuple[tuple[Image.Image, ...], str, str]


def one_shape(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """About one shape."""
    yield from drawn(rng, kind, count, "single", Asker(rng, free=4))


def oblong(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """About one shape in a picture that is not square."""
    asker, done = Asker(rng, free=4), 0
    while done < count:
        scene = single_scene(rng)
        turn = asker.about(scene, kind)
        if turn is not None:
            done += 1
            size = OBLONG_SIZES[int(rng.integers(len(OBLONG_SIZES)))]
            yield (draw(scene, *size, rng, plain=True),), turn.question, turn.answer


def several(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """About two to four shapes; counts run from one to four."""
    yield from drawn(rng, kind, count, "multi", Asker(rng, free=4))


def drawn(rng: np.random.Generator, kind: str, count: int, scenes: str, asker: Asker) -> Iterator[Question]:
    """Questions of a kind, each about a new picture."""
    done = 0
    while done < count:
        shown = new_picture(rng, scenes, lone=kind in MANY and rng.random() < 0.25)
        turn = asker.about(shown[0].scene, kind)
        if turn is not None:
            done += 1
            yield (shown[1],), turn.question, turn.answer


def real_digits(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """About each held-out digit once, whatever the count."""
    asker = Asker(rng, free=4)
    for index in HELD_OUT_DIGITS:
        shown = new_picture(rng, "digit", pool=np.array([index]))
        turn = asker.about(shown[0].scene, kind)
        yield (shown[1],), turn.question, turn.answer


def two_pictures(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """About the first or the second picture, or both."""
    yield from pairs(rng, kind, count, Asker(rng, free=4))


def pairs(rng: np.random.Generator, kind: str, count: int, asker: Asker) -> Iterator[Question]:
    """Questions of a kind, each about a new pair of pictures."""
    done = 0
    while done < (count if kind != "pictures" else 20):
        pair = [new_picture(rng, "digit" if rng.random() < 0.4 else "single")]
        if rng.random() < 0.4:
            scene = echo_scene(rng, pair[0][0].scene)
            pair.append(shown_at(scene, "single", random_side(rng), rng))
        else:
            pair.append(new_picture(rng, "digit" if rng.random() < 0.4 else "single"))
        turn = asker.compare((pair[0][0].scene, pair[1][0].scene), kind)
        if turn is not None:
            done += 1
            yield tuple(p for _, p in pair), turn.question, turn.answer


def new_wording(rng: np.random.Generator, kind: str, count: int) -> Iterator[Question]:
    """The same questions in sentences that were never trained."""
    asker = Asker(rng, held_out=True)
    if kind in PAIR_KINDS:
        yield from pairs(rng, kind, count // 2, asker)
    else:
        scenes = "digit" if kind == "digit" else "multi" if kind in ("at", "side", *MANY) else "single"
        yield from drawn(rng, kind, count // 2, scenes, asker)


def new_picture(
    rng: np.random.Generator, kind: str, pool: np.ndarray = HELD_OUT_DIGITS, lone: bool = False
) -> tuple[Drawn, Image.Image]:
    """A new scene and its picture, square and of any size a user might send."""
    side = random_side(rng)
    if kind == "digit":
        return shown_at(digit_scene(rng, pool), kind, max(side, 96), rng)
    scene = single_scene(rng) if kind == "single" or lone else multi_scene(rng)
    return shown_at(scene, kind, side, rng)


def random_side(rng: np.random.Generator) -> int:
    """A size for a square picture."""
    return int(rng.choice((*SOURCE_SIDES, 128, 100, 300)))


def shown_at(scene: Scene, kind: str, side: int, rng: np.random.Generator) -> tuple[Drawn, Image.Image]:
    """A scene drawn on a square."""
    shown = draw(scene, side, side, rng, plain=True)
    return Drawn(kind, scene, np.asarray(shown)), shown
