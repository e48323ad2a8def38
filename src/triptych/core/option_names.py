"""Media options by their names, as a request, a flag or an engine's answer spells them.

    {"image": {"min_pixels": 65536}, "video": {"fps": 2}}  -- parse_options, read_options -->  OptionLayer
                                                          <-- write_options --------------

Strict: what is not understood is refused, because an option that is silently left out is a wrong answer. Numbers may
come as floats, the only numbers that a protobuf ``Struct`` has: 2.0 is as good as 2, and 2.5 is no number of frames.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from triptych.core.config import KIB, DecodeConfig, FetchSettings, MediaLimits
from triptych.core.errors import InvalidRequest, one_line
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer

_MOST = 2**40
"""Of any whole number; what may really be read is bounded by the limits on media."""
_SHOWN = 64
"""Characters of a key that are repeated."""
_MOST_BYTES = 16 * KIB
"""Of options as JSON."""


def parse_options(text: str | bytes, where: str) -> OptionLayer:
    """What one layer says as JSON, where nothing may be said twice: else one of them would be left out in silence.

    Raises:
        InvalidRequest: it is no JSON, it says something twice, or as ``read_options``.
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                raise InvalidRequest(f"{where}: it has the key {_shown(key)} twice")
        return dict(pairs)

    if len(text) > _MOST_BYTES:
        raise InvalidRequest(f"{where} must have at most {_MOST_BYTES} bytes, not {len(text)}")
    try:
        return read_options(json.loads(text, object_pairs_hook=once), where)
    except RecursionError:
        raise InvalidRequest(f"{where}: it is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, or a number of thousands of digits
        raise InvalidRequest(f"{where}: it is not JSON: {one_line(error)}") from None


def read_options(options: object, where: str) -> OptionLayer:
    """What one layer says.

    Args:
        options: an object for each of image, video and audio, or none; as JSON or a protobuf Struct gives it.
        where: how its author calls it, for messages.

    Raises:
        InvalidRequest: naming ``WHERE.image.KEY``: the key is unknown or the server's own, its value is of the wrong
            type or out of range, or two keys contradict each other.
    """
    said: dict[str, dict[str, Any]] = {modality: {} for modality in _READERS}
    for modality, values in _object(options, where).items():
        if modality not in _READERS:
            raise InvalidRequest(f"{where}.{_shown(modality)}: unknown; it has {_listed(_READERS)}")
        for key, value in _object(values, f"{where}.{modality}").items():
            place = f"{where}.{modality}.{_shown(key)}"
            said[modality][key] = _reader(modality, key, place)(value, place)
    layer = OptionLayer(PictureLayer(**said["image"]), ClipLayer(**said["video"]))
    _check_pair(layer, where)
    return layer


def write_options(layer: OptionLayer) -> dict[str, dict[str, float | list[int]]]:
    """The mapping that ``read_options`` reads as this layer; nothing stands for nothing."""
    written: dict[str, dict[str, float | list[int]]] = {}
    for modality, part in (("image", layer.image), ("video", layer.video)):
        said = {one.name: getattr(part, one.name) for one in fields(part)}
        values = {
            key: list(value) if isinstance(value, tuple) else value for key, value in said.items() if value is not None
        }
        if values:
            written[modality] = values
    return written


def _check_pair(layer: OptionLayer, where: str) -> None:
    """Refuse what contradicts itself whatever the other layers say."""
    if layer.video.fps is not None and layer.video.num_frames is not None:
        raise InvalidRequest(f"{where}.video: fps and num_frames exclude each other; give one of them")
    layer.picture(where)
    layer.clip(where)


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {_described(value)}")
    return value


def _reader(modality: str, key: str, place: str) -> Callable[[object, str], object]:
    known = _READERS[modality]
    if key in known:
        return known[key]
    if key in _SERVER_ONLY:
        raise InvalidRequest(f"{place}: that is the server's to decide, by its flags")
    has = f"{modality} has {_listed(known)}" if known else f"{modality} has no options"
    raise InvalidRequest(f"{place}: unknown; {has}")


def _number(value: object) -> float | None:
    """The number that a value is; booleans, which Python counts among them, are none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object, place: str, least: int = 1, most: int = _MOST) -> int:
    number = _number(value)
    if number is None or not least <= number <= most or number != int(number):
        bound = "2^40" if most == _MOST else str(most)
        raise InvalidRequest(f"{place} must be a whole number in [{least}, {bound}], not {_described(value)}")
    return int(number)


def _rate(value: object, place: str) -> float:
    number = _number(value)
    if number is None or not 0 < number <= _MOST:
        raise InvalidRequest(f"{place} must be a number above 0, at most 2^40, not {_described(value)}")
    return float(number)


def _colour(value: object, place: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 3:
        raise InvalidRequest(f"{place} must be a list of red, green and blue, not {_described(value)}")
    return tuple(_whole(part, f"{place}[{index}]", 0, 255) for index, part in enumerate(value))


def _described(value: object) -> str:
    """A value for a message: numbers as they are, the rest by its kind, which may be long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a number far beyond that"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else f"{value}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return f"a list of {len(value)}" if isinstance(value, Sequence) else f"a {type(value).__name__}"


def _shown(key: object) -> str:
    """A key for a message: it is a stranger's."""
    text = str(key)
    return text if 0 < len(text) <= _SHOWN and text.isprintable() else f"{text[:_SHOWN]!r}"


def _listed(names: Mapping[str, object]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


_READERS: Mapping[str, Mapping[str, Callable[[object, str], object]]] = {
    "image": {"background": _colour, "min_pixels": _whole, "max_pixels": _whole},
    "video": {
        "fps": _rate,
        "num_frames": _whole,
        "min_frames": _whole,
        "max_frames": _whole,
        "min_pixels": _whole,
        "max_pixels": _whole,
    },
    "audio": {},
}
_SERVER_ONLY = {"device", "backend", "num_threads"} | {
    one.name for settings in (MediaLimits, DecodeConfig, FetchSettings) for one in fields(settings)
}
"""Known to be asked for, and never a request's: where the work is done, and what it may cost."""
