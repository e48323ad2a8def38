from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from tests.corpus import clips, sounds
from tests.corpus.clips import Recipe, drawing, encoded, number_in
from tests.decoding_here import decode_clip
from triptych.core.clip import Clip, FrameFit, FrameSampling, FrameSize
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.core.media import Stage
from triptych.media.video import open_clip

LIMITS = MediaLimits()
FOUR = FrameSampling(num_frames=4)
ALL = FrameSampling()


def decode(data: bytes, sampling: FrameSampling = ALL, limits: MediaLimits = LIMITS, **more: object) -> Clip:
    return decode_clip(0, data, sampling, limits, **more)  # type: ignore[arg-type]


def numbers(clip: Clip) -> list[int]:
    return [number_in(frame) for frame in clip.frames]


def reason(data: bytes, sampling: FrameSampling = ALL, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as refused:
        decode_clip(0, data, sampling, limits)
    assert refused.value.index == 0
    assert "\n" not in str(refused.value)
    return refused.value


@pytest.mark.parametrize("kind", clips.KINDS)
def test_the_frames_of_the_plan_are_the_frames_that_come(kind: str) -> None:
    recipe = clips.KINDS[kind]
    clip = decode(encoded(recipe), FOUR)
    assert clip.plan.indices == (0, 10, 19, 29)
    assert numbers(clip) == [0, 10, 19, 29]
    assert clip.plan.timestamps == tuple(at / clip.plan.fps for at in clip.plan.indices)
    assert (clip.plan.fps, clip.plan.total) == (float(recipe.fps), 30)
    assert clip.frames.dtype == np.uint8
    assert clip.frames.shape == (4, clips.HEIGHT, clips.WIDTH, 3)


@pytest.mark.parametrize("kind", clips.VARYING)
def test_of_a_varying_rate_the_frame_on_display_is_taken(kind: str) -> None:
    data = encoded(clips.VARYING[kind])
    every = decode(data)
    assert numbers(every) == list(range(10))
    assert every.plan.timestamps == pytest.approx([at / 1000 for at in clips.VARIABLE])
    clip = decode(data, FrameSampling(num_frames=4))
    # At 0, 3.01, 6.02 and 9.03 seconds.
    assert numbers(clip) == [0, 5, 7, 9]
    assert clip.plan.timestamps == pytest.approx((0, 1.04, 5.04, 9.033))
    assert clip.plan.duration > 9.033


def test_a_frame_that_is_never_shown_is_stood_in_for_by_the_one_on_display() -> None:
    clip = decode(clips.with_hidden_frames(10, 18, 19), FOUR)
    assert numbers(clip) == [0, 9, 17, 29]
    assert clip.plan.indices == (0, 9, 17, 29)
    assert clip.plan.timestamps == tuple(at / 30 for at in clip.plan.indices)


def test_the_last_frame_never_shown_is_an_error_not_a_shorter_clip() -> None:
    clip = decode(clips.with_hidden_frames(29), FOUR)
    assert clip.plan.indices == (0, 10, 19, 28)
    assert "2 of 4 chosen frames" in reason(clips.with_hidden_frames(*range(11, 30)), FOUR).reason


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [None, 0, 90, 180, 270])
def test_frames_are_turned_upright(degrees: int | None, mirrored: bool) -> None:
    recipe = Recipe(codec="mpeg4", frames=2, degrees=degrees, mirrored=mirrored)
    clip = decode(encoded(recipe))
    assert numbers(clip) == [0, 1]
    assert clip.frames.shape[1:3] == (clips.HEIGHT, clips.WIDTH)


def test_lossless_frames_come_as_they_were_drawn() -> None:
    clip = decode(encoded(clips.KINDS["mp4 h264 lossless"]), FOUR)
    assert (clip.frames == np.stack([drawing(number) for number in (0, 10, 19, 29)])).all()


def test_what_is_transparent_becomes_white() -> None:
    clip = decode(clips.transparent_gif())
    assert clip.plan.timestamps == (0.0, 0.5)
    assert (clip.frames[:, 0, 0] == 255).all()
    assert clip.frames[0, 10, 9].tolist() == [255, 0, 0]
    assert clip.frames[1, 10, 9].tolist() == [255, 255, 255]


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_one_frame(container: str) -> None:
    clip = decode(encoded(Recipe(container, "mpeg4", frames=1)), FrameSampling(fps=2, min_frames=4))
    assert numbers(clip) == [0]
    assert clip.plan.timestamps == (0.0,)


def test_ten_seconds_at_one_frame_a_second() -> None:
    clip = decode(encoded(Recipe(frames=10, fps=Fraction(1))), FrameSampling(fps=2, min_frames=4, max_frames=768))
    assert numbers(clip) == list(range(10))
    assert clip.plan.timestamps == tuple(float(at) for at in range(10))
    assert clip.plan.duration == 10.0


@pytest.mark.parametrize(
    ("recipe", "mark"), [(Recipe("avi", "mpeg4"), b"idx1"), (Recipe("matroska", "mpeg4"), b"\x1c\x53\xbb\x6b")]
)
def test_an_index_for_seeking_is_not_needed(recipe: Recipe, mark: bytes) -> None:
    assert numbers(decode(clips.broken_index(recipe, mark), FOUR)) == [0, 10, 19, 29]


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), clips.KINDS["mp4 in fragments"], *(Recipe(c, "mpeg4") for c in ("matroska", "avi")), clips.KINDS["gif"]],
)
def test_a_clip_cut_off_anywhere_is_an_error_never_a_shorter_clip(recipe: Recipe) -> None:
    for part in clips.truncations(encoded(recipe)):
        assert reason(part).stage is Stage.DECODE


@pytest.mark.parametrize("name", clips.HOSTILE)
def test_what_is_no_good_video_says_why(name: str) -> None:
    bad = clips.HOSTILE[name]
    with pytest.raises(MediaError, match=bad.reason):
        decode(bad.make())


@pytest.mark.parametrize("kind", ["m4a", "mov plain", "matroska aac, 6 channels", "webm opus", "avi mp3"])
def test_a_sound_is_no_video(kind: str) -> None:
    assert reason(sounds.encoded(sounds.KINDS[kind])).reason == "it has no video: only sound"


def test_a_file_named_in_a_file_is_not_opened(tmp_path: object) -> None:
    other = tmp_path / "other.mp4"  # type: ignore[operator]
    other.write_bytes(encoded(Recipe(codec="mpeg4")))
    assert reason(clips.refers_to(str(other))).stage is Stage.DECODE


def test_bytes_after_the_end_do_no_harm() -> None:
    for recipe in (Recipe(), Recipe("matroska", "mpeg4"), Recipe("avi", "mpeg4"), clips.KINDS["gif"]):
        assert numbers(decode(encoded(recipe) + b"and so on" * 9, FOUR)) == [0, 10, 19, 29]


def test_a_title_in_no_known_alphabet_does_no_harm() -> None:
    data = encoded(Recipe(codec="mpeg4", title="TITLE")).replace(b"TITLE", b"\xff\xfe\xc0\x80\xff")
    assert len(decode(data, FOUR).frames) == 4


@pytest.mark.parametrize(
    ("limits", "sampling", "message"),
    [
        ({"max_item_bytes": 100}, ALL, r"bytes; at most 100 \(--max-item-bytes\)"),
        ({"max_frame_pixels": 6000}, ALL, r"frames of 96 x 64 are 6144 pixels; at most 6000 \(--max-frame-pixels\)"),
        ({"max_source_frames": 29}, FOUR, r"30 frames and more; at most 29 \(--max-source-frames\)"),
        ({"max_clip_seconds": 2}, FOUR, r"3\.0 seconds; at most 2 \(--max-clip-seconds\)"),
        ({"max_clip_frames": 3}, FOUR, r"4 frames asked for; at most 3 \(--max-clip-frames\)"),
        (
            {"max_clip_pixels": 24000},
            FOUR,
            r"4 frames of 96 x 64 are 24576 pixels; at most 24000 \(--max-clip-pixels\)",
        ),
        ({"max_decoded_pixels": 184000}, FOUR, r"184320 pixels to decode; at most 184000 \(--max-decoded-pixels\)"),
    ],
)
def test_a_limit_names_the_value_and_its_flag(limits: dict[str, int], sampling: FrameSampling, message: str) -> None:
    data = encoded(Recipe(fps=Fraction(10)))
    with pytest.raises(MediaError, match=f"media item 0: limit: .*{message}") as refused:
        decode(data, sampling, replace(LIMITS, **limits))
    assert refused.value.stage is Stage.LIMIT


def test_a_limit_on_frames_thins_out_what_was_not_counted_by_the_caller() -> None:
    clip = decode(encoded(Recipe()), ALL, replace(LIMITS, max_clip_frames=4))
    assert clip.plan.indices == (0, 10, 19, 29)


def test_a_stream_larger_than_its_header_is_refused_before_it_is_decoded() -> None:
    data = clips.small_header(512)
    assert reason(data, limits=replace(LIMITS, max_frame_pixels=512 * 512 - 1)).stage in (Stage.LIMIT, Stage.DECODE)
    assert decode(data).frames.shape == (1, 512, 512, 3)


def test_frames_of_exactly_the_largest_size_are_read_however_they_are_stored() -> None:
    for recipe in clips.KINDS.values():
        assert numbers(decode(encoded(recipe), FOUR, replace(LIMITS, max_frame_pixels=96 * 64))) == [0, 10, 19, 29]


def test_frames_that_grow_beyond_the_largest_size_are_refused() -> None:
    limits = replace(LIMITS, max_frame_pixels=4 * 96 * 64 - 1)
    with pytest.raises(MediaError, match=r"frames of 192 x 128 are 24576 pixels; at most 24575 \(--max-frame-pixels\)"):
        decode(clips.growing(), limits=limits)


class Halved:
    """A fit that halves each side."""

    resample = 3

    def size(self, frames: int, source: FrameSize) -> FrameSize:
        assert frames == 4
        if source.width == 10:
            raise ValueError("too narrow")
        return FrameSize(source.height // 2, source.width // 2)


def test_frames_are_resized_as_they_come() -> None:
    data = encoded(Recipe())
    large = decode(data, FOUR)
    clip = decode(data, FOUR, fit=Halved(), limits=replace(LIMITS, max_clip_pixels=4 * 48 * 32))
    for small, frame in zip(clip.frames, large.frames, strict=True):
        assert (small == np.asarray(Image.fromarray(frame).resize((48, 32), Image.Resampling.BICUBIC))).all()


def test_a_shape_that_the_family_refuses_is_an_error_of_preprocessing() -> None:
    class Never(Halved):
        def size(self, frames: int, source: FrameSize) -> FrameSize:
            raise ValueError("96 x 64 is too narrow")

    with pytest.raises(MediaError, match="preprocess: 96 x 64 is too narrow"):
        decode(encoded(Recipe()), FOUR, fit=Never())


def test_frames_that_change_size_are_brought_to_the_first_one_s() -> None:
    clip = decode(clips.growing(), ALL)
    assert clip.frames.shape == (4, 64, 96, 3)
    assert numbers(clip) == [0, 1, 2, 3]


CODECS = pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])


@CODECS
def test_frames_may_grow_or_shrink_on_the_way(codec: str) -> None:
    for scales, header, shape in (((1, 1, 2, 2), 1, (64, 96)), ((2, 2, 1, 1), 2, (128, 192))):
        clip = decode(clips.changing(*scales, codec=codec, header=header))
        assert clip.frames.shape == (4, *shape, 3)
        assert numbers(clip) == [0, 1, 2, 3]


@CODECS
@pytest.mark.parametrize(
    ("scales", "hidden", "size"),
    [
        ((8, 8, 8, 8), 0, "768 x 512"),
        ((8, 1, 1, 1), 0, "768 x 512"),
        ((4, 4, 1, 1), 0, "384 x 256"),
        ((1, 2, 2, 2), 1, "192 x 128"),
        ((1, 1, 2, 1), 2, "192 x 128"),
    ],
)
@pytest.mark.parametrize("sampling", [FrameSampling(num_frames=2), FrameSampling(num_frames=1)])
def test_no_clip_is_larger_than_was_announced(
    codec: str, scales: tuple[int, ...], hidden: int, size: str, sampling: FrameSampling
) -> None:
    """Of VP8 the header is all that is known before; of VP9 the library looks at the first frame."""
    data = clips.changing(*scales, codec=codec, hidden=hidden)
    if codec == "libvpx":
        refused = reason(data, sampling)
        assert refused.reason == f"its header says 96 x 64, but its frames are {size}"
        assert refused.stage is Stage.DECODE
    else:
        with open_clip(0, data, sampling, LIMITS) as clip:
            shapes: list[tuple[int, ...]] = []
            clip.decode(lambda frame: shapes.append(frame.shape))
            assert sum(height * width for height, width, _ in shapes) == clip.survey.kept_pixels


def test_frames_larger_than_their_header_are_read_where_they_are_made_as_small() -> None:
    """What was counted are the frames as they are made."""
    fit = FrameFit(cell=32, temporal=2, min_pixels=4096, max_pixels=4 * 64 * 96)
    clip = decode(clips.changing(8, 8, 8, 8), fit=fit)
    assert clip.frames.shape == (4, 64, 96, 3)
    assert numbers(clip) == [0, 1, 2, 3]
    more = replace(fit, max_pixels=4 * 64 * 96 * 2)
    with pytest.raises(MediaError, match="its header says 96 x 64, but its frames are 768 x 512"):
        decode(clips.changing(8, 8, 8, 8), fit=more)


def test_a_smaller_frame_is_refused_where_it_is_made_larger_than_was_announced() -> None:
    class Odd(Halved):
        """As a fit may for a frame of another shape."""

        def size(self, frames: int, source: FrameSize) -> FrameSize:
            return FrameSize(512, 512) if source.width == 96 else source

    with pytest.raises(MediaError, match="its header says 192 x 128, but its frames are 96 x 64"):
        decode(clips.changing(1, 1, header=2), fit=Odd())


def test_frames_that_grow_are_counted_as_they_come() -> None:
    limits = replace(LIMITS, max_decoded_pixels=10 * 96 * 64 - 1)
    with pytest.raises(MediaError, match=r"61440 pixels to decode; at most 61439 \(--max-decoded-pixels\)"):
        decode(clips.growing(), limits=limits)


def test_a_clip_survives_the_way_from_a_worker() -> None:
    clip = decode(encoded(Recipe()), FOUR)
    back = pickle.loads(pickle.dumps(clip))
    assert back.plan == clip.plan
    assert (back.frames == clip.frames).all()


@pytest.mark.parametrize(
    "kind", ["mp4 h264 with B frames", "mp4 in fragments", "matroska h264", "webm vp9", "avi mpeg4", "gif"]
)
def test_damage_is_an_error_or_frames_never_anything_else(kind: str) -> None:
    data = encoded(clips.KINDS[kind])
    random = np.random.default_rng(len(data))
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 12)):
            damaged[at] = random.integers(0, 256)
        try:
            clip = decode(bytes(damaged), FOUR)
            assert len(clip.frames) == len(clip.plan.indices) == len(clip.plan.timestamps)
            outcomes.add("frames")
        except MediaError:
            outcomes.add("error")
    assert "error" in outcomes
