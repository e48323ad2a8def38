"""What a client asks for, and the same once its prompt is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.core.adapter import check_adapter_name
from triptych.core.errors import InvalidRequest
from triptych.core.logprobs import LogprobOptions
from triptych.core.media_options import OptionLayer

if TYPE_CHECKING:
    from triptych.core.adapter import Adapter
    from triptych.core.encoded import Reference
    from triptych.core.encoder_input import EncoderInput, ItemInput
    from triptych.core.guide import Grammar, Guide
    from triptych.core.handles import KvHandle
    from triptych.core.layout import ItemLayout, Positions
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.media import MediaItem
    from triptych.core.plan import PromptPlan
    from triptych.core.session import Session

MAX_STOP_CONDITIONS = 64
MAX_STOP_CHARACTERS = 4096
"""All stop strings of a request together: matching them costs memory and time before the first token."""
MAX_UINT32 = 2**32 - 1
MAX_REQUEST_ID_BYTES = 1024
_GOLDEN = 0x9E3779B97F4A7C15


def derived_seed(seed: int, output_index: int) -> int:
    """The seed of one of several outputs: the request's own for the first, steps of the 64-bit golden ratio after it.

    A request for one output with the derived seed gives the same tokens.
    """
    return (seed + output_index * _GOLDEN) % 2**64


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: naming the field, its value and its range.
        """
        t = self.temperature
        _require(math.isfinite(t) and t >= 0, f"temperature must be a finite number >= 0, not {t}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
        _require(0 <= self.top_k < 2**31, f"top_k must be in [0, 2^31) (0 keeps every token), not {self.top_k}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} must be in [-2, 2], not {value}")
        r = self.repetition_penalty
        _require(math.isfinite(r) and r > 0, f"repetition_penalty must be a finite number > 0, not {r}")
        _require(self.seed is None or 0 <= self.seed < 2**64, f"seed must be in [0, 2^64), not {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Stopping:
    """When the answer ends."""

    max_tokens: int | None = None
    """None: bounded by the context window only."""
    min_tokens: int = 0
    """No end-of-sequence, stop id or stop string counts before this many tokens."""
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    """Keep the matched stop string or stop id in the output."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: naming the field.
        """
        top, least = self.max_tokens, self.min_tokens
        _require(top is None or 1 <= top <= MAX_UINT32, f"max_tokens must be in [1, 2^32), not {top}")
        _require(0 <= least <= MAX_UINT32, f"min_tokens must be in [0, 2^32), not {least}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
        )
        conditions = len(self.stop_strings) + len(self.stop_token_ids)
        _require(conditions <= MAX_STOP_CONDITIONS, f"stop has {conditions} conditions; at most {MAX_STOP_CONDITIONS}")
        _require(all(self.stop_strings), "stop must not hold an empty string")
        characters = sum(map(len, self.stop_strings))
        _require(characters <= MAX_STOP_CHARACTERS, f"stop has {characters} characters; at most {MAX_STOP_CHARACTERS}")
        _require(all(0 <= i <= MAX_UINT32 for i in self.stop_token_ids), "stop_token_ids must be in [0, 2^32)")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How the request uses the prefix cache."""

    bypass_prefix_cache: bool = False
    """Reuse nothing; new blocks are cached all the same."""
    salt: str = ""
    """Namespaces prefix blocks and encoder rows: different salts never share."""


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How encoder outputs shall be handed over."""

    backend: str = ""
    """The transport; empty: the engine's own."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the client sent it: text or tokens, with media not yet opened."""

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    """Text, or token ids; in both the i-th placeholder marker stands for the i-th media item."""
    media: tuple[MediaItem, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    cache: CacheOptions = field(default_factory=CacheOptions)
    detokenize: bool = True
    """False: token ids only. No text is shown, and none is produced but to find stop strings."""
    num_sequences: int = 1
    """Outputs, which share one prefill; their seeds are derived."""
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    guide: Guide | None = None
    lora_name: str = ""
    """A loaded adapter; empty for the base model."""
    priority: int = 0
    """Higher is more urgent."""
    session: Session | None = None
    """What another engine computed of this prompt; the answer goes on from it."""
    handoff: bool = False
    """Compute the prompt for another engine: the answer ends with ``PrefillReady``."""
    encode: EncodeOptions | None = None
    """Encode the media for another engine, and nothing else: the answer ends with ``EncoderReady``."""
    media_options: OptionLayer = field(default_factory=OptionLayer)
    """How the media are to be read, where it differs from what the server and the model prefer."""
    references: tuple[Reference, ...] = ()
    """Encoder outputs to use instead of media: the i-th belongs to the i-th placeholder marker."""

    def __post_init__(self) -> None:
        """Check the fields that need no model.

        Raises:
            InvalidRequest: naming the field.
        """
        _require(bool(self.request_id), "request_id must not be empty")
        size = len(self.request_id.encode())
        _require(size <= MAX_REQUEST_ID_BYTES, f"request_id has {size} bytes; at most {MAX_REQUEST_ID_BYTES}")
        _require(bool(self.model), "model must not be empty")
        _require(len(self.prompt) > 0, "the prompt is empty")
        _require(1 <= self.num_sequences <= MAX_UINT32, f"num_sequences must be in [1, 2^32), not {self.num_sequences}")
        if self.lora_name:
            check_adapter_name("lora_name", self.lora_name)
        _require(-(2**31) <= self.priority < 2**31, f"priority must be a signed 32-bit number, not {self.priority}")
        _require(
            self.session is None or not self.handoff,
            "kv.session asks to go on from a prompt, extra.request_type 'context_only' to compute it; not both",
        )
        _require(
            not (self.media and self.references),
            f"{len(self.media)} media item(s) and {len(self.references)} encoder_cache reference(s): send one or the "
            "other",
        )
        _require(
            self.encode is None or not (self.references or self.session or self.handoff),
            "encoder asks for the media to be encoded and nothing else; leave out encoder_cache, kv.session and "
            "extra.request_type",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Resume:
    """Where another engine's work is taken up: the prompt's KV is fetched, its first token is known."""

    handle: KvHandle
    token_id: int
    """Of this output."""
    logprob: TokenLogprob | None
    """Of that token, where the request wants the output's."""
    cached_prompt_tokens: int
    """What the other engine reused."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request that the engine can run: everything is token ids, rows and numbers."""

    request_id: str
    plan: PromptPlan
    positions: Positions
    inputs: tuple[ItemInput, ...]
    """One per item of the plan, in the same order; or none with ``resume``, and the prompt cannot be computed here."""
    sampling: Sampling
    """With its seed filled in."""
    stopping: Stopping
    """With max_tokens filled in; stop strings are matched outside the engine."""
    eos_token_ids: frozenset[int]
    cache: CacheOptions
    arrival: float
    """Monotonic seconds."""
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    grammar: Grammar | None = None
    """What the answer must match; it then ends with an end-of-sequence token, whatever ``ignore_eos`` says."""
    adapter: Adapter | None = None
    priority: int = 0
    export: str | None = None
    """The session under which the prompt's KV is handed to another engine; the request ends with its first token. Of
    several outputs all name it."""
    resume: Resume | None = None
    """Go on from another engine's work. Of several outputs all do, from one handle."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeRequest:
    """One item that an encoder engine can run. All items of one client's request are a group."""

    request_id: str
    layout: ItemLayout
    """Its runs begin at position 0."""
    input: EncoderInput | None
    """None: the item was encoded before, and its rows are perhaps still cached; if not, ``RowsGone``."""
    export: str
    """The session under which its rows are handed to another engine."""
    arrival: float
    """Monotonic seconds."""
    priority: int = 0
