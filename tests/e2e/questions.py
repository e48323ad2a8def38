"""Questions to a gateway over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from tests.drawings import data_uri, shape_png

SECONDS = 60.0


def body(question: str, *pngs: bytes, **more: Any) -> dict[str, Any]:
    """A chat request about pictures, greedy unless ``more`` says otherwise."""
    parts: list[dict] = [{"type": "image_url", "image_url": {"url": data_uri(png)}} for png in pngs]
    content = [*parts, {"type": "text", "text": question}]
    return {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": content}]} | more


def ask(url: str, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=SECONDS)


def colour_of(url: str, colour: str) -> httpx.Response:
    return ask(url, body("what colour is the circle?", shape_png("circle", colour)))


def processes_of(url: str, request_id: str) -> set[tuple[str, str]]:
    """Who did what for a request: (role, stage)."""
    spans = httpx.get(f"{url}/v1/timeline/{request_id}").json()["spans"]
    return {(span["process"].partition(" ")[0], span["name"]) for span in spans}
