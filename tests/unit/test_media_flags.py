"""What the command line says of media: each setting has its flag, children hear all of it, and messages name flags
that there are.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import triptych
from triptych.cli.flags import MOST
from triptych.cli.main import app, evaluations, main
from triptych.cli.media import LIMIT_VARIABLE, MediaFlags
from triptych.core.config import GIB, MIB, DecodeConfig, FetchSettings, MediaLimits
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cyclopts import App

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (MediaLimits, DecodeConfig, FetchSettings)


def parsed(*words: str) -> MediaFlags:
    """As ``triptych engine`` reads them."""
    _, bound, _ = app.parse_args(["engine", "demo", *words], print_error=False, exit_on_error=False)
    flags = bound.arguments.get("media", MediaFlags())
    assert isinstance(flags, MediaFlags)
    return flags


def flags_of(command: App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


AUTHORITIES = certifi.where()
"""A file that may be named: an engine looks into it."""
ENGINE = flags_of(app["engine"])
EVERY = ENGINE.union(*(flags_of(app[name]) for name in ("serve", "gateway", "ask", "doctor")))
EVERY |= flags_of(evaluations["parity"]) | {"--help", "--version"}


def test_every_setting_of_media_is_a_flag_with_the_same_default() -> None:
    names = [one.name for kind in SETTINGS for one in fields(kind)]
    assert sorted(one.name for one in fields(MediaFlags)) == sorted([*names, "media_options"])
    assert {f"--{name.replace('_', '-')}" for name in names} | {"--media-options", "--no-fetch"} <= ENGINE
    assert flags_of(app["serve"]) >= {f"--{name.replace('_', '-')}" for name in names}
    flags = MediaFlags()
    assert (flags.limits(), flags.decode(), flags.fetch()) == (MediaLimits(), DecodeConfig(), FetchSettings())
    assert flags.layer() == OptionLayer()


def test_every_setting_is_handed_on() -> None:
    chosen = parsed(
        *(word for kind in SETTINGS[:2] for one in fields(kind) for word in (f"--{one.name.replace('_', '-')}", "7")),
        *("--fetch-hosts", "a.example", "--fetch-hosts", "*.b.example", "--fetch-ports", "8080", "--fetch-ports", "81"),
        *("--fetch-private-networks", "--fetch-seconds", "3", "--fetch-retries", "0"),
        *("--fetch-connect-seconds", "0.5", "--fetch-per-host", "2", "--fetch-at-once", "4"),
        *("--fetch-proxy", "http://proxy.example:3128", "--fetch-ca-file", AUTHORITIES),
        *("--media-options", '{"image": {"background": [0, 0, 0]}, "video": {"fps": 1, "max_frames": 32.0}}'),
    )
    assert chosen.limits() == MediaLimits(**{one.name: 7 for one in fields(MediaLimits)})
    assert chosen.decode() == DecodeConfig(**{one.name: 7 for one in fields(DecodeConfig)})
    assert chosen.fetch() == FetchSettings(
        fetch_hosts=("a.example", "*.b.example"),
        fetch_ports=(8080, 81),
        fetch_private_networks=True,
        fetch_seconds=3.0,
        fetch_connect_seconds=0.5,
        fetch_retries=0,
        fetch_per_host=2,
        fetch_at_once=4,
        fetch_proxy="http://proxy.example:3128",
        fetch_ca_file=AUTHORITIES,
    )
    assert chosen.layer() == OptionLayer(PictureLayer(background=(0, 0, 0)), ClipLayer(fps=1.0, max_frames=32))


def test_no_host_is_something_else_than_every_host() -> None:
    assert parsed().fetch().fetch_hosts is None
    assert parsed("--no-fetch").fetch().fetch_hosts == ()


COUNT = st.integers(1, MOST)
SECONDS = st.floats(0, 1e9, exclude_min=True)
HOSTS = st.none() | st.lists(st.sampled_from(["a.example", "*.b.example", "10.0.0.1", "::1"]), max_size=3).map(tuple)
LAYERS = st.builds(
    OptionLayer,
    st.builds(PictureLayer, st.none() | st.just((1, 2, 3)), st.none() | COUNT.filter(lambda n: n <= 2**40)),
    st.builds(ClipLayer, st.none() | SECONDS),
)
CHOSEN = st.fixed_dictionaries(
    {},
    optional={one.name: COUNT if one.type == "int" else SECONDS for kind in SETTINGS[:2] for one in fields(kind)}
    | {
        "fetch_hosts": HOSTS,
        "fetch_ports": st.lists(st.integers(1, 65535), min_size=1, max_size=3).map(tuple),
        "fetch_private_networks": st.booleans(),
        "fetch_seconds": SECONDS,
        "fetch_connect_seconds": SECONDS,
        "fetch_retries": COUNT | st.just(0),
        "fetch_per_host": COUNT,
        "fetch_at_once": COUNT,
        "fetch_proxy": st.sampled_from(["", "http://proxy.example:1"]),
        "fetch_ca_file": st.sampled_from(["", AUTHORITIES]),
        "media_options": LAYERS,
    },
)


@settings(max_examples=40)
@given(CHOSEN)
def test_a_child_hears_what_its_parent_was_told(chosen: dict[str, object]) -> None:
    flags = replace(MediaFlags(), **chosen)  # type: ignore[arg-type]
    assert parsed(*flags.words()) == flags


def test_the_variable_of_the_environment_counts_where_the_flag_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "7")
    assert parsed().limits().media_preparation_limit == 7
    assert parsed("--media-preparation-limit", "3").limits().media_preparation_limit == 3


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["engine", "no-such-directory", *words])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("value", ["", " ", "0", "-1", "2.5", "4.0", "1e3", "0x10", "four", "4 4", "٤", "9" * 20])
def test_the_variable_takes_nothing_but_a_positive_integer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, value)
    assert f"{LIMIT_VARIABLE}: must be a whole number from 1 to 2^53, not" in complaint(capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(((flag, "0"), f"{flag}: must be a whole number from 1") for flag in ("--max-items", "--max-clip-frames")),
        (("--max-items", "2.5"), "--max-items: must be a whole number from 1 to 2^53, not '2.5'"),
        (("--max-request-pixels", "-1"), "--max-request-pixels: must be a whole number from 1 to 2^53, not '-1'"),
        (("--decode-workers", "many"), "--decode-workers: must be a whole number from 1 to 2^53, not 'many'"),
        (("--fetch-retries", "-1"), "--fetch-retries: must be a whole number from 0 to 2^53, not '-1'"),
        (("--max-item-bytes", "lots"), "--max-item-bytes: 'lots' is not a size"),
        (("--max-request-bytes", "0"), "--max-request-bytes: '0' is not a size"),
        (("--prepared-cache-bytes", "9999999999GiB"), "--prepared-cache-bytes: '9999999999GiB' is more than 2^53"),
        (("--decode-seconds", "nan"), "--decode-seconds. must be above 0, not nan"),
        (("--fetch-seconds", "0"), "--fetch-seconds. must be above 0, not 0"),
        (("--fetch-connect-seconds", "inf"), "--fetch-connect-seconds. must be above 0, not inf"),
        (("--fetch-hosts", "A.example"), "--fetch-hosts. 'A.example' is no host; write a.example, *.a.example or"),
        (("--fetch-hosts", "http://a.example/"), "--fetch-hosts. 'http://a.example/' is no host"),
        (("--fetch-hosts", "a.example:8080"), "--fetch-hosts. 'a.example:8080' is no host"),
        (("--fetch-hosts", "0:0::1"), "--fetch-hosts. '0:0::1' is no host"),
        (("--fetch-hosts", "a.example,b.example"), "--fetch-hosts. 'a.example,b.example' is no host"),
        (("--no-fetch", "--fetch-hosts", "a.example"), "--fetch-hosts"),
        (("--fetch-ports", "0"), "--fetch-ports. must be between 1 and 65535, not 0"),
        (("--fetch-ports", "80,443"), "--fetch-ports"),
        (("--media-options", "{"), "--media-options: media_options: it is not JSON"),
        (("--media-options", "[" * 16_000), "--media-options: media_options: it is nested too deeply"),
        (("--media-options", "[" * 100_000), "--media-options: media_options must have at most 16384 bytes"),
        (("--media-options", "[]"), "--media-options: media_options must be an object, not a list of 0"),
        (("--media-options", '{"image": {}, "image": {}}'), "media_options: it has the key image twice"),
        (("--media-options", '{"video": {"fps": NaN}}'), "media_options.video.fps must be a number above 0"),
        (("--media-options", '{"image": {"sharpen": 1}}'), "media_options.image.sharpen: unknown; image has"),
        (("--media-options", '{"image": {"num_threads": 1}}'), "media_options.image.num_threads: that is the server's"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_wrong_words_meet_one_line_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    said = complaint(capsys, *words)
    assert says in said
    assert words[-2] in said


def texts(path: Path) -> Iterator[str]:
    """The strings of a module that can become messages; what is only known when it runs stands as a gap."""
    tree = ast.parse(path.read_text())
    silent: set[int] = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                silent.add(id(child.value))  # a docstring, or one under a constant
        if isinstance(node, ast.JoinedStr):
            silent.update(id(part) for part in node.values)
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    yield from (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent
    )


def test_every_flag_that_a_message_names_is_there() -> None:
    named, unknown = set(), []
    for path in sorted(Path(triptych.__file__).parent.rglob("*.py")):
        for text in texts(path):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*\0?", text):
                named.add(flag)
                shape = flag.replace("\0", "[a-z-]+")
                if not any(re.fullmatch(shape, one) for one in EVERY):
                    unknown.append(f"{path.name}: {flag!r}")
    assert unknown == []
    assert {"--max-item-bytes", "--fetch-hosts", "--kv-cache-bytes", "--media-preparation-limit"} <= named


PAGE = (ROOT / "docs/media.md").read_text()


def test_the_page_about_media_knows_no_flag_that_is_not_there() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", PAGE))
    assert named <= ENGINE
    assert {f"--{one.name.replace('_', '-')}" for one in fields(MediaFlags)} <= named


def written(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}"


@pytest.mark.parametrize("name", [one.name for one in fields(MediaFlags) if one.name != "media_options"])
def test_the_page_about_media_has_the_default_of_each_flag(name: str) -> None:
    default = getattr(MediaFlags(), name)
    rows = [row for row in PAGE.splitlines() if row.startswith(f"| `--{name.replace('_', '-')}")]
    assert len(rows) == 1
    said = rows[0].split("|")[2].strip()
    if isinstance(default, int) and name.endswith("_bytes"):
        assert said == (f"{default // GIB} GiB" if default % GIB == 0 else f"{default // MIB} MiB")
    elif default in (None, "", False):
        assert said in ("every host", "off", "none", "the system's")
    else:
        assert said == written(default)
