"""What the pixels of a picture depend on besides its bytes."""

from __future__ import annotations

from dataclasses import dataclass

_NORMALISER = b"picture 1"
"""Changes whenever the normaliser gives other pixels for the same bytes and options."""


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """How a picture is turned into pixels."""

    background: tuple[int, int, int] = (255, 255, 255)
    """What shows through where the picture is transparent: red, green and blue, 0 to 255 each."""

    def __post_init__(self) -> None:
        """Check the colour.

        Raises:
            ValueError: it is none.
        """
        if len(self.background) != 3 or not all(0 <= part <= 255 for part in self.background):
            raise ValueError(f"a background is three numbers from 0 to 255, not {self.background}")

    def canonical(self) -> bytes:
        """The same bytes for the same pixels, in every process: what a content key covers besides the encoded bytes.

        No two options give the same; where they stand in a key, their length stands before them.
        """
        return _NORMALISER + b"\0" + bytes(self.background)
