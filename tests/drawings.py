"""Small pictures that the demo model knows, drawn here."""

from __future__ import annotations

import base64
import io

from PIL import Image, ImageDraw


def shape_png(shape: str, colour: str, size: int = 128) -> bytes:
    """One filled shape on white, as PNG."""
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    a, b = size // 4, 3 * size // 4
    if shape == "circle":
        draw.ellipse((a, a, b, b), fill=colour)
    elif shape == "square":
        draw.rectangle((a, a, b, b), fill=colour)
    elif shape == "triangle":
        draw.polygon(((size // 2, a), (a, b), (b, b)), fill=colour)
    else:
        raise ValueError(shape)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_uri(png: bytes) -> str:
    """The picture as a data: URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
