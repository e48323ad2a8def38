"""What ``triptych eval parity`` asks: requests in groups, made for whatever model is there."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from triptych.core.guide import Guide, GuideKind
from triptych.core.logprobs import LogprobOptions, TopN
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes
from triptych.core.request import Sampling, Stopping
from triptych.engine.grammar import guided_available
from triptych.text.chat import ChatMessage, ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triptych.cli.loaded import LoadedModel

MOST_PICTURES = 4
SMALLEST_CHUNK = 16
LARGEST_CHUNK = 128
"""Prompt tokens of one step, each size in between; a prompt with four small pictures has about as many."""
BLOCK = 16
"""Places where a picture can begin in a KV block."""
QUESTIONS = ("What is in the picture?", "What colour is the circle, and where is it?", "Describe the picture.")
GREEDY = Sampling(temperature=0)
TOP_5 = LogprobOptions(output=True, output_candidates=TopN(5))
TOP_5_OF_ALL = replace(TOP_5, prompt=True, prompt_candidates=TopN(5))
SHORT = Stopping(max_tokens=12, ignore_eos=True)
LONG = Stopping(max_tokens=32, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The beginning of the prompt is cached when the request comes, on one of the two engines or on both."""

    tokens: int
    """Of the prompt as it is sent, where a picture is one token."""
    on_prefill: bool
    on_decode: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what is special about it."""

    name: str
    """What it is, in a few words."""
    prompt: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    sampling: Sampling = GREEDY
    stopping: Stopping = SHORT
    outputs: int = 1
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    guide: Guide | None = None
    chunk: int | None = None
    """Prompt tokens of one step; None: as many as there are."""
    reuse: Reuse | None = None


class Material:
    """Prompts for one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        front = loaded.frontend
        self._model = front.model
        self._template = ChatTemplate.load(loaded.directory, front.tokenizer)
        reads_pictures = Modality.IMAGE in front.model.modalities
        self.pictures = tuple(range(MOST_PICTURES + 1)) if reads_pictures else (0,)
        """How many a prompt can have."""
        self.placeholder = front.model.image_token_id
        self.filler = front.tokenizer.encode("a")[0]
        """Some token of plain text."""
        self.guided = guided_available() and bool(front.eos_token_ids)

    def case(self, pictures: int, question: str, name: str = "") -> Case:
        """A question about so many pictures; greedy and short."""
        items = tuple(MediaItem(Modality.IMAGE, RawBytes(picture(index))) for index in range(pictures))
        what = "no picture" if not pictures else "1 picture" if pictures == 1 else f"{pictures} pictures"
        return self.asked(items, question, ", ".join(filter(None, (what, name))))

    def asked(self, items: tuple[MediaItem, ...], question: str, name: str) -> Case:
        """A question about these pictures; greedy and short."""
        message = ChatMessage("user", (*items, question))
        prompt = self._template.render([message], max_tokens=self._model.max_context)
        return Case(name, prompt.token_ids, prompt.media)


@cache
def picture(index: int) -> bytes:
    """A shape on white, as PNG; each has another size."""
    width, height = ((128, 128), (96, 160), (150, 100), (64, 64))[index % MOST_PICTURES]
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    box = (width // 4, height // 4, 3 * width // 4, 3 * height // 4)
    colour = ("red", "blue", "green", "orange")[index % MOST_PICTURES]
    (draw.ellipse if index % 2 == 0 else draw.rectangle)(box, fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@cache
def shape(colour: str) -> bytes:
    """A circle, the same but for its colour, as PNG."""
    image = Image.new("RGB", (112, 112), "white")
    ImageDraw.Draw(image).ellipse((20, 20, 90, 90), fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _greedy(material: Material) -> Iterator[Case]:
    for count in material.pictures:
        for question in QUESTIONS:
            yield replace(material.case(count, question, question), stopping=Stopping(max_tokens=32))
        yield replace(material.case(count, QUESTIONS[0], "beyond its end"), stopping=LONG)


def _alike(material: Material) -> Iterator[Case]:
    """Pictures that could be taken for one another, and one picture sent in two ways."""
    if material.placeholder is None:
        return
    red, blue = (MediaItem(Modality.IMAGE, RawBytes(shape("red" if first else "blue"))) for first in (True, False))
    ways = {
        "the same twice": (red, red),
        "alike, one way round": (red, blue),
        "alike, the other way round": (blue, red),
        "the same and another": (red, blue, red),
        "as a data URI": (MediaItem(Modality.IMAGE, DataUri("data:image/png;base64," + _base64(shape("red")))),),
        "with a name": (replace(red, uuid="one"), replace(blue, uuid="one")),
    }
    for name, items in ways.items():
        for question in QUESTIONS[:2]:
            yield replace(material.asked(items, question, f"{name}: {question}"), stopping=LONG)


def _sampled(material: Material) -> Iterator[Case]:
    ways = {
        "temperature 0.8": Sampling(temperature=0.8, seed=1),
        "top-k, top-p": Sampling(temperature=1.2, top_k=50, top_p=0.9, seed=2),
        "min-p": Sampling(temperature=2.0, min_p=0.02, seed=2**64 - 1),
        "penalties": Sampling(1.5, frequency_penalty=1, presence_penalty=0.5, repetition_penalty=1.3, seed=4),
    }
    for count in material.pictures:
        for name, sampling in ways.items():
            yield replace(material.case(count, QUESTIONS[1], name), sampling=sampling, stopping=LONG)


def _several(material: Material) -> Iterator[Case]:
    for count in material.pictures:
        for seed in range(3):
            sampling = Sampling(temperature=1.2, seed=seed)
            stopping = LONG if seed else Stopping(max_tokens=32)
            case = material.case(count, QUESTIONS[2], f"seed {seed}")
            yield replace(case, sampling=sampling, stopping=stopping, outputs=3)
        yield replace(material.case(count, QUESTIONS[2], "greedy"), outputs=3)


def _logprobs(material: Material) -> Iterator[Case]:
    for count in material.pictures:
        yield replace(material.case(count, QUESTIONS[0], "greedy"), logprobs=TOP_5)
        sampling = Sampling(temperature=1.5, seed=5)
        yield replace(material.case(count, QUESTIONS[0], "n = 3"), logprobs=TOP_5, sampling=sampling, outputs=3)
        yield replace(material.case(count, QUESTIONS[0], "of the prompt too"), logprobs=TOP_5_OF_ALL)


def _stops(material: Material) -> Iterator[Case]:
    ends = {
        "one string": Stopping(max_tokens=48, ignore_eos=True, stop_strings=("e",)),
        "shown": Stopping(max_tokens=48, ignore_eos=True, stop_strings=("s", "e a"), include_stop_in_output=True),
        "not at once": Stopping(max_tokens=48, ignore_eos=True, stop_strings=("a", "e"), min_tokens=5),
        "ids": Stopping(max_tokens=48, ignore_eos=True, stop_token_ids=tuple(range(0, 256, 4))),
        "one token": Stopping(max_tokens=1, stop_strings=("o",)),
    }
    for count in material.pictures:
        for seed, (name, stopping) in enumerate(ends.items()):
            sampling = Sampling(temperature=1.5, seed=seed)
            yield replace(material.case(count, QUESTIONS[2], name), sampling=sampling, stopping=stopping, outputs=2)


def _guided(material: Material) -> Iterator[Case]:
    if not material.guided:
        return
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    guides = {
        "choice": Guide(GuideKind.CHOICE, choices=("circle", "square", "a green star", "nothing")),
        "regex": Guide(GuideKind.REGEX, "[a-f]{3,9}(-[0-9]{2}){2}"),
        "JSON schema": Guide(GuideKind.JSON_SCHEMA, schema),
    }
    stopping = Stopping(max_tokens=32)
    for count in material.pictures:
        for seed, (name, guide) in enumerate(guides.items()):
            sampling = Sampling(temperature=1.0, seed=seed)
            case = material.case(count, QUESTIONS[1], name)
            yield replace(case, sampling=sampling, stopping=stopping, guide=guide, outputs=2)


def _chunks(material: Material) -> Iterator[Case]:
    for chunk in range(SMALLEST_CHUNK, LARGEST_CHUNK + 1):
        case = material.case(material.pictures[-1], QUESTIONS[1], f"{chunk} tokens a step")
        yield replace(case, chunk=chunk, logprobs=TOP_5_OF_ALL)


def _reused(material: Material, *, on_prefill: bool, on_decode: bool) -> Iterator[Case]:
    """The prompt cut everywhere, and right behind its pictures, moved through a block token by token."""
    base = replace(material.case(material.pictures[-1], QUESTIONS[1]), logprobs=TOP_5)
    for shift in range(BLOCK):
        prompt = (material.filler,) * shift + base.prompt
        behind = [index + 1 for index, token in enumerate(prompt) if token == material.placeholder]
        for tokens in behind if shift else range(1, len(prompt) + 1):
            name = f"{base.name}, moved by {shift}, {tokens} of {len(prompt)} tokens known"
            yield replace(base, name=name, prompt=prompt, reuse=Reuse(tokens, on_prefill, on_decode))


GROUPS: dict[str, Callable[[Material], Iterator[Case]]] = {
    "greedy": _greedy,
    "alike": _alike,
    "sampled": _sampled,
    "outputs": _several,
    "logprobs": _logprobs,
    "stops": _stops,
    "guided": _guided,
    "chunks": _chunks,
    "prefix-p": lambda material: _reused(material, on_prefill=True, on_decode=False),
    "prefix-d": lambda material: _reused(material, on_prefill=False, on_decode=True),
    "prefix-both": lambda material: _reused(material, on_prefill=True, on_decode=True),
}
"""Cases by what they have in common."""

TITLES = {
    "greedy": "greedy, 0-4 pictures",
    "alike": "pictures that are alike",
    "sampled": "seeded sampling, 0-4 pictures",
    "outputs": "n = 3, 0-4 pictures",
    "logprobs": "log probabilities, top 5",
    "stops": "stop strings and ids, n = 2",
    "guided": "guided output, n = 2",
    "chunks": f"chunks of {SMALLEST_CHUNK} to {LARGEST_CHUNK} tokens",
    "prefix-p": "prefix cached on prefill",
    "prefix-d": "prefix cached on decode",
    "prefix-both": "prefix cached on both",
}
"""What they have in common, for people."""
