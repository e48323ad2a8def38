"""Batches as a function of seed and step alone: a resumed run sees what the unbroken one would have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import schedule
from .draw import OTHER_GRIDS, SQUARE, draw, patchify, source_size, to_grid
from .easy import easy_picture, train_scenes
from .labels import Labels, labels_of
from .phrases import CHAT, NO_PICTURE, SYSTEMS
from .questions import Asker, Turn
from .rows import Row, RowBuilder, Speller, stack
from .scenes import digit_scene, echo_scene, mosaic_scene, multi_scene, single_scene

if TYPE_CHECKING:
    from .world import Scene


class Drawn(NamedTuple):
    """A scene with its picture on the grid."""

    kind: str
    scene: Scene
    pixels: np.ndarray


class Batch(NamedTuple):
    """One step's worth of pictures and, when reading, conversations."""

    grid: tuple[int, int]
    patches: np.ndarray
    """uint8 [pictures, patches, 768]."""
    tokens: np.ndarray
    """[pictures, tokens, 4] dense classes."""
    whole: np.ndarray
    present: np.ndarray
    text: dict[str, np.ndarray] | None
    rows: list[Row]


class BatchMaker:
    """Makes the batch of any step."""

    def __init__(self, spell: Speller, seed: int = schedule.SEED) -> None:
        self.seed = seed
        self.spell = spell
        self.builder = RowBuilder(spell, schedule.LENGTH)

    def make(self, step: int) -> Batch:
        """The batch of a step: pictures alone in the first stage, with conversations in the second."""
        rng = np.random.default_rng((self.seed, step))
        grid = SQUARE
        if rng.random() < schedule.OTHER_GRID_SHARE:
            grid = OTHER_GRIDS[int(rng.integers(len(OTHER_GRIDS)))]
        if step < schedule.LOOK_STEPS:
            pictures = [picture(rng, grid, schedule.LOOK_MIX) for _ in range(schedule.LOOK_PICTURES)]
            return assemble(grid, pictures, [])
        late = min(1.0, 0.2 + 0.8 * (step - schedule.LOOK_STEPS) / schedule.LATE_STEPS)
        chapter = schedule.chapter_at(step)
        asker = Asker(rng, free=chapter.freedom)
        pictures, rows = [], []
        for _ in range(schedule.SINGLE_ROWS):
            shown = picture(rng, grid, chapter.pictures)
            turns = ask_one(asker, shown, late, chapter.stressed)
            pictures.append(shown)
            rows.append(self.row(rng, grid, 1, turns))
        for _ in range(schedule.PAIR_ROWS):
            first = picture(rng, grid, schedule.PAIR_MIX)
            alike = chapter.alike and rng.random() < chapter.alike
            pair = (first, echo(rng, grid, first) if alike else picture(rng, grid, schedule.PAIR_MIX))
            pictures += pair
            rows.append(self.row(rng, grid, 2, ask_two(asker, pair, late, chapter.stressed)))
        rows += [self.row(rng, grid, 0, chat(asker)) for _ in range(schedule.CHAT_ROWS)]
        return assemble(grid, pictures, rows)

    def row(self, rng: np.random.Generator, grid: tuple[int, int], pictures: int, turns: list[Turn]) -> Row:
        """A row in a random mode, now and then with a system message."""
        draw = rng.random()
        mode = "branch" if draw < 0.72 or not pictures else "talk" if draw < 0.87 else "after"
        system = SYSTEMS[int(rng.integers(len(SYSTEMS)))] if rng.random() < 0.06 else None
        return self.builder.build(grid, pictures, turns, mode, system)


def assemble(grid: tuple[int, int], pictures: list[Drawn], rows: list[Row]) -> Batch:
    """Stack pictures, their labels and the rows."""
    labels = [labels_of(p.scene, grid) for p in pictures]
    parts = Labels(*(np.stack(part) for part in zip(*labels, strict=True)))
    patches = patchify(np.stack([p.pixels for p in pictures]))
    return Batch(grid, patches, parts.tokens, parts.whole, parts.present, stack(rows) if rows else None, rows)


def picture(rng: np.random.Generator, grid: tuple[int, int], mix: dict[str, float]) -> Drawn:
    """A random scene of the mixture, drawn at a random size and brought to the grid."""
    kinds = list(mix)
    kind = kinds[int(np.searchsorted(np.cumsum([mix[k] for k in kinds]), rng.random() * sum(mix.values())))]
    if kind == "easy":
        return easy_drawn(rng, grid)
    make = {"single": single_scene, "multi": multi_scene, "digit": digit_scene}.get(kind)
    scene = make(rng) if make else mosaic_scene(rng, digits=0.5)
    return Drawn(kind, scene, to_grid(draw(scene, *source_size(grid, rng), rng), grid))


def echo(rng: np.random.Generator, grid: tuple[int, int], first: Drawn) -> Drawn:
    """A picture that shares something with the first one."""
    scene = echo_scene(rng, first.scene)
    return Drawn("single", scene, to_grid(draw(scene, *source_size(grid, rng), rng), grid))


def easy_drawn(rng: np.random.Generator, grid: tuple[int, int]) -> Drawn:
    """A training picture of easy-vqa; half of them mirrored."""
    scenes = train_scenes()
    scene = scenes[int(rng.integers(len(scenes)))]
    mirrored = rng.random() < 0.5
    shown = easy_picture(scene, mirrored)
    return Drawn("easy", scene.mirrored() if mirrored else scene, to_grid(shown, grid))


def pick(asker: Asker, weights: dict[str, float], late: float, stressed: dict[str, float]) -> str:
    """A kind of question by weight; late kinds count only in part, free ones only for a free asker."""
    kinds = [k for k in weights if asker.free or k not in schedule.FREE]
    sums = np.cumsum([weights[k] * stressed.get(k, 1) * (late if k in schedule.LATE else 1) for k in kinds])
    return kinds[int(np.searchsorted(sums, asker.rng.random() * sums[-1]))]


def ask_one(asker: Asker, shown: Drawn, late: float, stressed: dict[str, float], count: int = 7) -> list[Turn]:
    """Questions about one picture."""
    turns: list[Turn] = []
    for _ in range(count * 4):
        turn = asker.about(shown.scene, pick(asker, schedule.KINDS[shown.kind], late, stressed))
        if turn is not None and all(t.question != turn.question for t in turns):
            turns.append(turn)
        if len(turns) == count:
            break
    return turns


def ask_two(
    asker: Asker, pair: tuple[Drawn, Drawn], late: float, stressed: dict[str, float], count: int = 5
) -> list[Turn]:
    """Questions about two pictures."""
    turns: list[Turn] = []
    scenes = (pair[0].scene, pair[1].scene)
    for _ in range(count * 5):
        turn = asker.compare(scenes, pick(asker, schedule.PAIR_KINDS, late, stressed))
        if turn is not None and all(t.question != turn.question for t in turns):
            turns.append(turn)
        if len(turns) == count:
            break
    return turns


def chat(asker: Asker, count: int = 6) -> list[Turn]:
    """Small talk, and questions about a picture that is not there."""
    turns = []
    for _ in range(count):
        if asker.rng.random() < 0.25:
            kind = asker.choose(("shape", "digit", "what", "count"))
            turn = asker.turn(kind, NO_PICTURE)
            turns.append(Turn("chat", turn.question, turn.answer))
            continue
        questions, answer = asker.choose(CHAT)
        turns.append(Turn("chat", asker.punctuate(asker.choose(questions)), answer))
    return turns
