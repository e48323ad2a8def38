from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus import clips, sounds
from tests.corpus.clips import Recipe, encoded
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.media.av_file import SOUND_CODECS, VIDEO_CODECS, open_file
from triptych.media.containers import (
    MAX_MP4_SAMPLES,
    MAX_PARTS,
    MAX_STREAMS,
    SOUND_CONTAINERS,
    VIDEO_CONTAINERS,
    Container,
    Flaw,
)

EVERY = {kind.name: kind for kind in (*VIDEO_CONTAINERS, *SOUND_CONTAINERS)}
MP4, MATROSKA, GIF = EVERY["MP4"], EVERY["Matroska"], EVERY["GIF"]


def box(kind: bytes, contents: bytes = b"") -> bytes:
    return struct.pack(">I", 8 + len(contents)) + kind + contents


def table(kind: bytes, *numbers: int) -> bytes:
    return box(kind, struct.pack(f">{len(numbers)}I", *numbers))


def track(kind: bytes, samples: int, ticks: tuple[int, int] = (1, 1)) -> bytes:
    """A track's boxes, as far as they are looked at: all samples of one size and one length."""
    handler = box(b"hdlr", bytes(8) + kind)
    return box(b"trak", handler + table(b"stts", 0, ticks[0], samples, ticks[1]) + table(b"stsz", 0, 4, samples))


def mp4(*contents: bytes) -> bytes:
    return box(b"ftyp", b"isom") + box(b"moov", b"".join(contents)) + box(b"mdat", bytes(40))


@pytest.mark.parametrize("kind", clips.KINDS)
def test_a_video_is_one_kind_and_whole(kind: str) -> None:
    data = encoded(clips.KINDS[kind])
    (found,) = (one for one in VIDEO_CONTAINERS if one.matches(data))
    assert found.flaw(data) is None


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_a_sound_is_one_kind_and_whole(kind: str) -> None:
    data = sounds.encoded(sounds.KINDS[kind])
    (found,) = (one for one in SOUND_CONTAINERS if one.matches(data))
    assert found.flaw(data) is None


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        clips.KINDS["mp4 in fragments"],
        Recipe("matroska", "mpeg4"),
        Recipe("avi", "mpeg4"),
        clips.KINDS["gif"],
    ],
)
def test_one_byte_less_is_cut_off(recipe: Recipe) -> None:
    data = encoded(recipe)
    kind = next(one for one in VIDEO_CONTAINERS if one.matches(data))
    # The last byte of an AVI file may be padding that its writer counts and does not write.
    lost = 2 if kind.name == "AVI" else 1
    flaw = kind.flaw(data[:-lost])
    assert flaw is not None
    assert "cut off" in flaw.reason
    assert not flaw.over
    assert kind.flaw(data + b"\0") is None


def test_a_recording_that_was_not_finished_does_not_say_how_long_it_is() -> None:
    segment = b"\x18\x53\x80\x67"
    assert MATROSKA.flaw(b"\x1a\x45\xdf\xa3\x80" + segment + b"\x01" + b"\xff" * 7 + b"data") is None
    assert MATROSKA.flaw(b"\x1a\x45\xdf\xa3\x80" + segment + b"\x84" + b"data") is None
    assert MATROSKA.flaw(b"\x1a\x45\xdf\xa3\x80" + segment + b"\x85" + b"data") == Flaw("cut off: 14 bytes of 15")
    for size in (0, 0xFFFFFFFF):
        assert EVERY["AVI"].flaw(b"RIFF" + struct.pack("<I", size) + b"AVI data") is None


def test_samples_of_all_tracks_count_together() -> None:
    half = MAX_MP4_SAMPLES // 2
    assert MP4.flaw(mp4(track(b"vide", half), track(b"soun", half, (2, 1)))) is None
    flaw = MP4.flaw(mp4(track(b"vide", half + 1), track(b"soun", half, (2, 1))))
    assert flaw == Flaw("its index claims 1000001 samples; at most 1000000 are read", over=True)


def test_samples_of_plain_sound_do_not_count() -> None:
    many = 2**32 - 1
    assert MP4.flaw(mp4(track(b"soun", many), track(b"vide", 9))) is None
    assert MP4.flaw(mp4(track(b"vide", 9), track(b"soun", many))) is None
    assert MP4.flaw(mp4(track(b"soun", many, (1, 1024)))) is not None
    assert MP4.flaw(mp4(track(b"vide", many))) is not None
    assert MP4.flaw(mp4(box(b"trak", box(b"hdlr", b"sounvide") + table(b"stsz", 0, 4, many)))) is not None


def test_tables_are_found_wherever_they_stand_but_not_in_the_media() -> None:
    bomb = table(b"stsz", 0, 1, 2**31)
    assert MP4.flaw(mp4(track(b"vide", 9)) + box(b"free", bomb)) is not None
    assert MP4.flaw(mp4(track(b"vide", 9)) + box(b"mdat", bomb)) is None
    assert MP4.flaw(mp4(track(b"vide", 9)) + box(b"moof", table(b"trun", 0, 2**31))) is not None


def test_edits_multiply() -> None:
    edits = table(b"elst", 0, 50)
    assert MP4.flaw(mp4(track(b"vide", 20_000) + edits)) is None
    assert "1000050 samples" in str(MP4.flaw(mp4(track(b"vide", 20_001) + edits)))


@pytest.mark.parametrize(
    ("kind", "part", "most"),
    [
        (MP4, box(b"free"), MAX_PARTS),
        (MP4, b"stsz" + bytes(16), MAX_PARTS),
        (MATROSKA, b"\xec\x80", MAX_PARTS),
        (GIF, b"\x21\x00\x00", 5 * MAX_PARTS),
    ],
)
def test_a_walk_ends_and_names_the_most_parts(kind: Container, part: bytes, most: int) -> None:
    data = {
        "MP4": lambda: mp4(part * (most + 2)) if part.startswith(b"stsz") else part * (most + 2),
        "Matroska": lambda: b"\x1a\x45\xdf\xa3\x80" + part * (most + 2),
        "GIF": lambda: b"GIF89a" + bytes(7) + part * (most + 2),
    }[kind.name]()
    assert kind.matches(data)
    assert kind.flaw(data) == Flaw(f"it is made of {most + 1} parts and more; at most {most} are read", over=True)
    with (
        pytest.raises(MediaError, match=f"media item 3: limit: {kind.name} file: it is made of {most + 1}"),
        open_file(3, data, [kind], MediaLimits(), "video"),
    ):
        pass


@pytest.mark.parametrize("container", ["mp4", "avi"])
def test_only_so_many_tracks_are_read(container: str) -> None:
    for count in (MAX_STREAMS, MAX_STREAMS + 1):
        data = clips.many_tracks(container, count)
        (kind,) = (one for one in VIDEO_CONTAINERS if one.matches(data))
        if count > MAX_STREAMS:
            assert kind.flaw(data) == Flaw("it has 33 tracks; at most 32 are read", over=True)
            continue
        assert kind.flaw(data) is None
        with open_file(0, data, [kind], MediaLimits(), "video") as file:
            assert len(file.streams) == count


@given(st.sampled_from(sorted(EVERY)), st.binary(max_size=200))
def test_any_bytes_have_an_answer(name: str, data: bytes) -> None:
    EVERY[name].matches(data)
    flaw = EVERY[name].flaw(data)
    assert flaw is None or ("\n" not in flaw.reason and flaw.reason)


@given(st.sampled_from(["mp4", "matroska", "avi"]), st.integers(0, 400), st.binary(min_size=1, max_size=12))
@settings(max_examples=200)
def test_any_damage_has_an_answer(container: str, at: int, noise: bytes) -> None:
    data = encoded(Recipe(container, "mpeg4"))
    data = data[:at] + noise + data[at + len(noise) :]
    for kind in VIDEO_CONTAINERS:
        if kind.matches(data):
            kind.flaw(data)


@pytest.mark.parametrize(
    ("demuxer", "data"),
    [
        ("hls", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n"),
        ("concat", b"ffconcat version 1.0\nfile {path}\n"),
        ("concat", b"ffconcat version 1.0\nfile 'file:{path}'\n"),
    ],
)
def test_even_a_demuxer_of_playlists_could_open_nothing(demuxer: str, data: bytes, tmp_path: object) -> None:
    other = tmp_path / "other.mp4"  # type: ignore[operator]
    other.write_bytes(encoded(Recipe(codec="mpeg4")))
    lists = Container("list", demuxer, lambda _: True, lambda _: None)
    playlist = data.replace(b"{path}", str(other).encode())
    opened = False
    with (
        pytest.raises(MediaError, match=r"damaged or cut off list file: (?P<why>.*)") as refused,
        open_file(0, playlist, [lists], MediaLimits(), "list") as file,
    ):
        opened = bool(list(file.demux()))
    assert not opened, refused.value


def test_codecs_are_known_to_the_library() -> None:
    from av.codec import Codec

    assert {Codec(name, "r").name for name in (*VIDEO_CODECS, *SOUND_CODECS)} == {*VIDEO_CODECS, *SOUND_CODECS}
