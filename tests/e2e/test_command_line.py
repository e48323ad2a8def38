"""Wrong flags and wrong models: one clear line, a non-zero exit code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image

import triptych
from tests.corpus.clips import KINDS, encoded
from tests.drawings import shape_png
from tests.e2e.servers import COMMAND, run
from triptych.cli.ask import read_item
from triptych.cli.media import LIMIT_VARIABLE, MediaFlags
from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions
from triptych.core.media import Modality

DEMO = Path(triptych.__file__).parent / "demo_model"


def complains(*arguments: str, says: str) -> None:
    check_complaint(run(*arguments), says)


def check_complaint(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode in (1, 2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert says in lines[0]


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("engine", "no-such-dir"), "no such directory"),
    (("engine", "/"), "config.json"),
    (("engine", "demo", "--role", "wizard"), "aggregated"),
    (("engine", "demo", "--grpc", "somewhere"), "HOST:PORT"),
    (("engine", "demo", "--grpc", "127.0.0.1:99999"), "HOST:PORT"),
    (("engine", "demo", "--kv-cache-bytes", "lots"), "MiB"),
    (("engine", "demo", "--kv-cache-bytes", "1KiB"), "--kv-cache-bytes"),
    (("engine", "demo", "--kv-cache-bytes", "1000000GiB"), "--kv-cache-bytes"),
    (("engine", "demo", "--max-batched-tokens", "0"), "max-batched-tokens"),
    (("engine", "demo", "--max-running-requests", "many"), "max-running-requests"),
    (("engine", "demo", "--dtype", "float7"), "float32"),
    (("engine", "demo", "--device", "toaster"), "cpu"),
    (("engine", "demo", "--grpc", "0.0.0.0:0"), "allow-plaintext"),
    (("engine", "demo", "--tls-key", "/etc/hostname"), "--tls-certificate"),
    (("engine", "demo", "--tls-client-ca", "/etc/hostname"), "--tls-certificate"),
    (("engine", "demo", "--tls-certificate", "/nowhere.pem", "--tls-key", "/nowhere.key"), "/nowhere.pem"),
    (("engine", "demo", "--tls-certificate", "/etc/hostname", "--tls-key", "/etc/hostname"), "--tls-certificate"),
    (("engine", "demo", "--max-loras", "-1"), "max-loras"),
    (("engine", "demo", "--max-message-bytes-held", "64MiB"), "--max-message-bytes-held must be at least 128MiB"),
    (("engine", "demo", "--max-lora-rank", "0"), "max-lora-rank"),
    (("gateway", "--engine", "127.0.0.1:1", "--engine-ca", "/etc/hostname"), "--engine-ca"),
    (("gateway", "--engine", "127.0.0.1:1", "--engine-key", "/etc/hostname"), "--engine-certificate"),
    (("engine", "demo", "--fetch-ca-file", "/nowhere.pem"), "--fetch-ca-file. [Errno 2] No such file"),
    (("engine", "demo", "--fetch-ca-file", "/etc/hostname"), "--fetch-ca-file"),
    (("engine", "demo", "--fetch-proxy", "https://proxy.example"), "--fetch-proxy. a proxy is spoken to by http"),
    (("engine", "demo", "--fetch-proxy", "proxy.example:3128"), "--fetch-proxy"),
    (("engine", "demo", "--media-options", '{"image": {"sharpen": 1}}'), "media_options.image.sharpen"),
    (("serve", "demo", "--max-items", "2.5"), "--max-items"),
    (("serve", "demo", "--fetch-proxy", "https://proxy.example"), "--fetch-proxy"),
    (("engine", "demo", "--sparkle"), "sparkle"),
    (("gateway", "--http", "127.0.0.1:0"), "engine"),
    (("serve", "demo", "--topology", "e+p"), "2e+1p+2d"),
    (("serve", "no-such-dir"), "no such directory"),
    (("ask", "one-word"), "question"),
    (("ask", "no-such.png", "what is it?"), "no-such.png"),
    (("ask", "no-such.png", ""), "question is empty"),
    (("ask", "picture.png", "what", "is", "it"), "quotes"),
    (("serve",), "MODEL"),
    (("serve", "demo", "--http", "0.0.0.0:0"), "allow-plaintext"),
    (("serve", "demo", "--device", "toaster"), "cpu"),
    (("gateway", "--engine", "127.0.0.1:1", "--http", "0.0.0.0:0"), "allow-plaintext"),
    (("engine", "demo", "--max-context", "99999999"), "--max-context"),
    (("frobnicate",), "frobnicate"),
]


@pytest.fixture(scope="module")
def endings() -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """Of all wrong commands; several run at once, since most of their time goes into imports."""
    commands = [arguments for arguments, _ in WRONG]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(commands, pool.map(lambda words: run(*words), commands), strict=True))


@pytest.mark.parametrize(
    ("arguments", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_words(
    endings: dict[tuple[str, ...], subprocess.CompletedProcess[str]], arguments: tuple[str, ...], says: str
) -> None:
    check_complaint(endings[arguments], says)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        complains("engine", "demo", "--grpc", address, says=address)
        complains("engine", "demo", "--grpc", "127.0.0.1:0", "--metrics", address, says=address)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    return tmp_path / "model"


def test_an_unknown_architecture_lists_what_is_supported(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = ["GrandModelForEverything"]
    (copy / "config.json").write_text(json.dumps(config))
    complains("engine", str(copy), "--grpc", "127.0.0.1:0", says="Qwen3VLForConditionalGeneration")


def test_missing_weights_are_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    complains("engine", str(copy), "--grpc", "127.0.0.1:0", says="safetensors")


def test_a_deeper_config_than_the_weights_names_a_tensor(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (copy / "config.json").write_text(json.dumps(config))
    complains("engine", str(copy), "--grpc", "127.0.0.1:0", says="model.language_model.layers.")


def test_a_tokenizer_without_the_special_tokens_names_them(copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|image_pad|>"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    complains("engine", str(copy), "--grpc", "127.0.0.1:0", says="<|image_pad|>")


def test_ask_answers(tmp_path: Path) -> None:
    picture = tmp_path / "circle.png"
    picture.write_bytes(shape_png("circle", "red"))
    done = run("ask", str(picture), "what colour is the circle?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "red"


def test_a_broken_picture_names_the_item(tmp_path: Path) -> None:
    picture = tmp_path / "broken.png"
    picture.write_bytes(b"not a picture")
    complains("ask", str(picture), "what is it?", says="broken.png: not a picture")


def test_a_video_is_told_by_its_first_bytes_and_refused_by_a_model_that_reads_none(tmp_path: Path) -> None:
    film = tmp_path / "film.png"
    film.write_bytes(encoded())
    complains("ask", str(film), "what is it?", says="film.png: a video, which demo cannot read")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_video_file_is_taken_for_one(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(encoded(KINDS[kind]))
    assert read_item(file).modality is (Modality.IMAGE if kind == "gif" else Modality.VIDEO)


@pytest.mark.parametrize("name", ["AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WebP"])
def test_every_kind_of_picture_file_is_taken_for_one(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file.mp4"
    Image.new("RGB", (16, 16), "red").save(file, name)
    assert read_item(file).modality is Modality.IMAGE


def test_an_engine_does_not_start_with_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    for command in ("engine", "serve"):
        complains(command, "demo", says=f"{LIMIT_VARIABLE}: must be a whole number")


@pytest.mark.parametrize("command", ["engine", "gateway", "serve", "ask", "doctor"])
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "triptych" in done.stdout


@pytest.mark.parametrize("command", ["engine", "serve"])
def test_every_flag_has_a_help_line_and_a_default(command: str) -> None:
    words = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    words = re.sub(r" --no-[a-z-]+", "", words)
    for field in (*fields(EngineOptions), *fields(MediaFlags), *fields(HandoffOptions), *fields(EncoderOptions)):
        if field.name == "handoff_secret":
            continue  # its default is not shown
        flag = f"--{field.name.replace('_', '-')} "
        after = words[words.index(flag) + len(flag) :].split(" --")[0]
        assert "default" in after.lower(), field.name
        assert len(after.split()) > 4, field.name


def test_an_engine_whose_parent_is_gone_does_not_go_on_loading() -> None:
    command = [*COMMAND, "engine", "demo", "--grpc", "127.0.0.1:0", "--announce"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ready" not in done.stdout
    assert done.stderr == ""


def test_serve_says_at_once_that_a_checkpoint_has_no_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    complains("serve", str(copy), "--http", "127.0.0.1:0", says="chat template")


def test_an_engine_with_a_parent_but_no_stdin_ends() -> None:
    command = f"{' '.join(COMMAND)} engine demo --grpc 127.0.0.1:0 --announce <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
