"""The demonstration behind ``make demo``: real processes, real HTTP, two questions, a clean end."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

DEMO_MODEL = Path(__file__).resolve().parent.parent / "src" / "triptych" / "demo_model"
console = Console(highlight=False)


class Asked(NamedTuple):
    """One question's outcome."""

    answer: str
    ttft: float
    total: float
    request_id: str


def main() -> int:
    """Serve, ask, stop; returns the exit code."""
    command = [sys.executable, "-m", "triptych.cli.main", "serve", "demo", "--http", "127.0.0.1:0"]
    console.print("starting: triptych serve demo --http 127.0.0.1:0")
    started = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = wait_for_url(server)
        console.print(f"ready after {time.monotonic() - started:.1f} s: {url}\n")
        examples = json.loads((DEMO_MODEL / "examples.json").read_text())
        with httpx.Client(base_url=url, timeout=60) as client:
            wrong = sum(show(client, example) for example in chosen(examples))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            code = server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
    console.print(f"server stopped with exit code {code}")
    return code or (1 if wrong else 0)


def chosen(examples: list[dict]) -> list[dict]:
    """A drawn scene and a handwritten digit."""
    scene = next(example for example in examples if example["pictures"] == ["pictures/shapes.png"])
    digit = next(example for example in examples if example["pictures"] == ["pictures/digit.png"])
    return [scene, digit]


def wait_for_url(server: subprocess.Popen[str]) -> str:
    """The URL that the server prints once everything is up."""
    for line in server.stdout or ():
        if found := re.search(r"http://\S+", line):
            return found[0]
    sys.exit(f"show_demo: the server ended early (exit code {server.wait()})")


def show(client: httpx.Client, example: dict) -> bool:
    """Ask one question and print everything about it; returns whether the answer was wrong."""
    asked = ask(client, example)
    names = ", ".join(example["pictures"])
    console.print(f"[bold]{names}[/bold]  {example['question']}")
    console.print(f"  answer  [bold green]{asked.answer}[/bold green]")
    console.print(f"  TTFT {1000 * asked.ttft:.0f} ms, whole answer {1000 * asked.total:.0f} ms")
    spans = client.get(f"/v1/timeline/{asked.request_id}").raise_for_status().json()["spans"]
    begin = min(span["start"] for span in spans)
    table = Table("process", "stage", "from (ms)", "took (ms)", box=None, padding=(0, 2))
    for span in spans:
        after, took = 1000 * (span["start"] - begin), 1000 * (span["end"] - span["start"])
        table.add_row(span["process"].split()[0], span["name"], f"{after:.1f}", f"{took:.1f}")
    console.print(table, "")
    return asked.answer != example["answer"]


def ask(client: httpx.Client, example: dict) -> Asked:
    """Stream one answer over the OpenAI API."""
    parts: list[dict] = [
        {"type": "image_url", "image_url": {"url": data_uri(DEMO_MODEL / name)}} for name in example["pictures"]
    ]
    parts.append({"type": "text", "text": example["question"]})
    body = {"model": "demo", "messages": [{"role": "user", "content": parts}], "stream": True, "temperature": 0}
    begin = time.monotonic()
    first, text, request_id = 0.0, "", ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            sys.exit(f"show_demo: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            request_id = chunk["id"]
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.monotonic() - begin
                text += piece
    return Asked(text, first, time.monotonic() - begin, request_id)


def data_uri(path: Path) -> str:
    """A picture file as a data: URI."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


if __name__ == "__main__":
    sys.exit(main())
