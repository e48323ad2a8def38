"""Which requests could never run here. Reads only constants: safe from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, Internal, InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.config import SchedulerConfig
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
        self._check_prompt(leader)

    def _check_prompt(self, request: Request) -> None:
        length = len(request.plan)
        if length >= self.context:
            # No flag is named: whether the model, the pool or a flag set the context is not known here.
            raise PromptTooLong(
                f"the prompt has {length} tokens, which leaves no room for an answer in the context window of "
                f"{self.context} tokens"
            )
        if len(request.inputs) != len(request.plan.items):
            raise InvalidRequest(f"{len(request.inputs)} encoder inputs for {len(request.plan.items)} media items")
        if request.positions.table.shape[1] != length:
            raise InvalidRequest(f"{request.positions.table.shape[1]} positions for {length} tokens")
        start = request.logprobs.prompt_start
        if start >= length:
            raise InvalidRequest(f"prompt_logprob_start {start} lies behind the prompt, which has {length} tokens")
        capacity = self._config.encoder_cache_bytes
        for index, item in enumerate(request.plan.items):
            size = item.rows * self._row_bytes
            if size > capacity:
                raise InvalidRequest(
                    f"media item {index}: its encoder rows take {size} bytes, more than the whole encoder cache of "
                    f"{capacity}; send a smaller item, or start with --encoder-cache-bytes {size}"
                )
