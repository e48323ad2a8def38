from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.content_keys import key_of, options_of, vectors
from tests.sessions import picture, plan
from triptych.core.errors import CheckpointError
from triptych.core.layout import Grid
from triptych.core.media import Modality
from triptych.processors.identity import content_key, model_revision, processor_fingerprint, prompt_digest

if TYPE_CHECKING:
    from pathlib import Path

FINGERPRINT = bytes(32)

NO_OPTIONS = b""

Fields = tuple[bytes, bytes, bytes, str, str]
fields = st.tuples(
    st.binary(max_size=8),
    st.binary(max_size=4),
    st.binary(max_size=4),
    st.text("ab", max_size=3),
    st.text("ab", max_size=3),
)


def key(data: bytes, options: bytes, fingerprint: bytes, salt: str, uuid: str = "") -> bytes:
    return content_key(data, options=options, fingerprint=fingerprint, salt=salt, uuid=uuid)


def test_a_prompt_is_its_tokens_and_its_items() -> None:
    layout = picture(1, 2, 3)
    one = plan(9, layout)
    wide, other = replace(layout, grid=Grid(1, 12, 2)), replace(layout, content_key=bytes(32))
    video = replace(layout, modality=Modality.VIDEO)
    plans = [
        one,
        plan(10, layout),
        plan(9),
        plan(9, layout, fill=99),
        *(plan(9, item) for item in (wide, other, video)),
    ]
    digests = [prompt_digest(each) for each in plans]
    assert len(set(digests)) == len(plans)
    assert {len(digest) for digest in digests} == {32}
    assert prompt_digest(plan(9, layout)) == digests[0]


@given(fields, fields)
def test_keys_are_equal_exactly_when_every_field_is(one: Fields, other: Fields) -> None:
    assert (key(*one) == key(*other)) == (one == other)


def test_no_byte_moves_from_one_field_to_the_next() -> None:
    keys = {
        key(b"ab", b"c", b"", ""),
        key(b"a", b"bc", b"", ""),
        key(b"a", b"b", b"c", ""),
        key(b"abc", b"", b"", ""),
        key(b"a", b"b", b"", "c"),
        key(b"a", b"b", b"", "", "c"),
        key(b"a\0", b"b", b"", "c"),
    }
    assert len(keys) == 7
    assert {len(entry) for entry in keys} == {32}


def test_two_pictures_under_one_uuid_differ_and_so_does_one_under_two() -> None:
    assert key(b"1", NO_OPTIONS, FINGERPRINT, "", "x") != key(b"2", NO_OPTIONS, FINGERPRINT, "", "x")
    assert key(b"1", NO_OPTIONS, FINGERPRINT, "", "x") != key(b"1", NO_OPTIONS, FINGERPRINT, "", "y")


def test_text_that_is_no_utf8_hashes_all_the_same() -> None:
    assert key(b"1", NO_OPTIONS, FINGERPRINT, "\ud800") != key(b"1", NO_OPTIONS, FINGERPRINT, "\ud801")


def test_a_key_is_no_fingerprint_of_the_same_bytes() -> None:
    assert processor_fingerprint(b"a", b"b") != content_key(b"a", options=NO_OPTIONS, fingerprint=b"b")


def test_keys_are_those_that_were_once_computed() -> None:
    known = vectors()
    assert [key_of(vector) for vector in known] == [vector["key"] for vector in known]
    # As a picture or as a video, with these options or with others, of this tenant or of another: never the same item.
    assert len({vector["key"] for vector in known}) == len(known) == 20
    assert len({vector["data"] for vector in known}) == 3


def test_another_process_computes_the_same_keys() -> None:
    here = [key_of(vector) for vector in vectors()]
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C"}
    said = subprocess.run(
        [sys.executable, "-m", "tests.content_keys"], env=environment, capture_output=True, check=True
    )
    assert json.loads(said.stdout) == here


def test_a_key_is_the_digest_of_fields_with_their_lengths() -> None:
    vector = vectors()[-1]
    options = b"clip 1" + struct.pack("<d5Q", 2.0, 0, 4, 768, 4096, 786_432)
    assert options_of(vector) == options
    fields = (b"triptych.media-item.v2", b"the file", options, bytes(32), b"tenant", b"clip 7")
    joined = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert blake3(joined).hexdigest() == vector["key"]


def write_model(directory: Path, body: bytes, *, header: bytes | None = None) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    if header is None:
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    return directory


def test_a_fine_tune_of_the_same_shape_is_another_revision(tmp_path: Path) -> None:
    one = model_revision(write_model(tmp_path / "a", bytes(1000)))
    same = model_revision(write_model(tmp_path / "b", bytes(1000)))
    tuned = model_revision(write_model(tmp_path / "c", bytes(500) + b"\1" * 500))
    assert one == same
    assert one != tuned
    (tmp_path / "b" / "config.json").write_text('{"a": 1}')
    assert model_revision(tmp_path / "b") != one


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b'{"w": 1}', b'{"w": {"data_offsets": "ab"}}', b"\xff" * 9])
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    directory = write_model(tmp_path / "a", b"", header=header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        model_revision(directory)


def test_a_header_longer_than_its_file_is_damaged(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "a", b"")
    (directory / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="header is damaged"):
        model_revision(directory)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        model_revision(tmp_path)
