"""Media under a wrong type, each with what becomes of it: the request says what it is, the bytes which kind of it."""

from __future__ import annotations

from typing import NamedTuple

from triptych.core.media import Modality

PNG, JPEG, WEBP = "png-rgb.png", "jpeg-420.jpg", "webp-lossless.webp"
"""Of the corpus of pictures."""
MP4, WEBM, GIF = "mp4 mpeg4", "webm vp9", "gif"
"""Of that of videos."""
NO_PICTURE = "decode: not a picture that can be read; supported: PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF"
NO_VIDEO = "decode: not a video that can be read; supported: MP4, Matroska, AVI, GIF"


class Mislabelled(NamedTuple):
    """One file, sent as something else."""

    file: str
    label: str
    """The media type that comes with it."""
    asked: Modality
    """What the request says it is."""
    refused: str | None = None
    """How the reason begins; None where it is read as under its own type."""


MISLABELLED = (
    Mislabelled(PNG, "image/jpeg", Modality.IMAGE),
    Mislabelled(JPEG, "image/png", Modality.IMAGE),
    Mislabelled(WEBP, "image/svg+xml", Modality.IMAGE),
    Mislabelled(PNG, "video/mp4", Modality.IMAGE),
    Mislabelled(JPEG, "text/html;charset=utf-8", Modality.IMAGE),
    Mislabelled(PNG, "", Modality.IMAGE),
    Mislabelled(PNG, "no type at all", Modality.IMAGE),
    Mislabelled(MP4, "video/webm", Modality.VIDEO),
    Mislabelled(WEBM, "image/png", Modality.VIDEO),
    Mislabelled(GIF, "image/gif", Modality.VIDEO),
    Mislabelled(MP4, "audio/mpeg", Modality.VIDEO),
    Mislabelled(MP4, "", Modality.VIDEO),
    Mislabelled(MP4, "image/png", Modality.IMAGE, NO_PICTURE),
    Mislabelled(WEBM, "video/webm", Modality.IMAGE, NO_PICTURE),
    Mislabelled(PNG, "video/mp4", Modality.VIDEO, NO_VIDEO),
    Mislabelled(JPEG, "image/jpeg", Modality.VIDEO, NO_VIDEO),
)
