"""What the command line says of several engines: topologies, who gets which flags, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.cli.flags import MAX_ENGINES, ROLES_BY_LETTER, split_topology
from triptych.cli.media import MediaFlags
from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions
from triptych.cli.serve import EngineFlags
from triptych.cli.transports import SharedDir, check_flags, row_transport_of, transport_of
from triptych.core.errors import Overloaded, StartupError
from triptych.core.handles import RowLayout
from triptych.roles.contract import RoleName
from triptych.transport.contract import BlockMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

E, P, D, PD = "encoder", "prefill", "decode", "aggregated"


@pytest.mark.parametrize(
    ("topology", "roles"),
    [
        ("aggregated", (PD,)),
        ("p+d", (P, D)),
        ("2p+2d", (P, P, D, D)),
        ("e+pd", (E, PD)),
        ("e+p+d", (E, P, D)),
        ("2e+1p+2d", (E, E, P, D, D)),
        ("2e+3pd", (E, E, PD, PD, PD)),
        ("d+e+p", (D, E, P)),
        ("2pd", (PD, PD)),
    ],
)
def test_topologies(topology: str, roles: tuple[str, ...]) -> None:
    assert split_topology(topology) == roles


@pytest.mark.parametrize(
    "topology",
    [
        "",
        "e + pd",
        *[
            "e",
            "2e",
            "p",
            "d",
            "e+p",
            "e+d",
            "pd+p",
            "pd+p+d",
            "e+pd+d",
            "0e+pd",
            "e+dp",
            "epd",
            "e+pd+",
            "100e+pd",
            "e+aggregated",
            "E+PD",
            "40e+30pd",
        ],
    ],
)
def test_words_that_are_no_topology_are_met_with_examples(topology: str) -> None:
    with pytest.raises(ValueError, match="is no topology") as refused:
        split_topology(topology)
    assert all(example in str(refused.value) for example in ("aggregated", "p+d", "e+pd", "e+p+d", "2e+1p+2d"))


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from(sorted(ROLES_BY_LETTER))), max_size=5))
def test_a_topology_has_what_it_takes_to_answer_and_nothing_else(parts: list[tuple[int, str]]) -> None:
    counts = {letter: sum(count for count, other in parts if other == letter) for letter in ROLES_BY_LETTER}
    apart, whole = counts["p"] > 0 and counts["d"] > 0, counts["pd"] > 0
    fits = sum(counts.values()) <= MAX_ENGINES
    valid = fits and ((apart and not whole) or (whole and not counts["p"] and not counts["d"]))
    try:
        roles = split_topology("+".join(f"{count}{letter}" for count, letter in parts))
    except ValueError:
        assert not valid
    else:
        assert valid
        assert {letter: roles.count(role) for letter, role in ROLES_BY_LETTER.items()} == counts


def words(topology: Sequence[str], role: str, **encoder: Any) -> list[str]:
    handoff = HandoffOptions(kv_transport="nixl", kv_directory=Path("/k"), handoff_secret="s" * 16)
    given_flags = EngineFlags(EngineOptions(), MediaFlags(max_items=3), handoff, EncoderOptions(**encoder))
    return given_flags.words(role, tuple(topology))


def test_each_engine_gets_the_flags_of_its_role() -> None:
    every = {"encoder_transport": "nixl", "encoder_directory": Path("/r"), "encoder_quota": 5, "encoder_ttl": 7.0}
    encoder, prefill, decode = (words([E, P, D], role, **every) for role in (E, P, D))
    for flags in (encoder, prefill):
        assert flags[flags.index("--encoder-transport") + 1] == "nixl"
        assert flags[flags.index("--encoder-directory") + 1] == "/r"
        assert flags[flags.index("--encoder-quota") + 1] == "5"
        assert flags[flags.index("--encoder-ttl") + 1] == "7.0"
    assert "--requires-handoff" in prefill
    assert not {"--requires-handoff", "--kv-transport", "--kv-directory"} & set(encoder)
    assert "--kv-transport" in prefill
    assert "--kv-transport" in decode
    assert not [flag for flag in decode if "encoder" in flag and flag != "--encoder-cache-bytes"]
    assert "--requires-handoff" not in decode
    assert not [word for flags in (encoder, prefill, decode) for word in flags if "s" * 16 in word]
    for flags in (encoder, prefill, decode):
        assert flags[flags.index("--max-items") + 1] == "3"


def test_beside_an_encoder_nobody_else_has_a_tower() -> None:
    for topology in ([E, PD], [E, E, P, D]):
        flags = words(topology, topology[-1] if PD in topology else P)
        assert flags[flags.index("--encoder-transport") + 1] == "shared-dir"
        assert "--requires-handoff" in flags


def test_without_an_encoder_nothing_is_said_of_one() -> None:
    for topology in ([PD], [P, D]):
        for role in topology:
            assert not {"--requires-handoff", "--encoder-transport"} & set(words(topology, role))


NONE, ROWS = EncoderOptions(), EncoderOptions(encoder_transport="shared-dir")


@pytest.mark.parametrize(
    ("role", "handoff", "encoder", "requires", "says"),
    [
        (RoleName.DECODE, HandoffOptions(), ROWS, False, "--encoder-transport: a decode engine takes no pictures"),
        (RoleName.ENCODER, HandoffOptions("nixl"), NONE, False, "--kv-transport: an encoder engine has no KV"),
        (RoleName.ENCODER, HandoffOptions(), ROWS, True, "--requires-handoff: encoder engines take"),
        (RoleName.DECODE, HandoffOptions(), NONE, True, "--requires-handoff: decode engines take"),
        (RoleName.PREFILL, HandoffOptions(), NONE, True, "--requires-handoff needs --encoder-transport"),
        (RoleName.AGGREGATED, HandoffOptions(), NONE, True, "--requires-handoff needs --encoder-transport"),
        (
            RoleName.PREFILL,
            HandoffOptions(kv_directory=Path("/x/y")),
            replace(ROWS, encoder_directory=Path("/x/y")),
            False,
            "are both /x/y",
        ),
    ],
)
def test_flags_that_contradict_each_other(
    role: RoleName, handoff: HandoffOptions, encoder: EncoderOptions, requires: bool, says: str
) -> None:
    with pytest.raises(StartupError, match=says):
        check_flags(role, handoff, encoder, requires_handoff=requires)


@pytest.mark.parametrize(
    ("role", "encoder", "requires"),
    [
        (RoleName.ENCODER, NONE, False),
        (RoleName.ENCODER, ROWS, False),
        (RoleName.PREFILL, ROWS, True),
        (RoleName.AGGREGATED, ROWS, True),
        (RoleName.AGGREGATED, ROWS, False),
        (RoleName.AGGREGATED, NONE, False),
        (RoleName.DECODE, EncoderOptions(encoder_ttl=3.0), False),
    ],
)
def test_flags_that_go_together(role: RoleName, encoder: EncoderOptions, requires: bool) -> None:
    check_flags(role, HandoffOptions(), encoder, requires_handoff=requires)


def test_rows_move_by_what_is_said_and_encoders_by_something_in_any_case(tmp_path: Path) -> None:
    assert row_transport_of(NONE, None, needed=False) is None
    assert row_transport_of(ROWS, None, needed=False).backend == "shared-dir"
    assert row_transport_of(NONE, None, needed=True).backend == "shared-dir"
    nixl = EncoderOptions(encoder_transport="nixl")
    assert row_transport_of(nixl, "s" * 16, needed=True).backend == "nixl"
    with pytest.raises(StartupError, match=r"--encoder-transport nixl needs a hand-off secret"):
        row_transport_of(nixl, None, needed=True)
    nowhere = tmp_path / "no" / "where"
    with pytest.raises(StartupError, match=f"--encoder-directory {nowhere}: there is no directory"):
        row_transport_of(EncoderOptions(encoder_directory=nowhere), None, needed=True)
    with pytest.raises(StartupError, match=f"--kv-directory {nowhere}: there is no directory"):
        transport_of(HandoffOptions(kv_directory=nowhere), needed=True, device="cpu")


@pytest.mark.parametrize(("files", "most"), [(20_000, 300), (100, 256)])
def test_a_producer_hands_over_as_many_as_it_has_blocks_and_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr("triptych.cli.transports.resource.getrlimit", lambda _: (files, files))
    memory = BlockMemory(RowLayout(64), np.zeros((300, 64), np.uint8), np.zeros(300, np.int64))
    publisher = SharedDir(tmp_path / "rows", 60.0).publisher(memory, "0" * 32, lambda session_id, event: None)
    try:
        for index in range(most):
            publisher.open(f"{index}")
        with pytest.raises(Overloaded, match=f"at most {most}"):
            publisher.open("one more")
    finally:
        publisher.close()
