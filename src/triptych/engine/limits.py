"""Which requests could never run here. Reads only constants: safe from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, Internal, InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.config import SchedulerConfig
    from triptych.core.handles import KvHandle
    from triptych.core.layout import ItemLayout
    from triptych.core.request import Request


class RequestLimits:
    """The constants of one scheduler.

    Args:
        config: bounds; ``num_blocks`` is the real size of the KV pool.
        row_bytes: bytes of one embedding row, all deepstack levels included.
    """

    __slots__ = ("_config", "_row_bytes", "context")

    def __init__(self, config: SchedulerConfig, row_bytes: int) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self.context = min(config.max_context, config.num_blocks * config.block_size)
        """Prompt and answer together, in tokens."""

    def check_count(self, count: int) -> None:
        """Refuse a group of more outputs than could ever wait or run together.

        Raises:
            InvalidRequest: naming the field and the flag.
        """
        config = self._config
        for limit, what, flag in (
            (config.max_running_requests, "run at once", "--max-running-requests"),
            (config.max_waiting_requests, "wait", "--max-waiting-requests"),
        ):
            if count > limit:
                raise InvalidRequest(
                    f"num_sequences {count} is more than the {limit} request(s) that may {what}: each output counts as "
                    f"one; ask for fewer, or start with {flag} {count}"
                )

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse a group that could never run here, or whose members could not share a prefill.

        Raises:
            PromptTooLong: prompt and one token of answer exceed the context or the KV pool.
            InvalidRequest: an item can never be held, there are too many outputs, or the request contradicts itself.
            DuplicateRequest: two members have one id.
        """
        leader = requests[0]
        self.check_count(len(requests))
        if len({request.request_id for request in requests}) < len(requests):
            raise DuplicateRequest(f"two outputs of the group of request {leader.request_id!r} have one id")
        for request in requests:
            if request.plan is not leader.plan or request.adapter is not leader.adapter:
                raise Internal("the members of a group differ in prompt or adapter")
            if request.cache != leader.cache:
                raise Internal("the members of a group differ in their cache options")
            if request.sampling.seed is None and not request.sampling.greedy:
                raise Internal("a request that samples came without a seed")
            if request.export != leader.export or handle_of(request) is not handle_of(leader):
                raise Internal("the members of a group differ in the session that they name")
        self._check_prompt(leader)
        if leader.resume is not None:
            self._check_resume(requests, leader.resume.handle)

    def _check_prompt(self, request: Request) -> None:
        length = len(request.plan)
        if length >= self.context:
            # No flag is named: whether the model, the pool or a flag set the context is not known here.
            raise PromptTooLong(
                f"the prompt has {length} tokens, which leaves no room for an answer in the context window of "
                f"{self.context} tokens"
            )
        computable = request.resume is None or bool(request.inputs)
        if computable and len(request.inputs) != len(request.plan.items):
            raise InvalidRequest(f"{len(request.inputs)} encoder inputs for {len(request.plan.items)} media items")
        if request.positions.table.shape[1] != length:
            raise InvalidRequest(f"{request.positions.table.shape[1]} positions for {length} tokens")
        start = request.logprobs.prompt_start
        if start >= length:
            raise InvalidRequest(f"prompt_logprob_start {start} lies behind the prompt, which has {length} tokens")
        check_rows(request.plan.items, self._row_bytes, self._config.encoder_cache_bytes)

    def _check_resume(self, requests: Sequence[Request], handle: KvHandle) -> None:
        size, length = self._config.block_size, len(requests[0].plan)
        if requests[0].export is not None:
            raise Internal("a request goes on from another engine's work and computes its prompt for one")
        if handle.blocks != -(-length // size):
            raise InvalidRequest(
                f"the KV session has {handle.blocks} blocks; a prompt of {length} tokens has {-(-length // size)} of "
                f"{size} tokens"
            )
        needed = length // size + len(requests)
        if needed > self._config.num_blocks:
            raise PromptTooLong(
                f"{len(requests)} outputs of a prompt of {length} tokens need {needed} KV blocks at once, and there "
                f"are {self._config.num_blocks}; ask for fewer, or start with a larger --kv-cache-bytes"
            )
        for request in requests:
            if request.logprobs.prompt:
                raise InvalidRequest(
                    "response.return_prompt_logprobs: the prompt of a KV session was computed by another engine, which "
                    "has its log probabilities"
                )
            if request.logprobs.output and request.resume is not None and request.resume.logprob is None:
                raise InvalidRequest(
                    "response.return_output_logprobs: the KV session has no log probability of its first token"
                )


def check_rows(items: Sequence[ItemLayout], row_bytes: int, capacity: int) -> None:
    """Refuse items of which one could never be held, or two could not be held together.

    Args:
        items: those of one request.
        row_bytes: bytes of one embedding row, all deepstack levels included.
        capacity: bytes of the encoder cache.

    Raises:
        InvalidRequest: naming the item.
    """
    earlier: dict[bytes, ItemLayout] = {}
    for index, item in enumerate(items):
        size = item.rows * row_bytes
        if size > capacity:
            raise InvalidRequest(
                f"media item {index}: its encoder rows take {size} bytes, more than the whole encoder cache of "
                f"{capacity}; send a smaller item, or start with --encoder-cache-bytes {size}"
            )
        before = earlier.setdefault(item.content_key, item)
        if (before.rows, before.grid) != (item.rows, item.grid):
            raise InvalidRequest(
                f"media item {index} has {item.rows} rows of the grid {tuple(item.grid)}, and an earlier item of the "
                f"request has {before.rows} of {tuple(before.grid)} under the same content key"
            )


def handle_of(request: Request) -> KvHandle | None:
    """The session that the request goes on from."""
    return None if request.resume is None else request.resume.handle
