from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import CheckpointError
from triptych.processors.identity import content_key, model_revision, processor_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

FINGERPRINT = bytes(32)

Fields = tuple[bytes, bytes, str, str]
fields = st.tuples(st.binary(max_size=8), st.binary(max_size=4), st.text("ab", max_size=3), st.text("ab", max_size=3))


def key(data: bytes, fingerprint: bytes, salt: str, uuid: str = "") -> bytes:
    return content_key(data, fingerprint=fingerprint, salt=salt, uuid=uuid)


@given(fields, fields)
def test_keys_are_equal_exactly_when_every_field_is(one: Fields, other: Fields) -> None:
    assert (key(*one) == key(*other)) == (one == other)


def test_no_byte_moves_from_one_field_to_the_next() -> None:
    keys = {
        key(b"ab", b"c", ""),
        key(b"a", b"bc", ""),
        key(b"abc", b"", ""),
        key(b"a", b"b", "c"),
        key(b"a", b"b", "", "c"),
        key(b"a\0", b"b", "c"),
    }
    assert len(keys) == 6
    assert {len(entry) for entry in keys} == {32}


def test_two_pictures_under_one_uuid_differ_and_so_does_one_under_two() -> None:
    assert key(b"1", FINGERPRINT, "", "x") != key(b"2", FINGERPRINT, "", "x")
    assert key(b"1", FINGERPRINT, "", "x") != key(b"1", FINGERPRINT, "", "y")


def test_text_that_is_no_utf8_hashes_all_the_same() -> None:
    assert key(b"1", FINGERPRINT, "\ud800") != key(b"1", FINGERPRINT, "\ud801")


def test_a_key_is_no_fingerprint_of_the_same_bytes() -> None:
    assert processor_fingerprint(b"a", b"b") != content_key(b"a", fingerprint=b"b")


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
