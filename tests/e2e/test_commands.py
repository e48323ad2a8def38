"""The commands that people type, run to their end as they type them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import openai

from tests.drawings import data_uri, shape_png
from tests.e2e.servers import COMMAND, engine, run
from triptych.cli.flags import model_directory

ROOT = Path(__file__).resolve().parents[2]


def test_the_demonstration_answers_rightly_and_leaves_nothing_running() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "show_demo")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  answer  ") == 2
    assert done.stdout.count("TTFT") >= 2
    assert "server stopped with exit code 0" in done.stdout
    address = re.search(r"ready after .*: (http://\S+)", done.stdout)
    assert address is not None
    try:
        httpx.get(address[1], timeout=2)
    except httpx.ConnectError:
        return
    raise AssertionError("something still listens")


def test_doctor_asks_the_shipped_model() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    assert "questions answered rightly" in " ".join(done.stdout.split())
    assert "failed" not in done.stdout


def test_ask_takes_several_pictures_and_a_directory(tmp_path: Path) -> None:
    files = []
    for shape, colour in (("circle", "red"), ("square", "blue")):
        files.append(tmp_path / f"{shape}.png")
        files[-1].write_bytes(shape_png(shape, colour))
    model = str(model_directory("demo"))
    done = run("ask", *map(str, files), "what colour is the shape in the second picture?", "--model", model)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "blue"


def test_a_gateway_in_front_of_two_engines_that_were_started_by_hand() -> None:
    with engine("demo") as first, engine("demo") as second:
        command = [*COMMAND, "gateway", "--engine", first, "--engine", second, "--http", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gateway:
            try:
                assert gateway.stdout is not None
                assert gateway.stderr is not None
                found = re.search(r"http://\S+", gateway.stdout.readline())
                assert found is not None
                states = {gateway.stderr.readline() for _ in range(2)}  # both become ready
                assert all("is ready" in state for state in states)
                parts: list[dict] = [
                    {"type": "image_url", "image_url": {"url": data_uri(shape_png("circle", "green"))}},
                    {"type": "text", "text": "what colour is the circle?"},
                ]
                with openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0) as client:
                    for _ in range(4):
                        answer = client.chat.completions.create(
                            model="demo", messages=[{"role": "user", "content": parts}]
                        )
                        assert answer.choices[0].message.content == "green"
            finally:
                gateway.terminate()
            assert gateway.wait(timeout=60) == 0
