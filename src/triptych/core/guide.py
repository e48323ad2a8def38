"""What bounds the words of an answer, and how the engine asks a compiled bound which token may come next."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_GUIDE_BYTES = 256 * 1024
"""Text of one guide: all choices together count."""
MAX_CHOICES = 4096


class GuideKind(enum.Enum):
    """The languages a guide may be written in; the values are the contract's field names."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Guide:
    """One guide as the client sent it."""

    kind: GuideKind
    text: str = ""
    """Schema, pattern, grammar or tag; empty for JSON_OBJECT and CHOICE."""
    choices: tuple[str, ...] = ()
    """For CHOICE: the whole answer is one of these."""

    def __post_init__(self) -> None:
        """Check what needs no compiler.

        Raises:
            InvalidRequest: naming the field.
        """
        field = f"guided.{self.kind.value}"
        if self.kind is GuideKind.CHOICE:
            if not self.choices:
                raise InvalidRequest(f"{field} has no choices")
            if len(self.choices) > MAX_CHOICES:
                raise InvalidRequest(f"{field} has {len(self.choices)} choices; at most {MAX_CHOICES}")
            if not all(self.choices):
                raise InvalidRequest(f"{field} must not hold an empty choice")
        elif self.kind is not GuideKind.JSON_OBJECT and not self.text:
            raise InvalidRequest(f"{field} must not be empty")
        size = len(self.text.encode(errors="surrogatepass")) + sum(
            len(choice.encode(errors="surrogatepass")) for choice in self.choices
        )
        if size > MAX_GUIDE_BYTES:
            raise InvalidRequest(f"{field} has {size} bytes; at most {MAX_GUIDE_BYTES}")


class Matcher(Protocol):
    """Follows one answer. Belongs to the engine thread."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, shape [vocab]; after a complete answer only the ends of sequence.

        Raises:
            InvalidRequest: the grammar takes too long to be followed.
        """
        ...

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen; one of those allowed."""
        ...


class Grammar(Protocol):
    """A compiled guide: immutable, shared by every answer that follows it."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning of an answer."""
        ...
