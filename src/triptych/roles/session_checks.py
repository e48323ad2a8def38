"""Whether a session can be gone on from here: said before anything is held, naming what is wrong.

What another engine made is believed where a check would cost what the session saves: a prompt that comes as text is not
tokenised to be compared with the plan, and pictures that come with it are not opened. Token ids are compared: expanded,
or as they were before the expansion, with one marker for each item. A prompt that must be prepared again, since the
session came without a plan, has to become the very same.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import InvalidRequest, KvSessionNotFound, PlaceholderMismatch, SessionMismatch
from triptych.core.logprobs import GivenIds, TopN
from triptych.processors.identity import prompt_digest

if TYPE_CHECKING:
    from triptych.core.adapter import Adapter
    from triptych.core.handles import KvLayout
    from triptych.core.logprobs import LogprobOptions
    from triptych.core.plan import PromptPlan
    from triptych.core.request import GenerateRequest
    from triptych.core.session import FirstToken, KvSession
    from triptych.processors.contract import Processor


def check_origin(session: KvSession, layout: KvLayout, model: bytes) -> None:
    """Refuse what an engine of another kind computed.

    Args:
        session: the other engine's.
        layout: of this engine's KV.
        model: this engine's digest of weights, tokenizer and processor settings.

    Raises:
        SessionMismatch: naming everything that differs in the layout, else the model.
    """
    differences = ", ".join(layout.differences(session.handle.layout))
    if differences:
        raise SessionMismatch(f"kv.session: its KV has another layout; here against there: {differences}")
    if session.model != model:
        raise SessionMismatch(
            "kv.session: it was made with other weights, another tokenizer or other processor settings "
            f"(digest {model.hex()[:16]} here, {session.model.hex()[:16]} there)"
        )


def check_adapter(session: KvSession, adapter: Adapter | None) -> None:
    """Refuse what was computed with another adapter than the one that the request names here.

    Raises:
        SessionMismatch: naming both.
    """
    digest = adapter.digest if adapter else b""
    if session.adapter != digest:
        raise SessionMismatch(
            f"kv.session: it was made with another LoRA adapter (digest {digest.hex()[:16] or 'of none'} here, "
            f"{session.adapter.hex()[:16] or 'of none'} there)"
        )


def check_lease(session: KvSession, unix_nanos: int) -> None:
    """Refuse a session whose time is over.

    Raises:
        KvSessionNotFound: saying for how long.
    """
    late = unix_nanos - session.expires_unix_nanos
    if late >= 0:
        raise KvSessionNotFound(
            f"kv.session: it expired {late / 1e9:.1f} s ago by the clock of this machine; ask for a new prefill"
        )


def check_first(session: KvSession, request: GenerateRequest, vocab_size: int) -> None:
    """Refuse first tokens that are not those of this request's outputs.

    Raises:
        InvalidRequest: naming the output.
    """
    if len(session.first) != request.num_sequences:
        raise InvalidRequest(
            f"kv.session has the first tokens of {len(session.first)} output(s), and num_sequences is "
            f"{request.num_sequences}; both engines need the same"
        )
    for index, first in enumerate(session.first):
        if not 0 <= first.token_id < vocab_size:
            raise InvalidRequest(
                f"kv.session: output {index} begins with token id {first.token_id}; the vocabulary has {vocab_size}"
            )
        if request.logprobs.output and not _has_logprobs(first, request.logprobs, vocab_size):
            raise InvalidRequest(
                f"kv.session: output {index} begins without the log probabilities that response asks for; "
                "ask the prefill engine for the same"
            )


def _has_logprobs(first: FirstToken, options: LogprobOptions, vocab_size: int) -> bool:
    """Whether the first token came with the log probabilities that the others will have."""
    if first.logprob is None:
        return False
    candidates = first.logprob.candidates
    ids = np.empty(0, np.int32) if candidates is None else candidates.token_ids
    if not all(0 <= token_id < vocab_size for token_id in ids.tolist()):
        return False
    match options.output_candidates:
        case None:
            return True
        case TopN(count):
            return len(ids) == min(count, vocab_size)
        case GivenIds(token_ids):
            return tuple(ids.tolist()) == token_ids
        case _:
            return len(ids) == vocab_size


def check_blocks(session: KvSession, tokens: int) -> None:
    """Refuse a session that holds more or fewer blocks than the prompt fills.

    Raises:
        InvalidRequest: naming both.
    """
    blocks = -(-tokens // session.handle.layout.block_size)
    if session.handle.blocks != blocks:
        raise InvalidRequest(
            f"kv.session has {session.handle.blocks} KV blocks; the prompt's {tokens} tokens fill {blocks}"
        )


def check_prepared(session: KvSession, plan: PromptPlan) -> None:
    """Refuse a prompt that was expanded here, for want of the session's plan, to another one than was computed.

    Raises:
        SessionMismatch: saying what it may be.
    """
    digest = prompt_digest(plan)
    if session.prompt != digest:
        raise SessionMismatch(
            "kv.session has no plan that this engine can read, and its prompt, prepared again, is another one "
            f"(digest {digest.hex()[:16]} here, {session.prompt.hex()[:16]} there); both engines need the same prompt, "
            "media, media_options and salt, and the same --media-options and --max-clip-frames"
        )


def check_digest(plan: PromptPlan, digest: bytes) -> None:
    """Refuse a plan that is not that of the prompt which was computed.

    Raises:
        InvalidRequest: naming both.
    """
    found = prompt_digest(plan)
    if found != digest:
        raise InvalidRequest(
            f"kv.session contradicts itself: the digest of its plan is {found.hex()[:16]}, not {digest.hex()[:16]}"
        )


def check_plan(plan: PromptPlan, processor: Processor, vocab_size: int) -> None:
    """Refuse a plan that this engine could not have made.

    Args:
        plan: another engine's, whole and within bounds.
        processor: this engine's.
        vocab_size: of the model.

    Raises:
        SessionMismatch: it was made with other processor settings.
        InvalidRequest: it contradicts itself; names the item or the token.
    """
    placeholders, like = processor.placeholders, any_plan(processor)
    if plan.fingerprint != like.fingerprint:
        raise SessionMismatch(
            "kv.session: its plan was made with other processor settings or another model revision "
            f"(fingerprint {like.fingerprint.hex()[:16]} here, {plan.fingerprint.hex()[:16]} there)"
        )
    for name in ("rule", "spatial_merge"):
        ours, theirs = getattr(like, name), getattr(plan, name)
        if ours != theirs:
            raise InvalidRequest(f"kv.session: its plan's {name} is {theirs}; this model has {ours}")
    outside = (plan.token_ids < 0) | (plan.token_ids >= vocab_size)
    if outside.any():
        token_id = plan.token_ids[outside.argmax()]
        raise InvalidRequest(
            f"kv.session: its plan has the token id {token_id}, outside the vocabulary of {vocab_size}"
        )
    expected = np.full(len(plan), -1, np.int32)
    for index, item in enumerate(plan.items):
        if item.modality not in placeholders:
            raise InvalidRequest(
                f"kv.session: media item {index} is {item.modality.value}, which this model does not read"
            )
        for run in item.runs:
            expected[run.start : run.end] = placeholders[item.modality]
        expected[list(item.framing)] = -1
    markers = np.isin(plan.token_ids, list(placeholders.values()))
    wrong = np.where(expected >= 0, plan.token_ids != expected, markers)
    if wrong.any():
        raise InvalidRequest(
            f"kv.session: token {wrong.argmax()} of its plan is {plan.token_ids[wrong.argmax()]}, which does not fit "
            "where its media items lie"
        )


def any_plan(processor: Processor) -> PromptPlan:
    """One of a single token, to see what all plans of the processor have in common."""
    text = next(token_id for token_id in itertools.count() if token_id not in processor.placeholders.values())
    return processor.plan(np.array([text], np.int32), ())[0]


def check_prompt(request: GenerateRequest, plan: PromptPlan, processor: Processor) -> None:
    """Refuse a session of another prompt than the request's, as far as that costs nothing.

    Raises:
        PlaceholderMismatch: it comes with media, and not as many as the plan has.
        InvalidRequest: naming the first token that differs.
    """
    if request.media and len(request.media) != len(plan.items):
        raise PlaceholderMismatch("media", len(request.media), len(plan.items))
    if isinstance(request.prompt, str):
        return
    ids = np.asarray(request.prompt, dtype=np.int64)
    if np.array_equal(ids, plan.token_ids):
        return
    folded = processor.fold(plan)
    if np.array_equal(ids, folded):
        return
    other = plan.token_ids if len(ids) == len(plan) else folded
    if len(ids) != len(other):
        raise InvalidRequest(
            f"kv.session is of another prompt: token_ids has {len(ids)} tokens, the session's plan {len(plan)}"
            + (f" ({len(folded)} before its media were expanded)" if plan.items else "")
        )
    at = int((ids != other).argmax())
    raise InvalidRequest(
        f"kv.session is of another prompt: token {at} is {ids[at]} in token_ids and {other[at]} in the session's plan"
    )
