"""Content keys as they were once computed; as a program, the same list computed here and now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.core.option_names import read_options
from triptych.processors.identity import content_key

VECTORS = Path(__file__).parent / "data" / "content_keys.json"
"""For each item its encoded bytes and the processor's fingerprint in hex, its options by their names, and its key."""


def vectors() -> list[dict[str, Any]]:
    return json.loads(VECTORS.read_text())


def options_of(vector: dict[str, Any]) -> bytes:
    kind = "image" if "image" in vector else "video"
    layer = read_options({kind: vector[kind]}, "options")
    return (layer.picture() if kind == "image" else layer.clip()).canonical()


def key_of(vector: dict[str, Any]) -> str:
    return content_key(
        bytes.fromhex(vector["data"]),
        options=options_of(vector),
        fingerprint=bytes.fromhex(vector["fingerprint"]),
        salt=vector["salt"],
        uuid=vector["uuid"],
    ).hex()


if __name__ == "__main__":
    print(json.dumps([key_of(vector) for vector in vectors()]))
