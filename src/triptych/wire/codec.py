"""Requests: protobuf <-> core, both ways.

Decoding refuses what this engine does not offer by the name of the field, so that nothing a client asks for is
ignored in silence. What needs a model (ids within the vocabulary, placeholders, the context window) is checked later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triptych.core.encoded import EncoderReference, Reference, SealedReference
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.request import (
    MAX_STOP_CONDITIONS,
    CacheOptions,
    EncodeOptions,
    GenerateRequest,
    Sampling,
    Stopping,
)
from triptych.core.session import KvSession, SealedSession, Session
from triptych.wire.codec_guide import decode_guide, encode_guide
from triptych.wire.codec_logprobs import decode_options, encode_options
from triptych.wire.codec_media import (
    MAX_MEDIA_ITEMS,
    decode_media,
    decode_media_options,
    encode_media,
    encode_media_options,
)
from triptych.wire.codec_reference import seal_reference, unseal_reference
from triptych.wire.codec_session import seal, unseal
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.portable_plan import MAX_FRAMING, MAX_RUNS

if TYPE_CHECKING:
    from triptych.wire.codec_reference import ReferenceCodec
    from triptych.wire.codec_session import SessionCodec

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
"""Fields that mean the same on both sides."""
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output")


def decode_request(
    message: pb.GenerateRequest,
    *,
    priority: int = 0,
    sessions: SessionCodec | None = None,
    references: ReferenceCodec | None = None,
) -> GenerateRequest:
    """Read a request.

    Args:
        message: what came.
        priority: travels beside it, as metadata of the call.
        sessions: reads a session; None leaves it sealed.
        references: reads encoder references; None leaves them sealed.

    Raises:
        InvalidRequest: a field is absent or wrong; the message names it.
        UnsupportedFeature: a field asks for a part of the contract that is not offered; the message names it.
        Unauthenticated: the session, or a reference, is not signed with this engine's secret.
    """
    handoff = _decode_handoff(message)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("the input is absent: set prompt or token_ids")
    return GenerateRequest(
        request_id=message.request_id,
        model=message.model,
        prompt=message.prompt if kind == "prompt" else tuple(message.token_ids.ids),
        media=decode_media(message.media),
        sampling=_decode_sampling(message.sampling),
        stopping=_decode_stopping(message.stopping, handoff=handoff),
        cache=CacheOptions(bypass_prefix_cache=message.kv.bypass_prefix_cache, salt=message.kv.cache_salt),
        detokenize=_decode_detokenize(message),
        num_sequences=_decode_num_sequences(message.sampling),
        logprobs=decode_options(message.response),
        guide=decode_guide(message.guided),
        lora_name=message.lora_name,
        priority=priority,
        session=_decode_session(message, sessions),
        handoff=handoff,
        encode=EncodeOptions(message.encoder.transfer_backend) if message.HasField("encoder") else None,
        media_options=decode_media_options(message.media_options),
        references=_decode_references(message, references),
    )


def _decode_sampling(message: pb.SamplingParams) -> Sampling:
    present = _present(message, _SAMPLING_FIELDS)
    if message.HasField("top_k"):
        if message.top_k < -1:
            raise InvalidRequest(f"sampling.top_k must be >= 0 (0 or -1 keeps every token), not {message.top_k}")
        present["top_k"] = max(message.top_k, 0)
    return Sampling(**present)


def _decode_num_sequences(message: pb.SamplingParams) -> int:
    if not message.HasField("num_sequences"):
        return 1
    if message.num_sequences == 0:
        raise InvalidRequest("sampling.num_sequences must be at least 1, not 0")
    return message.num_sequences


def _decode_stopping(message: pb.StoppingOptions, *, handoff: bool) -> Stopping:
    if len(message.conditions) > MAX_STOP_CONDITIONS:
        raise InvalidRequest(f"{len(message.conditions)} stop conditions; at most {MAX_STOP_CONDITIONS}")
    strings: list[str] = []
    token_ids: list[int] = []
    for index, condition in enumerate(message.conditions):
        match condition.WhichOneof("condition"):
            case "stop_text":
                strings.append(condition.stop_text)
            case "stop_token_id":
                token_ids.append(condition.stop_token_id)
            case _:
                raise InvalidRequest(f"stopping.conditions[{index}] has neither stop_text nor stop_token_id")
    present = _present(message, _STOPPING_FIELDS)
    if handoff and present.get("max_tokens", 0) < present.get("min_tokens", 0):
        # One token is what a framework wants of this leg; min_tokens is meant for the whole answer.
        present.pop("max_tokens", None)
    return Stopping(stop_strings=tuple(strings), stop_token_ids=tuple(token_ids), **present)


def _present(message: pb.SamplingParams | pb.StoppingOptions, names: tuple[str, ...]) -> dict[str, Any]:
    # Defaults are written in core only, so an absent field is left out rather than filled in.
    return {name: getattr(message, name) for name in names if message.HasField(name)}  # type: ignore[arg-type]


def _decode_session(message: pb.GenerateRequest, sessions: SessionCodec | None) -> Session | None:
    if not message.kv.HasField("session"):
        return None
    return seal(message.kv.session) if sessions is None else sessions.decode(message.kv.session)


def _decode_references(message: pb.GenerateRequest, references: ReferenceCodec | None) -> tuple[Reference, ...]:
    if len(message.encoder_cache) > MAX_MEDIA_ITEMS:
        raise InvalidRequest(f"{len(message.encoder_cache)} encoder_cache references; at most {MAX_MEDIA_ITEMS}")
    if references is None:
        return tuple(map(seal_reference, message.encoder_cache))
    read: list[EncoderReference] = []
    runs = framing = 0
    for index, one in enumerate(message.encoder_cache):
        read.append(references.decode(one, f"encoder_cache[{index}]"))
        layout = read[-1].item.layout
        runs, framing = runs + len(layout.runs), framing + len(layout.framing)
        if runs > MAX_RUNS or framing > MAX_FRAMING:  # before the rest of them takes the event loop as long
            raise InvalidRequest(
                f"encoder_cache[{index}]: the references up to this one have {runs} runs and {framing} framing "
                f"positions; a prompt can have {MAX_RUNS} and {MAX_FRAMING}"
            )
    return tuple(read)


def _decode_handoff(message: pb.GenerateRequest) -> bool:
    """Whether only the first leg of the request is asked for. Keys of ``extra`` that are not known are ignored."""
    fields = message.extra.fields
    if "request_type" not in fields:
        return False
    match fields["request_type"].string_value:
        case "context_only":
            return True
        case "context_and_generation":
            return False
        case "generation_only" if message.kv.HasField("session"):
            return False
        case "generation_only":
            raise InvalidRequest("extra.request_type is 'generation_only', and kv.session is absent")
    raise InvalidRequest("extra.request_type must be 'context_only', 'context_and_generation' or 'generation_only'")


def _decode_detokenize(message: pb.GenerateRequest) -> bool:
    fields = message.extra.fields
    if "conversation_id" in fields and fields["conversation_id"].WhichOneof("kind") != "string_value":
        raise InvalidRequest("extra.conversation_id must be a string")
    if "detokenize" not in fields:
        return True
    if fields["detokenize"].WhichOneof("kind") != "bool_value":
        raise InvalidRequest("extra.detokenize must be a bool")
    return fields["detokenize"].bool_value


def encode_request(request: GenerateRequest) -> pb.GenerateRequest:
    """Write a request, all but its priority.

    Raises:
        InvalidRequest: a value does not fit its field (a number too large, text that is not Unicode).
    """
    try:
        return _encode_request(request)
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error


def _encode_request(request: GenerateRequest) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id=request.request_id, model=request.model)
    if isinstance(request.prompt, str):
        message.prompt = request.prompt
    else:
        message.token_ids.ids.extend(request.prompt)
    for item in request.media:
        encode_media(item, message.media.add())
    encode_media_options(request.media_options, message.media_options)
    sampling, stopping = request.sampling, request.stopping
    for name in (*_SAMPLING_FIELDS, "top_k"):
        if getattr(sampling, name) is not None:
            setattr(message.sampling, name, getattr(sampling, name))
    message.sampling.num_sequences = request.num_sequences
    for name in _STOPPING_FIELDS:
        if getattr(stopping, name) is not None:
            setattr(message.stopping, name, getattr(stopping, name))
    message.stopping.conditions.extend(pb.StopCondition(stop_text=text) for text in stopping.stop_strings)
    message.stopping.conditions.extend(pb.StopCondition(stop_token_id=number) for number in stopping.stop_token_ids)
    message.kv.bypass_prefix_cache = request.cache.bypass_prefix_cache
    message.kv.cache_salt = request.cache.salt
    encode_options(request.logprobs, message.response)
    if request.guide is not None:
        encode_guide(request.guide, message.guided)
    message.lora_name = request.lora_name
    message.extra.fields["detokenize"].bool_value = request.detokenize
    if request.handoff:
        message.extra.fields["request_type"].string_value = "context_only"
    match request.session:
        case SealedSession() as session:
            unseal(session, message.kv.session)
        case KvSession():
            raise Internal("a session that was read goes no further; a request carries it sealed")
    if request.encode is not None:
        message.encoder.transfer_backend = request.encode.backend
        message.encoder.SetInParent()
    for reference in request.references:
        match reference:
            case SealedReference():
                unseal_reference(reference, message.encoder_cache.add())
            case EncoderReference():
                raise Internal("a reference that was read goes no further; a request carries it sealed")
    return message
