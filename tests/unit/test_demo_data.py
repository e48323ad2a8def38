"""The demo model's data: drawn alike from one seed, split without overlap, asked and answered consistently."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import easy_vqa
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from demo import draw, easy, phrases
from demo.digits import COUNT, HELD_OUT_DIGITS, TRAIN_DIGITS, digit_labels
from demo.questions import ASKERS, PAIR_KINDS, Asker, with_article
from demo.scenes import digit_scene, mosaic_scene, multi_scene, single_scene
from demo.world import COLOURS, PLACES, SHAPES, Scene, Thing, contrast

RED_CIRCLE = Thing("circle", "red", (255, 0, 0), 0.2, 0.2, 0.1, 0.1)
BLUE_SQUARE = Thing("square", "blue", (0, 0, 255), 0.8, 0.8, 0.1, 0.1)
WHITE = (255, 255, 255)


def rng(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


def scene(*things: Thing) -> Scene:
    return Scene(things, WHITE, "white")


@pytest.mark.parametrize("make", [single_scene, multi_scene, digit_scene, lambda r: mosaic_scene(r, 0.5)])
def test_one_seed_draws_one_picture(make) -> None:
    pictures = []
    for _ in range(2):
        dice = rng()
        pictures.append(np.asarray(draw.draw(make(dice), 128, 96, dice)))
    assert (pictures[0] == pictures[1]).all()
    assert pictures[0].shape == (96, 128, 3)


def test_digits_are_split_without_overlap() -> None:
    assert not set(HELD_OUT_DIGITS) & set(TRAIN_DIGITS)
    assert len(HELD_OUT_DIGITS) + len(TRAIN_DIGITS) == COUNT == len(digit_labels())
    assert len(HELD_OUT_DIGITS) == 360


def test_scenes_show_training_digits_only() -> None:
    dice = rng()
    shown = {t.index for _ in range(300) for t in (*digit_scene(dice).things, *mosaic_scene(dice, 1.0).things)}
    assert shown <= set(TRAIN_DIGITS.tolist())


def test_easy_vqa_training_pictures_are_of_the_training_split() -> None:
    assert set(easy.train_pictures()) == set(easy_vqa.get_train_image_paths())
    test_paths = {q.path for q in easy.test_questions()}
    assert not test_paths & set(easy_vqa.get_train_image_paths().values())


def test_held_out_wordings_are_not_trained() -> None:
    known = (*phrases.TRAINED.values(), *phrases.FREELY.values())
    trained = {s for wordings in known for w in wordings for s in phrases.expand(w)}
    held_out = {s for wordings in phrases.HELD_OUT.values() for w in wordings for s in phrases.expand(w)}
    assert not trained & held_out
    assert all(len(sentence) > 4 for sentence in trained | held_out)


def test_things_of_a_scene_do_not_touch_and_can_be_seen() -> None:
    dice = rng()
    for _ in range(50):
        shown = multi_scene(dice)
        assert 2 <= len(shown.things) <= 4
        for i, a in enumerate(shown.things):
            assert contrast(a.rgb, shown.ground) > 100
            for b in shown.things[i + 1 :]:
                reach = max(a.half_width, a.half_height) + max(b.half_width, b.half_height)
                assert max(abs(a.x - b.x), abs(a.y - b.y)) > reach


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("shape", "circle"),
        ("colour", "red"),
        ("what", "a red circle"),
        ("ground", "white"),
        ("place", "top left"),
        ("count", "1"),
        ("describe", "a red circle at the top left on a white background"),
    ],
)
def test_answers_follow_from_the_scene(kind: str, answer: str) -> None:
    turn = Asker(rng()).about(scene(RED_CIRCLE), kind)
    assert turn is not None
    assert turn.answer == answer


def test_two_pictures_are_told_apart() -> None:
    scenes = scene(RED_CIRCLE), scene(BLUE_SQUARE)
    asker = Asker(rng())
    for _ in range(40):
        turn = asker.compare(scenes, "colour in")
        assert turn is not None
        assert turn.answer == ("red" if "first" in turn.question else "blue")
        which = asker.compare(scenes, "which")
        assert which is not None
        assert which.answer == ("the first" if "red" in which.question or "circle" in which.question else "the second")


@pytest.mark.parametrize("kind", ["is there", "is there not"])
def test_yes_and_no_are_even_and_true(kind: str) -> None:
    asker, answers = Asker(rng()), []
    for _ in range(400):
        turn = asker.about(scene(RED_CIRCLE), kind)
        assert turn is not None
        seen = any(f" {word} " in f" {turn.question.strip('?')} " for word in ("red shape", "red object", "circle"))
        if " " + "circle" in turn.question and " red circle" not in turn.question:
            seen = f" {turn.question.strip('?').split(' circle')[0].split()[-1]}" in (" a", " no")
        assert (turn.answer == "yes") == (seen == (kind == "is there"))
        answers.append(turn.answer)
    assert 0.4 < answers.count("yes") / len(answers) < 0.6


def test_every_kind_finds_a_question() -> None:
    dice = rng()
    asker = Asker(dice)
    scenes = [make(dice) for make in (single_scene, multi_scene, digit_scene) for _ in range(30)]
    scenes += easy.train_scenes()[:5]
    for kind in ASKERS:
        assert any(asker.about(s, kind) for s in scenes), kind
    for kind in PAIR_KINDS:
        assert any(asker.compare((a, b), kind) for a, b in itertools.pairwise(scenes)), kind


def test_the_world_is_named_without_clash() -> None:
    assert len(PLACES) == len(set(PLACES)) == 9
    assert not set(SHAPES) & set(COLOURS)
    assert with_article("orange star") == "an orange star"
    assert with_article("digit 7") == "the digit 7"
