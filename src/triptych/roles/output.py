"""One of the outputs of a request: what the engine says of it, and what of that its caller may see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.events import Finished, FinishReason, StopText, Tokens, Usage
from triptych.roles.visible_text import visible_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.events import Span
    from triptych.core.request import GenerateRequest
    from triptych.roles.visible_text import VisibleText
    from triptych.text.tokenizer import Tokenizer

_NOTHING = Usage(0, 0, 0)


class OutputEnd(NamedTuple):
    """The last events of one output."""

    tail: Tokens | None
    """Text that was held back."""
    finished: Finished
    """Without usage and spans, which are the request's."""


class Output:
    """Follows one request of the engine. Its events bear the client's id and the output's number."""

    def __init__(self, request_id: str, index: int, serial: str, text: VisibleText | None, *, shown: bool) -> None:
        """``text`` is None where nobody reads one; with stop strings it is read for them, ``shown`` or not."""
        self.index = index
        self.serial = serial
        """The engine's name for it."""
        self.ended = False
        """Whether nothing more is expected of the engine."""
        self.usage = _NOTHING
        """Its own counts, once it has ended."""
        self.spans: tuple[Span, ...] = ()
        """The engine's stages of it in monotonic seconds, once it has ended."""
        self._request_id = request_id
        self._text = text
        self._shown = shown
        self._stop: StopText | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete, so that the engine may end it."""
        return self._stop is not None

    def feed(self, event: Tokens) -> Tokens | None:
        """New tokens as the caller may see them; None for those that were computed after a stop string."""
        if self.stopped:
            return None
        token_ids, logprobs, text = event.token_ids, event.logprobs, ""
        if self._text is not None:
            delta = self._text.feed(token_ids)
            token_ids, logprobs = token_ids[: delta.tokens], logprobs[: delta.tokens]
            text = delta.text if self._shown else ""
            self._stop = delta.stop
        return Tokens(self._request_id, token_ids, text, logprobs, self.index)

    def finish(self, event: Finished) -> OutputEnd:
        """Its end."""
        self.ended = True
        self.usage = event.usage or _NOTHING
        self.spans = event.spans
        tail = None
        if self._text is not None:
            if self._stop is not None:  # the engine may have gone on until it heard of it
                self.usage = replace(self.usage, completion_tokens=self._text.tokens)
            else:
                delta = self._text.finish()
                self._stop = delta.stop
                if delta.text and self._shown:
                    tail = Tokens(self._request_id, (), delta.text, output_index=self.index)
        reason, stop = (event.reason, event.stop) if self._stop is None else (FinishReason.STOP, self._stop)
        return OutputEnd(tail, Finished(self._request_id, reason, None, stop, output_index=self.index))


def outputs_of(request: GenerateRequest, serials: Sequence[str], tokenizer: Tokenizer) -> tuple[Output, ...]:
    """The outputs of the request that an engine knows by ``serials``."""
    count, shown = request.num_sequences, request.detokenize
    read = shown or bool(request.stopping.stop_strings)
    texts = visible_texts(tokenizer, request.stopping, count) if read else (None,) * count
    return tuple(
        Output(request.request_id, index, serial, text, shown=shown)
        for index, (serial, text) in enumerate(zip(serials, texts, strict=True))
    )
