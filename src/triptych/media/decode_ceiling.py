"""What decoding one item may take of a process: no honest one comes near, no other goes beyond.

    picture   asked once, before it is sent: its header, read here, says how large it is
    file      a video or a sound, as far as its packets: only its length is known
    clip      once its packets are counted: the pixels on the way to the last frame that is looked at
    sound     likewise: the samples of all its channels

Memory is that of the address space, which the kernel refuses where it grows beyond; what comes out is written to
memory that the engine lends, no more than may come out, and not counted here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.clip import FrameSize
from triptych.media.decode_wire import CHANNELS, MAX_MESSAGE
from triptych.media.limits import MAX_CHANNELS, SOUND_RATES

if TYPE_CHECKING:
    from triptych.core.config import DecodeConfig, MediaLimits
    from triptych.core.picture_fit import PictureFit
    from triptych.media.header import Size

_PICTURE_PIXEL = 32
"""Bytes for each pixel: half as much again as the greediest decoder takes with the normaliser (WebP with alpha: 20)."""
_ADDED_PIXEL = 12
"""Bytes for each pixel that resizing adds: the resizer has it once as it is and once half made."""
_PICTURE_PIXELS_A_SECOND = 8_000_000
"""Pixels for which the seconds of a picture are granted once more."""
_LEAST_PIXELS = 16 * 1024 * 1024
"""More than any model's least size of a picture."""
_BYTE = 4
"""Bytes for each encoded byte: decoders copy their input up to three times."""
_BYTES_A_SECOND = 64 * 1024 * 1024
"""Encoded bytes, likewise, where they are looked at and not yet decoded."""
_FRAME_PIXEL = 160
"""Bytes for each pixel of the largest frame of a video: a decoder was seen to hold 23 frames (16 that others refer to,
and those that wait for their turn), a pixel has 6 bytes where colours are of 10 bits and not halved, and turning one
frame into what is kept takes 20 more. Opening a file decodes a little too, of a sound in a film as well."""
_PACKETS_A_SECOND = 400_000
"""Packets of a file that are counted; a quarter of what they were seen to take, as with all that follow."""
_SOUND_PACKETS = 400
"""In a second of sound: the shortest that are made play 2.5 milliseconds."""
_CLIP_PIXELS_A_SECOND = 50_000_000
"""Pixels of a video on the way to the last frame that is looked at. Where all of them are looked at, half of the time
goes into making them what is kept."""
_CODED_BYTES_A_SECOND = 4 * 1024 * 1024
"""Encoded bytes of a video or a sound, where they are decoded: the more of them, the more work is in each pixel."""
_SAMPLES_A_SECOND = 10_000_000
"""Samples of a sound, of all channels."""
_PACKET_SAMPLES = 1000
"""Samples that a packet of a sound counts for besides its own, for what it takes however short it is."""


class Ceiling(NamedTuple):
    """What one item may take."""

    memory: int
    """Bytes, on top of what the process has when it begins with it."""
    seconds: float
    """Of processor time."""


def picture_ceiling(claimed: Size, fit: PictureFit | None, size: int, config: DecodeConfig) -> Ceiling:
    """For a picture whose header claims a size, of that many encoded bytes; it may be made larger than it is."""
    made = 0
    if fit is not None:
        with contextlib.suppress(ValueError):  # too narrow: it is not resized
            height, width = fit.size(FrameSize(claimed.height, claimed.width))
            made = height * width
    return _picture_ceiling(claimed.pixels, max(0, made - claimed.pixels), size, config)


def _picture_ceiling(pixels: int, added: int, size: int, config: DecodeConfig) -> Ceiling:
    return Ceiling(
        config.decode_memory_bytes + pixels * _PICTURE_PIXEL + added * _ADDED_PIXEL + size * _BYTE,
        config.decode_seconds * (1 + (pixels + added) / _PICTURE_PIXELS_A_SECOND + size / _BYTES_A_SECOND),
    )


def file_ceiling(size: int, limits: MediaLimits, config: DecodeConfig) -> Ceiling:
    """For a video or a sound of that many encoded bytes: memory for all of it, seconds until its packets are counted.

    The memory is that of the largest frames also where the first ones are small: they may grow on the way.
    """
    packets = max(limits.max_source_frames, limits.max_sound_seconds * _SOUND_PACKETS)
    return Ceiling(
        config.decode_memory_bytes + limits.max_frame_pixels * _FRAME_PIXEL + size * _BYTE,
        config.decode_seconds * (1 + packets / _PACKETS_A_SECOND + size / _BYTES_A_SECOND),
    )


def clip_seconds(pixels: int, size: int, config: DecodeConfig) -> float:
    """For the frames of a video on the way to the last one that is looked at."""
    return config.decode_seconds * (1 + pixels / _CLIP_PIXELS_A_SECOND + size / _CODED_BYTES_A_SECOND)


def sound_seconds(samples: int, packets: int, size: int, config: DecodeConfig) -> float:
    """For the samples of all channels of a sound, in so many packets."""
    work = samples + packets * _PACKET_SAMPLES
    return config.decode_seconds * (1 + work / _SAMPLES_A_SECOND + size / _CODED_BYTES_A_SECOND)


def most_clip_seconds(size: int, limits: MediaLimits, config: DecodeConfig) -> float:
    """For any video of that many encoded bytes."""
    return clip_seconds(limits.max_decoded_pixels, size, config)


def most_sound_seconds(size: int, limits: MediaLimits, config: DecodeConfig) -> float:
    """For any sound of that many encoded bytes."""
    seconds = limits.max_sound_seconds
    return sound_seconds(seconds * SOUND_RATES[1] * MAX_CHANNELS, seconds * _SOUND_PACKETS, size, config)


def process_memory(limits: MediaLimits, config: DecodeConfig) -> int:
    """For any item within all limits, in bytes."""
    size = limits.max_item_bytes
    most = limits.max_item_pixels
    picture = _picture_ceiling(most, _most_pixels(limits) - most, size, config)
    return max(picture.memory, file_ceiling(size, limits, config).memory)


def _most_pixels(limits: MediaLimits) -> int:
    """Of a picture that is made as large as a request may ask for, in whole cells, or as a model's least size."""
    return limits.max_item_pixels * 5 // 4 + _LEAST_PIXELS


def process_output(limits: MediaLimits) -> int:
    """Bytes of what comes out of any item within all limits, with what stands around it."""
    picture = _most_pixels(limits) * CHANNELS
    clip = limits.max_clip_pixels * CHANNELS + limits.max_clip_frames * 16
    sound = limits.max_sound_seconds * SOUND_RATES[1] * 4
    return max(picture, clip, sound) + MAX_MESSAGE
