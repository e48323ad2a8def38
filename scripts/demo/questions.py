"""Questions about scenes and their answers: everything said here follows from the scene alone."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from .easy import train_questions
from .phrases import GREETINGS, OPENINGS, WH, sentences
from .world import COLOURS, PLACES, PLURALS, SHAPES, Scene, Thing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

COLOUR_NAMES = tuple(COLOURS)
IMPERATIVES = ("name", "tell", "say", "describe", "count", "read", "write", "give", "caption", "please")
NEARLY_WHITE = 236
"""A ground without a name whose darkest channel is above this might as well be called white."""
RARER = 0.2
"""How often a question after sameness is dropped because the answer would be no, the commoner one."""
SIDE_GAP = 0.25
"""Two centres must be this far apart before one is said to lie left of, or above, the other."""


class Turn(NamedTuple):
    """One question with its answer and the kind it belongs to."""

    kind: str
    question: str
    answer: str


class Asker:
    """Asks about scenes with one generator, in trained wordings or in the held-out ones.

    At freedom one it also opens with a greeting or a plea and knows synonyms; at freedom two before
    every question, and in looser wordings; at freedom three it leaves out what could be answered in two ways;
    at freedom four it asks whether two things are the same as often where they are as where they are not.
    """

    def __init__(self, rng: np.random.Generator, held_out: bool = False, free: int = 0) -> None:
        self.rng = rng
        self.held_out = held_out
        self.free = free

    def choose(self, options: tuple | list):
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def coin(self) -> bool:
        """Heads or tails."""
        return self.rng.random() < 0.5

    def other(self, names: tuple[str, ...], present: set[str]) -> str:
        """A name that is not among the present ones."""
        return self.choose([n for n in names if n not in present])

    def turn(self, kind: str, answer: str, **slots: str) -> Turn | None:
        """Word a question; None where no wording takes just these slots."""
        wordings = sentences(kind, self.held_out, self.free > 1)
        for _ in range(20):
            text = self.choose(self.choose(wordings))
            try:
                return Turn(kind, self.punctuate(text.format(**slots)), answer)
            except KeyError:
                continue
        return None

    def punctuate(self, text: str) -> str:
        """Write a sentence as people type it: with or without capital and mark; now and then `grey`."""
        first = text.split(" ")[0]
        if self.free and self.rng.random() < 0.08 and first in WH:
            text = self.choose(OPENINGS) + text if self.rng.random() < 0.75 else text + ", please"
        elif self.free > 1 and self.rng.random() < 0.08 and first not in (*WH, *IMPERATIVES):
            text = self.choose(GREETINGS) + text
        draw, mark = self.rng.random(4), "." if text.split(" ")[0].rstrip(",") in IMPERATIVES else "?"
        if draw[0] < 0.35:
            text = text[0].upper() + text[1:]
        if draw[1] < 0.1:
            text = text.replace("gray", "grey")
        if draw[3] < 0.02:
            text = (
                "please " + text[0].lower() + text[1:]
                if mark == "." and not text.lower().startswith("please")
                else text
            )
        return text + ("" if draw[2] < 0.2 else mark)

    # -- one scene ---------------------------------------------------------------------------------

    def about(self, scene: Scene, kind: str) -> Turn | None:
        """A question of the kind about a scene; None where the scene has no answer to it."""
        return ASKERS[kind](self, scene)

    def shape(self, scene: Scene) -> Turn | None:
        """The shape of the only thing, or of the only thing of its colour."""
        thing = self.alone(scene)
        return None if thing is None or thing.is_digit else self.turn("shape", thing.name)

    def alone(self, scene: Scene) -> Thing | None:
        """The only thing of a scene."""
        return scene.things[0] if len(scene.things) == 1 else None

    def colour(self, scene: Scene) -> Turn | None:
        """The colour of the only thing, or of the only one of its shape."""
        thing = self.alone(scene)
        if thing is None:
            return self.colour_of(scene)
        if thing.is_digit:
            wordings = ("what {} is the digit", "what {} is the number", "what {} is it", "what is the {} of the digit")
            text = self.choose(wordings).format(self.choose(("colour", "color")))
            return Turn("colour", self.punctuate(text), thing.colour)
        return self.turn("colour", thing.colour, shape=thing.name)

    def colour_of(self, scene: Scene) -> Turn | None:
        """The colour of a named shape that occurs once."""
        counts = Counter(t.name for t in scene.things)
        unique = [t for t in scene.things if counts[t.name] == 1]
        if not unique:
            return None
        thing = self.choose(unique)
        text = self.choose(("what colour is the {}", "what color is the {}", "what is the color of the {}"))
        return Turn("colour of", self.punctuate(text.format(thing.name)), thing.colour)

    def shape_of(self, scene: Scene) -> Turn | None:
        """The shape of the thing of a named colour that occurs once."""
        counts = Counter(t.colour for t in scene.things)
        unique = [t for t in scene.things if counts[t.colour] == 1 and not t.is_digit]
        if not unique:
            return None
        thing = self.choose(unique)
        text = self.choose(("what shape is the {} one", "what is the {} shape", "what shape is {}", "what is {}"))
        return Turn("shape of", self.punctuate(text.format(thing.colour)), thing.name)

    def what(self, scene: Scene) -> Turn | None:
        """Shape and colour of the only thing."""
        thing = self.alone(scene)
        if thing is None:
            return None
        turn = self.turn("what", thing.phrase)
        return None if self.free > 2 and turn and "shape" in turn.question else turn

    def describe(self, scene: Scene) -> Turn | None:
        """A caption: one thing with its place and ground, two or three things from left to right."""
        thing = self.alone(scene)
        if self.free > 2 and not sayable(scene):
            return None
        if thing is not None:
            place = "" if thing.is_digit or thing.place is None else f" at the {PLACES[thing.place]}"
            ground = f" on a {scene.ground_colour} background" if scene.ground_colour else ""
            return self.turn("describe", thing.phrase + place + ground)
        ordered = sorted(scene.things, key=lambda t: t.x)
        if len(ordered) > 3 or min(b.x - a.x for a, b in itertools.pairwise(ordered)) < 0.08:
            return None
        head = ", ".join(t.phrase for t in ordered[:-1])
        return self.turn("describe", f"{head} and {ordered[-1].phrase}")

    def ground(self, scene: Scene) -> Turn | None:
        """The colour of the ground, where it has a name."""
        return self.turn("ground", scene.ground_colour) if scene.ground_colour else None

    def digit(self, scene: Scene) -> Turn | None:
        """Which digit it is."""
        thing = self.alone(scene)
        return self.turn("digit", thing.name) if thing is not None and thing.is_digit else None

    def place(self, scene: Scene) -> Turn | None:
        """Where the only thing is, or the only one of its look."""
        looks = Counter(look(t) for t in scene.things)
        found = [t for t in scene.things if t.place is not None and looks[look(t)] == 1 and not t.is_digit]
        if not found:
            return None
        thing = self.choose(found)
        if self.held_out:
            return self.turn("place", PLACES[thing.place]) if len(scene.things) == 1 else None
        names = Counter(t.name for t in scene.things)
        named = thing.name if names[thing.name] == 1 and self.coin() else look(thing)
        wordings = sentences("place", freely=self.free > 1)
        if len(scene.things) > 1:
            wordings = [w for w in wordings if "{" in w[0]]
        text = self.choose(self.choose(wordings)).format(phrase=named)
        kind = "place" if len(scene.things) == 1 else "place of"
        return Turn(kind, self.punctuate(text), PLACES[thing.place])

    def at(self, scene: Scene) -> Turn | None:
        """What is at a place where exactly one thing is and every thing's place is clear."""
        places = Counter(t.place for t in scene.things)
        found = [t for t in scene.things if places[t.place] == 1 and not t.is_digit]
        if None in places or not found or len(scene.things) < 2:
            return None
        thing = self.choose(found)
        place = PLACES[thing.place]
        if self.free and place == "centre":
            place = self.choose(("centre", "center", "middle"))
        return self.turn("at", thing.phrase, place=place)

    def side(self, scene: Scene) -> Turn | None:
        """What is on the left or right of two things."""
        if len(scene.things) != 2:
            return None
        left, right = sorted(scene.things, key=lambda t: t.x)
        if right.x - left.x < SIDE_GAP:
            return None
        thing, side = (left, "left") if self.coin() else (right, "right")
        return self.turn("side", thing.phrase, side=side)

    def count(self, scene: Scene) -> Turn | None:
        """How many shapes."""
        return None if scene.things[0].is_digit else self.turn("count", str(len(scene.things)))

    def count_some(self, scene: Scene) -> Turn | None:
        """How many of a shape or of a colour; sometimes none."""
        if scene.things[0].is_digit:
            return None
        if self.free and self.rng.random() < 0.2:
            thing = self.choose(scene.things)
            colour = self.choose(COLOUR_NAMES) if self.rng.random() < 0.25 else thing.colour
            both = sum((t.name, t.colour) == (thing.name, colour) for t in scene.things)
            return self.turn("count some", str(both), some=f"{colour} {PLURALS[thing.name]}")
        if self.rng.random() < 0.55:
            names = {t.name for t in scene.things}
            name = self.other(SHAPES, names) if self.rng.random() < 0.2 else self.choose(sorted(names))
            return self.turn("count some", str(sum(t.name == name for t in scene.things)), some=PLURALS[name])
        colours = {t.colour for t in scene.things}
        colour = self.other(COLOUR_NAMES, colours) if self.rng.random() < 0.2 else self.choose(sorted(colours))
        some = f"{colour} {self.choose(('shapes', 'objects', 'things'))}"
        return self.turn("count some", str(sum(t.colour == colour for t in scene.things)), some=some)

    # -- yes and no --------------------------------------------------------------------------------

    def is_there(self, scene: Scene, kind: str = "is there") -> Turn | None:
        """Whether a shape, a colour or both are in the picture."""
        if scene.things[0].is_digit:
            return None
        truth, names, colours = self.coin(), {t.name for t in scene.things}, {t.colour for t in scene.things}
        if "square" in names and "rectangle" not in names:
            names = names | {"rectangle"}  # whoever calls a square a rectangle is not wrong: never ask for it
        thing, draw = self.choose(scene.things), self.rng.random()
        if draw < 0.35:
            bare = thing.name if truth else self.other(SHAPES, names)
        elif draw < 0.7:
            bare = f"{thing.colour if truth else self.other(COLOUR_NAMES, colours)} {self.choose(('shape', 'object'))}"
        else:
            looks = {look(t) for t in scene.things}
            name, colour = thing.name, thing.colour
            while not truth and f"{colour} {name}" in looks:
                swap = self.rng.random()
                name = self.choose(SHAPES) if swap < 0.6 else thing.name
                colour = self.choose(COLOUR_NAMES) if swap > 0.4 else thing.colour
            bare = f"{colour} {name}"
        positive = kind == "is there"
        return self.turn(kind, "yes" if truth == positive else "no", a=with_article(bare), bare=bare)

    def is_there_not(self, scene: Scene) -> Turn | None:
        """The same, denied, as easy-vqa likes to ask."""
        return self.is_there(scene, "is there not")

    def is_it(self, scene: Scene) -> Turn | None:
        """Whether the only thing is of a shape, or of a shape and colour."""
        thing = self.alone(scene)
        if thing is None or thing.is_digit:
            return None
        truth, both = self.coin(), self.rng.random() < 0.35
        barred = {thing.name} | ({"rectangle"} if thing.name == "square" else set())
        name, colour = thing.name, thing.colour
        if not truth:
            if both and self.coin():
                colour = self.other(COLOUR_NAMES, {colour})
            else:
                name = self.other(SHAPES, barred)
        bare = f"{colour} {name}" if both else name
        return self.turn("is it", "yes" if truth else "no", a=with_article(bare))

    def is_it_coloured(self, scene: Scene) -> Turn | None:
        """Whether the only thing has a colour."""
        thing = self.alone(scene)
        if thing is None or thing.is_digit:
            return None
        truth = self.coin()
        colour = thing.colour if truth else self.other(COLOUR_NAMES, {thing.colour})
        return self.turn("is it coloured", "yes" if truth else "no", colour=colour, shape=thing.name)

    def is_it_digit(self, scene: Scene) -> Turn | None:
        """Whether the digit is the one named."""
        thing = self.alone(scene)
        if thing is None or not thing.is_digit:
            return None
        truth = self.coin()
        digit = thing.name if truth else self.other(tuple("0123456789"), {thing.name})
        return self.turn("is it digit", "yes" if truth else "no", digit=digit)

    def is_side(self, scene: Scene) -> Turn | None:
        """Whether one thing is left of, or above, another."""
        if len(scene.things) != 2 or look(scene.things[0]) == look(scene.things[1]):
            return None
        one, two = scene.things if self.coin() else scene.things[::-1]
        wide, high = two.x - one.x, two.y - one.y
        across = abs(wide) > abs(high)
        if max(abs(wide), abs(high)) < SIDE_GAP:
            return None
        kind, truth = ("is side", wide > 0) if across else ("is above", high > 0)
        return self.turn(kind, "yes" if truth else "no", one=look(one), two=look(two))

    def either(self, scene: Scene) -> Turn | None:
        """Which of two shapes, or of two colours, the only thing has."""
        thing = self.alone(scene)
        if thing is None or thing.is_digit:
            return None
        if self.coin():
            barred = {thing.name} | ({"square", "rectangle"} if thing.name in ("square", "rectangle") else set())
            answer, options = thing.name, [with_article(thing.name), with_article(self.other(SHAPES, barred))]
        else:
            answer, options = thing.colour, [thing.colour, self.other(COLOUR_NAMES, {thing.colour})]
        if self.coin():
            options.reverse()
        return self.turn("either", answer, a=options[0], b=options[1])

    def beside(self, scene: Scene) -> Turn | None:
        """Which of two things lies on a side of the other."""
        if len(scene.things) != 2 or look(scene.things[0]) == look(scene.things[1]):
            return None
        one, two = scene.things if self.coin() else scene.things[::-1]
        wide, high = two.x - one.x, two.y - one.y
        if max(abs(wide), abs(high)) < SIDE_GAP:
            return None
        if abs(wide) > abs(high):
            sides = ("right of", "to the right of") if wide > 0 else ("left of", "to the left of")
        else:
            sides = ("below", "under") if high > 0 else ("above", "over")
        return self.turn("beside", two.phrase, side=self.choose(sides), one=look(one))

    def easy(self, scene: Scene) -> Turn | None:
        """One of easy-vqa's own training questions."""
        asked = train_questions().get(scene.easy) if scene.easy is not None else None
        if not asked:
            return None
        question, answer = self.choose(asked)
        return Turn("easy", question if self.rng.random() < 0.8 else self.punctuate(question.rstrip("?")), answer)

    # -- two scenes --------------------------------------------------------------------------------

    def compare(self, scenes: tuple[Scene, Scene], kind: str) -> Turn | None:
        """A question about the first or second of two pictures, or about both."""
        if kind == "pictures":
            return self.turn("pictures", "2")
        number = int(self.rng.integers(2))
        which, scene = ("first", "second")[number], scenes[number]
        thing, rival = self.alone(scene), self.alone(scenes[1 - number])
        if thing is None:
            return None
        if kind == "what in":
            return self.turn(kind, thing.phrase, which=which)
        if kind == "colour in":
            return self.turn(kind, thing.colour, which=which) if not thing.is_digit else None
        if kind == ("digit in" if thing.is_digit else "shape in"):
            return self.turn(kind, thing.name, which=which)
        if rival is None:
            return None
        if kind == "which":
            return self.which(thing, rival, which)
        same = {"same shape": thing.name == rival.name, "same colour": thing.colour == rival.colour}
        if kind not in same or thing.is_digit or rival.is_digit:
            return None
        if self.free > 3 and not same[kind] and self.rng.random() < RARER:
            return None
        return self.turn(kind, "yes" if same[kind] else "no")

    def which(self, thing: Thing, rival: Thing, which: str) -> Turn | None:
        """Which picture shows what only one of them shows."""
        options = []
        if thing.name != rival.name and {thing.name, rival.name} != {"square", "rectangle"}:
            options.append(f"digit {thing.name}" if thing.is_digit else thing.name)
        if thing.colour != rival.colour:
            options.append(f"{thing.colour} {'digit' if thing.is_digit else 'shape'}")
            options.append(thing.phrase.split(" ", 1)[1])
        if thing.is_digit != rival.is_digit:
            options.append("digit" if thing.is_digit else "shape")
        if not options:
            return None
        bare = self.choose(options)
        return self.turn("which", f"the {which}", a=with_article(bare), the=f"the {bare}")


def sayable(scene: Scene) -> bool:
    """Whether it is clear what a caption must say: a place, and a ground that is white or plainly not."""
    first = scene.things[0]
    if len(scene.things) > 1:
        return True
    clear_ground = scene.ground_colour is not None or min(scene.ground) < NEARLY_WHITE
    return clear_ground and (first.is_digit or first.place is not None)


def look(thing: Thing) -> str:
    """Colour and name, as in `"red circle"`."""
    return f"{thing.colour} {thing.name}"


def with_article(bare: str) -> str:
    """`"a red shape"`, `"an orange star"`, but `"the digit 7"`."""
    if bare.startswith("digit "):
        return f"the {bare}"
    return f"{'an' if bare[0] in 'aeiou' else 'a'} {bare}"


ASKERS: dict[str, Callable[[Asker, Scene], Turn | None]] = {
    "shape": Asker.shape,
    "colour": Asker.colour,
    "colour of": Asker.colour_of,
    "shape of": Asker.shape_of,
    "what": Asker.what,
    "describe": Asker.describe,
    "ground": Asker.ground,
    "digit": Asker.digit,
    "place": Asker.place,
    "at": Asker.at,
    "side": Asker.side,
    "count": Asker.count,
    "count some": Asker.count_some,
    "is there": Asker.is_there,
    "is there not": Asker.is_there_not,
    "is it": Asker.is_it,
    "is it coloured": Asker.is_it_coloured,
    "is it digit": Asker.is_it_digit,
    "is side": Asker.is_side,
    "either": Asker.either,
    "beside": Asker.beside,
    "easy": Asker.easy,
}
PAIR_KINDS = ("what in", "colour in", "shape in", "digit in", "which", "same shape", "same colour", "pictures")
