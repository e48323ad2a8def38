"""The body of ``POST /v1/chat/completions``: decoded, checked, and turned into core values.

What OpenAI's API has and this server does not offer is refused by its name; what says nothing about the answer is
listed here and ignored; every other field is unknown and refused. Nothing is dropped in silence,
except, as by JSON's readers everywhere, the first of two fields of one name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec import Raw

from triptych.core.errors import InvalidRequest
from triptych.core.media import MediaItem
from triptych.core.media_options import OptionLayer
from triptych.core.option_names import parse_options
from triptych.core.request import Sampling, Stopping
from triptych.gateway.errors import BadRequest
from triptych.gateway.parts import PART_TYPES, ContentPart, read_part
from triptych.text.chat import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Of all messages together."""

_ABSENT = Raw(b"null")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # Not offered; a client that repeats an answer of ours sends them as null.
    refusal: Raw = _ABSENT
    audio: Raw = _ABSENT
    annotations: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides the answer."""

    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON object as it is sent. Null counts as absent."""

    model: str
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Beyond OpenAI's API, as users of inference servers know them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    media_options: Raw = _ABSENT

    # About the account, the caller or billing: accepted and ignored, not even decoded.
    metadata: Raw = _ABSENT
    prompt_cache_key: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT
    safety_identifier: Raw = _ABSENT
    service_tier: Raw = _ABSENT
    store: Raw = _ABSENT
    user: Raw = _ABSENT

    # Not offered; see NEUTRAL for the values that ask for nothing.
    audio: Raw = _ABSENT
    function_call: Raw = _ABSENT
    functions: Raw = _ABSENT
    logit_bias: Raw = _ABSENT
    logprobs: Raw = _ABSENT
    modalities: Raw = _ABSENT
    n: Raw = _ABSENT
    parallel_tool_calls: Raw = _ABSENT
    prediction: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    response_format: Raw = _ABSENT
    tool_choice: Raw = _ABSENT
    tools: Raw = _ABSENT
    top_logprobs: Raw = _ABSENT
    verbosity: Raw = _ABSENT
    web_search_options: Raw = _ABSENT


NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""What is not offered yet, and the values (besides null) with which it changes nothing."""

NEUTRAL_IN_MESSAGES: dict[str, tuple[object, ...]] = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
}
MAX_NEUTRAL_BYTES = 64
"""A longer value asks for something, whatever it says."""


class ChatRequest(NamedTuple):
    """A checked request."""

    model: str
    messages: tuple[ChatMessage, ...]
    media_paths: tuple[str, ...]
    """Where in the JSON each media item stands, in the order of the items."""
    sampling_given: Mapping[str, Any]
    """What the request says about sampling; valid values of ``Sampling``."""
    stopping: Stopping
    media_options: OptionLayer
    stream: bool
    include_usage: bool

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """All media items, in their order."""
        contents = [message.content for message in self.messages if not isinstance(message.content, str)]
        return tuple(part for content in contents for part in content if isinstance(part, MediaItem))

    def sampling(self, defaults: Sampling) -> Sampling:
        """The request's own values over the model's."""
        return replace(defaults, **self.sampling_given)


_decoder = msgspec.json.Decoder(Body)


def parse(data: bytes) -> ChatRequest:
    """Read a request's body.

    Raises:
        BadRequest: naming the field, where it is a field that is wrong.
    """
    body = _decode(data)
    for name, neutral in NEUTRAL.items():
        _refuse_unless_neutral(getattr(body, name), neutral, name, name)
    if not body.messages:
        raise BadRequest("messages must not be empty", param="messages")
    if len(body.messages) > MAX_MESSAGES:
        raise BadRequest(f"{len(body.messages)} messages; at most {MAX_MESSAGES}", param="messages")
    parts = sum(len(message.content) for message in body.messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise BadRequest(f"{parts} content parts; at most {MAX_PARTS}", param="messages")
    media_paths: list[str] = []
    messages = tuple(_message(index, message, media_paths) for index, message in enumerate(body.messages))
    stream = bool(body.stream)
    try:
        sampling_given, stopping = _sampling(body), _stopping(body)
        said = bytes(body.media_options)
        media_options = OptionLayer() if said == b"null" else parse_options(said, "media_options")
    except InvalidRequest as error:
        raise _named(error) from None
    if body.stream_options is not None and not stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")
    return ChatRequest(
        model=body.model,
        messages=messages,
        media_paths=tuple(media_paths),
        sampling_given=sampling_given,
        stopping=stopping,
        media_options=media_options,
        stream=stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _decode(data: bytes) -> Body:
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _explained(error) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PART_TYPE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")
_ROLE = re.compile(r"messages\[\d+\]\.role")


def _explained(error: msgspec.ValidationError) -> BadRequest:
    """The library's message in OpenAI's words; its path becomes ``param``."""
    reason, _, path = str(error).rpartition(" - at `$")
    if not reason:
        reason, path = str(error), ""
    path = path.rstrip("`").lstrip(".")
    if unknown := _UNKNOWN_FIELD.fullmatch(reason):
        param = f"{path}.{unknown[1]}" if path else unknown[1]
        return BadRequest(f"Unrecognized request argument supplied: {param}", param=param)
    if missing := _MISSING_FIELD.fullmatch(reason):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"Missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if _PART_TYPE.fullmatch(path):
        reason += f"; this server reads parts of type {PART_TYPES}"
    elif _ROLE.fullmatch(path):
        reason += "; roles are 'system', 'developer', 'user' and 'assistant'"
    return BadRequest(f"{path or 'the body'}: {reason}", param=path or None, code="invalid_value")


def _refuse_unless_neutral(raw: Raw, neutral: tuple[object, ...], name: str, param: str) -> None:
    data = bytes(raw)
    if data == b"null":
        return
    try:
        value = msgspec.json.decode(data) if len(data) <= MAX_NEUTRAL_BYTES else data
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", param=param) from None
    # By type too: to Python True is 1.
    if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
        meant = ", ".join(msgspec.json.encode(allowed).decode() for allowed in neutral)
        hint = f"; only {meant} is" if meant else ""
        raise BadRequest(f"{name} is not supported{hint}", param=param, code="unsupported_parameter")


def _message(index: int, message: Message, media_paths: list[str]) -> ChatMessage:
    """The message as a core value; the places of its media are appended to ``media_paths``."""
    where = f"messages[{index}]"
    for name, neutral in NEUTRAL_IN_MESSAGES.items():
        _refuse_unless_neutral(getattr(message, name), neutral, name, f"{where}.{name}")
    role = "system" if message.role == "developer" else message.role
    if message.content is None:
        raise BadRequest(f"{where} has no content", param=f"{where}.content")
    if isinstance(message.content, str):
        return ChatMessage(role, message.content, message.name)
    if not message.content:
        raise BadRequest(f"{where}.content must not be empty", param=f"{where}.content")
    parts: list[str | MediaItem] = []
    for at, part in enumerate(message.content):
        parts.append(read_part(part, f"{where}.content[{at}]"))
        if isinstance(parts[-1], MediaItem):
            media_paths.append(f"{where}.content[{at}]")
    return ChatMessage(role, tuple(parts), message.name)


def _sampling(body: Body) -> dict[str, Any]:
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # both mean that every token is kept
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": body.seed,
    }
    if body.seed is not None and -(2**63) <= body.seed < 0:  # OpenAI's seeds are signed
        given["seed"] = body.seed + 2**64
    given = {name: value for name, value in given.items() if value is not None}
    replace(Sampling(), **given)  # checks the bounds
    return given


def _stopping(body: Body) -> Stopping:
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise BadRequest("max_tokens and max_completion_tokens disagree; send one of them", param="max_tokens")
    return Stopping(
        max_tokens=limits.pop() if limits else None,
        min_tokens=body.min_tokens or 0,
        stop_strings=() if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )


def _named(error: InvalidRequest) -> BadRequest:
    """An error of a core value, whose message begins with the field's name, or with the path of a field inside it."""
    if isinstance(error, BadRequest):
        return error
    path = str(error).split(" ", 1)[0].rstrip(":")
    known = path.split(".", 1)[0] in Body.__struct_fields__
    return BadRequest(str(error), param=path if known else None, code="invalid_value")
