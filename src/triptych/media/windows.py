"""In which stretches a model hears a sound. Pure: one plan, which decoder, processor and prompt read.

A model hears so many seconds at a time. A longer sound is cut into windows of that length, the last one as long as
what is left; a shorter one is one window. Nothing overlaps and nothing is left out, so a sample's place in the source
is its window's start plus its place there.
"""

from __future__ import annotations

from triptych.core.sound import Window


def plan_windows(samples: int, window: int | None) -> tuple[Window, ...]:
    """Cut a sound of so many samples.

    Args:
        samples: At least one.
        window: Samples that a model hears at a time; None where it hears any length.
    """
    length = samples if window is None else window
    return tuple(Window(start, min(length, samples - start)) for start in range(0, samples, length))


def window_length(seconds: float | None, rate: int) -> int | None:
    """Samples that a model hears at a time; None where it hears any length."""
    return None if seconds is None else max(1, round(seconds * rate))
