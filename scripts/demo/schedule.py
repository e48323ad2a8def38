"""The run as data: stages, rates and mixtures. What stands here is what was run."""

from __future__ import annotations

from dataclasses import dataclass, field

SEED = 20
LENGTH = 112
"""Tokens per row of conversation."""

LOOK_STEPS = 3500
READ_STEPS = 19500
LOOK_PICTURES = 48
SINGLE_ROWS = 22
PAIR_ROWS = 5
CHAT_ROWS = 1
OTHER_GRID_SHARE = 0.1

MUON_RATE = 4e-3
ADAM_RATE = 1.5e-3
VISION_SHARE_WHEN_READING = 0.6
WARM_STEPS = 150
DECAY_FROM = 0.35
"""Share of the reading stage after which the rates fall linearly to zero."""
DENSE_WEIGHT = (0.4, 0.1)
"""Weight of the tower's own loss at the beginning of the reading stage and after `DENSE_STEPS` of it."""
DENSE_STEPS = 22000

LOOK_MIX = {"mosaic": 0.45, "digit": 0.18, "single": 0.14, "multi": 0.14, "easy": 0.09}
PAIR_MIX = {"single": 0.6, "digit": 0.33, "easy": 0.07}


KINDS: dict[str, dict[str, float]] = {
    "single": {
        "shape": 1,
        "colour": 1,
        "what": 1.4,
        "describe": 0.7,
        "ground": 0.4,
        "place": 1.6,
        "count": 0.3,
        "count some": 0.3,
        "is there": 1.0,
        "is there not": 0.4,
        "is it": 0.7,
        "is it coloured": 0.6,
        "either": 0.5,
    },
    "multi": {
        "colour of": 0.9,
        "shape of": 0.9,
        "describe": 0.8,
        "place": 1.3,
        "at": 1.3,
        "side": 1.2,
        "count": 1.3,
        "count some": 1.3,
        "is there": 1.4,
        "is there not": 0.3,
        "is side": 1.0,
        "ground": 0.2,
        "beside": 0.8,
    },
    "digit": {"digit": 3, "colour": 0.6, "what": 0.8, "describe": 0.5, "ground": 0.4, "is it digit": 0.6},
    "easy": {"easy": 5, "place": 0.8, "what": 0.8, "shape": 0.4, "colour": 0.4, "is there": 0.4, "is it": 0.3},
}
PAIR_KINDS = {
    "what in": 1.2,
    "colour in": 1.2,
    "shape in": 1.2,
    "digit in": 1.4,
    "which": 1.5,
    "same shape": 0.4,
    "same colour": 0.4,
    "pictures": 0.1,
}
LATE = (
    "is there",
    "is there not",
    "is it",
    "is it coloured",
    "is it digit",
    "is side",
    "easy",
    "same shape",
    "same colour",
)
"""Kinds that come in slowly, from a fifth of their weight to all of it, as facts are learned first."""
LATE_STEPS = 3300
FREE = ("either", "beside")
"""Kinds that only a free asker asks."""


@dataclass(frozen=True)
class Chapter:
    """What is read from some reading step on."""

    start: int
    freedom: int
    """How freely questions are worded, see `questions.Asker`."""
    pictures: dict[str, float]
    """Mixture of the pictures that are asked about alone."""
    stressed: dict[str, float] = field(default_factory=dict)
    """Factors on the weights of kinds that lag."""
    alike: float = 0.0
    """Share of pairs whose second picture has the shape or the colour of the first."""


BALANCED = {"single": 0.25, "multi": 0.33, "digit": 0.22, "easy": 0.2}
CROWDED = {"single": 0.2, "multi": 0.42, "digit": 0.22, "easy": 0.16}
STRESSED = {
    "which": 2.0,
    "count some": 1.5,
    "at": 1.3,
    "is it digit": 1.5,
    "describe": 1.2,
    "easy": 0.7,
    "same shape": 1.5,
    "same colour": 1.5,
}
CHAPTERS = (
    Chapter(0, 0, BALANCED),
    Chapter(1660, 1, BALANCED),
    Chapter(4999, 2, CROWDED, STRESSED, alike=0.4),
    Chapter(9341, 3, CROWDED, STRESSED | {"count some": 2.0, "same shape": 5.0, "same colour": 5.0}, alike=0.55),
    Chapter(13093, 4, CROWDED, STRESSED | {"count some": 2.0, "same shape": 6.0, "same colour": 6.0}, alike=0.65),
)


@dataclass(frozen=True)
class Rates:
    """Learning rates and the weight of the dense loss at one step."""

    muon: float
    adam: float
    vision: float
    dense: float


def rates_at(step: int) -> Rates:
    """The rates of a step; the tower's are multiplied by `vision`."""
    if step < LOOK_STEPS:
        rise = min((step + 1) / WARM_STEPS, 1) * (1 - 0.5 * step / LOOK_STEPS)
        return Rates(MUON_RATE * rise, ADAM_RATE * rise, 1, 1)
    done = (step - LOOK_STEPS) / READ_STEPS
    rise = min((step - LOOK_STEPS + 1) / WARM_STEPS, 1) * min(1, (1 - done) / (1 - DECAY_FROM))
    dense = DENSE_WEIGHT[0] + (DENSE_WEIGHT[1] - DENSE_WEIGHT[0]) * (step - LOOK_STEPS) / DENSE_STEPS
    return Rates(MUON_RATE * rise, ADAM_RATE * rise, VISION_SHARE_WHEN_READING, dense)


def chapter_at(step: int) -> Chapter:
    """The chapter of a step of the reading stage."""
    return [c for c in CHAPTERS if c.start <= step - LOOK_STEPS][-1]
