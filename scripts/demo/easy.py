"""The public easy-vqa data: its training pictures as scenes, its questions, and its test split for the exam."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from .world import COLOURS, Scene, Thing

EASY_COLOURS = ("black", "gray", "red", "green", "blue", "yellow", "teal", "brown")
EASY_SHAPES = ("circle", "triangle", "rectangle")


class EasyQuestion(NamedTuple):
    """One question of easy-vqa with its answer and the path of its picture."""

    question: str
    answer: str
    path: str


def test_questions() -> list[EasyQuestion]:
    """The whole test split, never trained on."""
    import easy_vqa

    paths = easy_vqa.get_test_image_paths()
    texts, answers, pictures = easy_vqa.get_test_questions()
    return [EasyQuestion(q, a, paths[i]) for q, a, i in zip(texts, answers, pictures, strict=True)]


@cache
def train_pictures() -> dict[int, np.ndarray]:
    """The training pictures, uint8 [64, 64, 3] each."""
    import easy_vqa

    return {i: np.asarray(Image.open(p).convert("RGB")) for i, p in easy_vqa.get_train_image_paths().items()}


@cache
def train_questions() -> dict[int, list[tuple[str, str]]]:
    """Questions and answers of the training split by picture."""
    import easy_vqa

    by_picture: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for question, answer, picture in zip(*easy_vqa.get_train_questions(), strict=True):
        by_picture[picture].append((question, answer))
    return dict(by_picture)


def shape_from(questions: list[tuple[str, str]]) -> str | None:
    """The shape that the training answers give away, if they do."""
    for question, answer in questions:
        if answer in EASY_SHAPES:
            return answer
        named = next((s for s in EASY_SHAPES if s in question), None)
        negated = " not " in question or " no " in question
        if named and (answer == "yes") != negated:
            return named
        if named and answer in EASY_COLOURS:
            return named
    return None


@cache
def train_scenes() -> tuple[Scene, ...]:
    """Every training picture whose shape its answers give away, measured from its pixels."""
    scenes = []
    for picture, pixels in sorted(train_pictures().items()):
        shape = shape_from(train_questions().get(picture, []))
        codes, counts = np.unique(pixels.reshape(-1, 3) @ np.array((65536, 256, 1)), return_counts=True)
        ground = codes[counts.argmax()] >> np.array((16, 8, 0)) & 255
        far = np.abs(pixels.astype(int) - ground).sum(-1) > 40
        if shape is None or not far.any():
            continue
        ys, xs = np.where(far)
        rgb = np.median(pixels[far], axis=0)
        colour = min(EASY_COLOURS, key=lambda name: float(np.linalg.norm(rgb - COLOURS[name][0])))
        left, right, top, bottom = xs.min() / 64, (xs.max() + 1) / 64, ys.min() / 64, (ys.max() + 1) / 64
        thing = Thing(
            shape,
            colour,
            tuple(rgb.astype(int).tolist()),
            (left + right) / 2,
            (top + bottom) / 2,
            (right - left) / 2,
            (bottom - top) / 2,
        )
        scenes.append(Scene((thing,), tuple(ground.tolist()), None, picture))
    return tuple(scenes)


def easy_picture(scene: Scene, mirrored: bool) -> Image.Image:
    """The easy-vqa picture behind a scene, mirrored if the scene was."""
    pixels = train_pictures()[scene.easy]
    return Image.fromarray(pixels[:, ::-1] if mirrored else pixels)
