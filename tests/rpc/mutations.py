"""Requests that are wrong in every way that can be thought of, and in many that cannot: the same ones for one seed.

Each case begins as a valid request and is changed where its descriptor says that something can be changed, or in its
bytes, or in the metadata beside it; some are left as they are. Whatever happens to it, a request asks for a few tokens
at most and has a bounded size, so that a run of thousands ends soon.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.gen import lifecycle_pb2
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TOKENS = 4
MAX_BYTES = 256 * 1024
REMEMBERED = 50


class Target(NamedTuple):
    """The engine that the requests are for."""

    model: str
    vocabulary: int
    """Ids from 0 are in it."""
    picture: str
    """What stands for one picture in a prompt; empty for a text-only model."""
    png: bytes
    """A picture; some are mutated, too."""
    adapters: tuple[str, ...] = ()
    """Names of loaded adapters."""


class Case(NamedTuple):
    """One call."""

    rpc: str
    """``Generate`` or ``Abort``."""
    data: bytes
    metadata: tuple[tuple[str, str], ...]
    request_id: str
    """What it was before it was changed."""
    story: str
    """What was done to it."""


def cases(target: Target, seed: int, count: int) -> Iterator[Case]:
    """As many calls; the same ones for the same arguments, as long as protobuf and its runtime are the same."""
    rng = random.Random(seed)
    recent: list[str] = []
    for number in range(count):
        if recent and rng.random() < 0.15:
            yield _abort(rng, recent)
        else:
            case = _generate(rng, target, f"case-{number}")
            recent = [*recent[-REMEMBERED:], case.request_id]
            yield case


# -- valid requests ------------------------------------------------------------------------------


def _base(rng: random.Random, target: Target, request_id: str) -> pb.GenerateRequest:
    """A valid request with a few of the parts that a request can have."""
    message = pb.GenerateRequest(request_id=request_id, model=target.model)
    message.stopping.max_tokens = rng.randint(1, MAX_TOKENS)
    if rng.random() < 0.5:
        message.prompt = rng.choice(["hi", "what is it?", "a" * rng.randint(1, 500), "é 😀 \x00 ﷽"])
    else:
        message.token_ids.ids.extend(rng.randrange(target.vocabulary) for _ in range(rng.randint(1, 40)))
    for part in rng.sample(_PARTS, rng.randint(0, 3)):
        part(rng, target, message)
    return message


def _sampling(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    sampling = message.sampling
    sampling.temperature = rng.choice([0, 0.7, 2])
    sampling.top_p, sampling.top_k, sampling.min_p = rng.choice([0.1, 1]), rng.choice([-1, 0, 5]), rng.choice([0, 0.2])
    sampling.frequency_penalty, sampling.presence_penalty = rng.choice([-2, 0, 1]), rng.choice([0, 2])
    sampling.repetition_penalty = rng.choice([0.5, 1, 1.3])
    sampling.seed = rng.getrandbits(64)


def _several(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    message.sampling.num_sequences = rng.randint(1, 4)


def _stops(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.5:
            message.stopping.conditions.add(stop_text=rng.choice(["\n", "the", "stop it", "😀"]))
        else:
            message.stopping.conditions.add(stop_token_id=rng.randrange(target.vocabulary))
    message.stopping.include_stop_in_output = rng.random() < 0.5
    message.stopping.ignore_eos = rng.random() < 0.5


def _logprobs(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    response = message.response
    response.return_prompt_logprobs, response.return_output_logprobs = rng.random() < 0.5, True
    for asked, selection in (
        (response.return_prompt_logprobs, response.prompt_candidates),
        (response.return_output_logprobs, response.output_candidates),
    ):
        match rng.randrange(4) if asked else 3:
            case 0:
                selection.top_n = rng.randint(0, 128)
            case 1:
                selection.token_ids.ids.extend(rng.randrange(target.vocabulary) for _ in range(rng.randint(1, 5)))
            case 2:
                selection.all.SetInParent()
    if response.return_prompt_logprobs:
        response.prompt_logprob_start = rng.choice([0, 1, 5])


def _guided(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    guided = message.guided
    match rng.randrange(6):
        case 0:
            guided.json_schema = rng.choice(['{"type":"object"}', '{"enum":["a",1,null]}', "true"])
        case 1:
            guided.regex = rng.choice(["[a-z]+", "(a|b)*c", r"\d{1,3}"])
        case 2:
            guided.ebnf_grammar = rng.choice(['root ::= "yes" | "no"', 'root ::= "a" root | "b"'])
        case 3:
            guided.structural_tag = '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}'
        case 4:
            guided.choice.choices.extend(["left", "right"])
        case _:
            guided.json_object.SetInParent()
    guided.backend = rng.choice(["", "", "xgrammar"])


def _cache(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    message.kv.bypass_prefix_cache = rng.random() < 0.5
    message.kv.cache_salt = rng.choice(["", "tenant"])


def _adapter(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    message.lora_name = rng.choice(target.adapters or ("",))


def _media(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    if target.picture:
        message.prompt = target.picture + "what is it?"
        message.media.add(modality=pb.MODALITY_IMAGE, raw_bytes=target.png, mime_type="image/png")
        if rng.random() < 0.5:
            message.media_options.update(
                {"image": {"max_pixels": 16384, "background": [0, 9, 255]}, "video": {"fps": 2}}
            )


def _extra(rng: random.Random, target: Target, message: pb.GenerateRequest) -> None:
    message.extra.update({"conversation_id": "c", "unknown": [1, {"a": None}]})
    if not any(condition.stop_text for condition in message.stopping.conditions):
        message.extra.update({"detokenize": rng.random() < 0.5})


_PARTS = [_sampling, _several, _stops, _logprobs, _guided, _cache, _adapter, _media, _extra]


# -- what is done to them ------------------------------------------------------------------------


def _generate(rng: random.Random, target: Target, request_id: str) -> Case:
    message = _base(rng, target, request_id)
    story: list[str] = []
    if rng.random() < 0.8:
        story += [mutate(rng, message) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
    _bound(message)
    data = message.SerializeToString(deterministic=True)
    if rng.random() < 0.2:
        other = _base(rng, target, request_id).SerializeToString(deterministic=True)
        data = _bounded(mutate_bytes(rng, data, other, story))
    return Case("Generate", data[:MAX_BYTES], _metadata(rng, story), request_id, ", ".join(story) or "unchanged")


def _abort(rng: random.Random, recent: list[str]) -> Case:
    message = lifecycle_pb2.AbortRequest()
    story: list[str] = []
    match rng.randrange(10):
        case 0:
            message.all_requests.SetInParent()
        case 1:
            message.kv_session.session_id = "1"
        case 2:
            message.encoder_cache.cache_id = "1"
        case 3:
            pass  # no target
        case 4:
            message.request_id = rng.choice(["", "unknown", "x" * 2000])
        case _:
            message.request_id = rng.choice(recent)
    if rng.random() < 0.4:
        story.append(mutate(rng, message))
    data = message.SerializeToString(deterministic=True)
    if rng.random() < 0.2:
        data = mutate_bytes(rng, data, data, story)
    story.insert(0, f"abort {message.WhichOneof('target')}")
    return Case("Abort", data[:MAX_BYTES], _metadata(rng, story), "", ", ".join(story))


def mutate(rng: random.Random, message: Any) -> str:
    """Change one field somewhere inside; says which and how."""
    path = []
    while True:
        field = rng.choice(message.DESCRIPTOR.fields)
        path.append(field.name)
        where = ".".join(path)
        if message.DESCRIPTOR.full_name.startswith("google.protobuf."):
            return f"{where} {_mutate_struct(rng, message)}"
        inner = _inner(rng, message, field)
        if inner is None or rng.random() < 0.15:
            return f"{where} {_mutate_field(rng, message, field)}"
        message = inner


def _inner(rng: random.Random, message: Any, field: FieldDescriptor) -> Any:
    """A message inside a field, to go on with; made if it is not there."""
    if field.message_type is None or not field.message_type.fields:
        return None
    if not field.is_repeated:
        return getattr(message, field.name)
    items = getattr(message, field.name)
    return rng.choice(items) if len(items) else items.add()


def _mutate_field(rng: random.Random, message: Any, field: FieldDescriptor) -> str:
    if field.is_repeated:
        return _mutate_repeated(rng, message, field)
    if field.message_type is not None:
        if rng.random() < 0.5:
            message.ClearField(field.name)
            return "dropped"
        getattr(message, field.name).SetInParent()
        # A number that no release of the contract has.
        getattr(message, field.name).MergeFromString(b"\x9a\x3e" + bytes([3]) + b"new")
        return "with a field from the future"
    if rng.random() < 0.15:
        message.ClearField(field.name)
        return "dropped"
    value = rng.choice(_extremes(field))
    setattr(message, field.name, value)
    return f"= {value!r:.60}"


def _mutate_repeated(rng: random.Random, message: Any, field: FieldDescriptor) -> str:
    items = getattr(message, field.name)
    count = rng.choice([0, 1, 2, 65, 1100, 5000])
    if count == 0 or (field.message_type is not None and not len(items)):
        message.ClearField(field.name)
        return "emptied"
    if field.message_type is not None:
        count = min(count, 70)
        items.extend([rng.choice(items)] * count)
    else:
        items.extend([rng.choice(_extremes(field))] * count)
    return f"with {count} more"


_LARGE = "large " * 5000
_STRINGS = [
    "",
    " ",
    "\x00",
    "a",
    "é" * 600,
    "😀",
    "\ufffe\ufeff",
    "a\nb",
    "../../etc",
    _LARGE,
    "{",
    "((((",
    "[a-z]{9,99}",
]
_UINTS = [0, 1, 2, 65, 129, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_EXTREMES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_STRING: _STRINGS,
    FieldDescriptor.TYPE_BYTES: [
        b"",
        b"\x00",
        b"\xff" * 100,
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        bytes(20_000),
    ],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_UINT32: _UINTS,
    FieldDescriptor.TYPE_UINT64: [*_UINTS, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_INT32: [0, 1, -1, -2, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_INT64: [0, 1, -1, 2**63 - 1, -(2**63)],
    FieldDescriptor.TYPE_DOUBLE: [
        *(0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 2.1, 1e-300, 5e-324, 1e308, -1e308),
        *(float("nan"), float("inf"), float("-inf")),
    ],
    FieldDescriptor.TYPE_ENUM: [0, 1, 2, 3, 99, -1, 2**31 - 1],
}


def _extremes(field: FieldDescriptor) -> list[Any]:
    return _EXTREMES[field.type]


def _mutate_struct(rng: random.Random, message: Any) -> str:
    """Put something unforeseen into a Struct, or what else of that kind it is."""
    values: list[Any] = [None, True, 0, -1, 1e308, float("nan"), "", "context_only", "context_and_generation", [], {}]
    value: Any = rng.choice(values)
    for _ in range(rng.choice([0, 0, 0, 1, 20, 40])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    if message.DESCRIPTOR.name != "Struct":
        message.Clear()
        return "emptied"
    key = rng.choice(["detokenize", "conversation_id", "request_type", "unknown", "", "image"])
    message.update({key: value})
    return f"{key!r} = {value!r:.40}"


def mutate_bytes(rng: random.Random, data: bytes, other: bytes, story: list[str]) -> bytes:
    changed = bytearray(data)
    kind = rng.choice(["flipped", "cut", "doubled", "inserted", "joined", "surrogate", "random"])
    story.append(f"bytes {kind}")
    at = rng.randrange(len(changed) + 1)
    match kind:
        case "flipped":
            for _ in range(rng.randint(1, 8) if changed else 0):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case "cut":
            del changed[at:]
        case "doubled":
            changed[at:at] = changed[at : at + 100]
        case "inserted":
            changed[at:at] = rng.randbytes(rng.randint(1, 20))
        case "joined":
            changed += other
        case "surrogate":
            changed[at : at + 3] = b"\xed\xa0\x80"
        case _:
            changed[:] = rng.randbytes(rng.randint(0, 200))
    return bytes(changed)


_METADATA: list[tuple[tuple[str, str], ...]] = [
    (("openengine-priority", "5"),),
    (("openengine-priority", "-2147483648"),),
    (("openengine-priority", "2147483648"),),
    (("openengine-priority", "high"),),
    (("openengine-priority", "1"), ("openengine-priority", "2")),
    (("openengine-target-dp-rank", "0"), ("openengine-routing-key", "key")),
    (("openengine-target-dp-rank", "1"),),
    (("openengine-target-dp-rank", "99999999999"),),
    (("openengine-routing-key", ""),),
    (("openengine-new", "x"),),
    (("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"), ("tracestate", "a=1,b=2")),
    (("traceparent", "00-0-0-0"),),
    (("tracestate", "a=1,a=2"),),
    (("tracestate", "x" * 2000),),
    (("traceparent", "a"), ("traceparent", "b")),
]


def _metadata(rng: random.Random, story: list[str]) -> tuple[tuple[str, str], ...]:
    if rng.random() < 0.85:
        return ()
    chosen = rng.choice(_METADATA)
    story.append(f"metadata {chosen[0][0]} {chosen[0][1]:.20}")
    return chosen


# -- bounds --------------------------------------------------------------------------------------


def _bound(message: pb.GenerateRequest) -> None:
    """Keep the answer short: few tokens, and no more outputs than are refused or are few."""
    if message.stopping.max_tokens > MAX_TOKENS or not message.stopping.HasField("max_tokens"):
        message.stopping.max_tokens = MAX_TOKENS


def _bounded(data: bytes) -> bytes:
    """The same for bytes, where they are still a request."""
    try:
        message = pb.GenerateRequest.FromString(data)
    except UNREADABLE:
        return data
    stopping = message.stopping
    if stopping.HasField("max_tokens") and stopping.max_tokens <= MAX_TOKENS:
        return data
    _bound(message)
    return message.SerializeToString(deterministic=True)
