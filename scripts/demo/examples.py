"""The pictures and questions that ship with the model: a few scenes, one real held-out digit, right answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from .draw import draw
from .world import Scene, Thing

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

    from .answerers import AnswerAll

WHITE, PASTEL = (255, 255, 255), (238, 244, 250)
STAR = Thing("star", "orange", (255, 140, 0), 0.25, 0.26, 0.19, 0.19)
TWO = Thing("2", "black", (0, 0, 0), 0.5, 0.5, 0.42, 0.46, index=115)
"""A digit with a clear hand, from the held-out part."""
SCENES = {
    "star.png": (Scene((STAR,), WHITE, "white"), 192),
    "shapes.png": (
        Scene(
            (
                Thing("circle", "red", (225, 30, 35), 0.2, 0.24, 0.14, 0.14),
                Thing("square", "blue", (35, 80, 220), 0.76, 0.27, 0.13, 0.13),
                Thing("triangle", "green", (20, 160, 40), 0.5, 0.76, 0.15, 0.14),
            ),
            PASTEL,
            None,
        ),
        256,
    ),
    "heart.png": (Scene((Thing("heart", "purple", (140, 50, 200), 0.5, 0.5, 0.3, 0.3),), PASTEL, None), 160),
    "digit.png": (Scene((TWO,), WHITE, "white"), 128),
}
QUESTIONS = (
    (("star.png",), "What is in the picture?", "an orange star"),
    (("star.png",), "Where is the star?", "top left"),
    (("star.png",), "Is there a blue shape in the picture?", "no"),
    (("star.png",), "Describe the picture.", "an orange star at the top left on a white background"),
    (("shapes.png",), "How many shapes are there?", "3"),
    (("shapes.png",), "What colour is the triangle?", "green"),
    (("shapes.png",), "Where is the blue square?", "top right"),
    (("shapes.png",), "Is there a red circle?", "yes"),
    (("digit.png",), "Which digit is this?", "2"),
    (("star.png", "heart.png"), "What colour is the shape in the second picture?", "purple"),
    (("star.png", "heart.png"), "Which picture shows the heart?", "the second"),
    (("digit.png", "heart.png"), "Which digit is in the first picture?", "2"),
)


def pictures() -> dict[str, Image.Image]:
    """The pictures by file name."""
    return {
        name: draw(scene, side, side, np.random.default_rng(4), plain=True) for name, (scene, side) in SCENES.items()
    }


def write(folder: Path, answer_all: AnswerAll) -> list[str]:
    """Write pictures and the questions that are answered rightly; the others are returned."""
    shown = pictures()
    (folder / "pictures").mkdir(exist_ok=True)
    for name, picture in shown.items():
        picture.save(folder / "pictures" / name, optimize=True)
    given = answer_all([(tuple(shown[n] for n in names), question) for names, question, _ in QUESTIONS])
    right, wrong = [], []
    for (names, question, answer), text in zip(QUESTIONS, given, strict=True):
        if text == answer:
            paths = [f"pictures/{n}" for n in names]
            right.append({"pictures": paths, "question": question, "answer": answer})
        else:
            wrong.append(f"{names} {question} {answer!r}, said {text!r}")
    (folder / "examples.json").write_text(json.dumps(right, indent=2) + "\n")
    return wrong
