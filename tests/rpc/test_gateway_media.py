"""Media of every kind and source, on their way to engines that take them, and refused where none does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat_files import EVERY_KIND, TEMPLATE, write_chat_files
from tests.rpc.engine_twin import EngineTwin
from tests.rpc.gateway_harness import TEXT, error_of, running, until
from tests.rpc.gateway_parts import MARKER, Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.errors import Draining, MediaError, MediaUnavailable
from triptych.core.events import Failed
from triptych.core.media import DataUri, MediaItem, Modality, Stage, Url
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.text.tokenizer import Tokenizer
from triptych.wire.gen import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from triptych.core.request import GenerateRequest

IMAGE, VIDEO, AUDIO = pb.MODALITY_IMAGE, pb.MODALITY_VIDEO, pb.MODALITY_AUDIO
BY_URL, BY_DATA = pb.MEDIA_SOURCE_TYPE_URL, pb.MEDIA_SOURCE_TYPE_DATA_URI

OPTIONS = {"image": {"max_pixels": 4096, "background": [0, 0, 0]}, "video": {"fps": 2}}
LAYER = OptionLayer(PictureLayer(background=(0, 0, 0), max_pixels=4096), ClipLayer(fps=2.0))


def image(url: str = "data:image/png;base64,AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str = "data:video/mp4;base64,AAAA") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def sound() -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, text("what?")]}]


WEB = "https://a.example/x"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"), EVERY_KIND)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def seeing(directory: Path, address: str = "twin:1", *, urls: bool = False) -> EngineTwin:
    """An engine that reads pictures and videos."""
    twin = EngineTwin(directory, address)
    twin.modalities = [IMAGE, VIDEO]
    return fetching(twin) if urls else twin


def fetching(twin: EngineTwin) -> EngineTwin:
    twin.sources = [*twin.sources, BY_URL]
    return twin


def watching(encoder: Encoder, *readers: Reader) -> None:
    """Have an encoder encode videos as well, for these."""
    encoder.video_token_id = MARKER + 1
    for one in (encoder, *readers):
        one.capabilities.modalities[:] = [IMAGE, VIDEO]


# -- what reaches the engine ------------------------------------------------------------------------


async def test_several_kinds_in_one_prompt_keep_their_order(directory: Path, tokenizer: Tokenizer) -> None:
    twin = seeing(directory, urls=True)
    twin.modalities.append(AUDIO)
    twin.image_token_id = tokenizer.added_tokens["<|image_pad|>"]
    twin.video_token_id = tokenizer.added_tokens["<|video_pad|>"]
    messages = [
        {"role": "user", "content": [video(), text("a"), image(), sound(), video(f"{WEB}.mp4")]},
        {"role": "assistant", "content": "b"},
        *asking(image(f"{WEB}.png"), text("c")),
    ]
    async with running(twin) as run:
        response = await run.chat(messages=messages)
        assert response.status_code == 200, response.text
    (request,) = twin.requests
    assert request.media == (
        MediaItem(Modality.VIDEO, DataUri("data:video/mp4;base64,AAAA")),
        MediaItem(Modality.IMAGE, DataUri("data:image/png;base64,AAAA")),
        MediaItem(Modality.AUDIO, DataUri("data:audio/wav;base64,AAAA")),
        MediaItem(Modality.VIDEO, Url(f"{WEB}.mp4")),
        MediaItem(Modality.IMAGE, Url(f"{WEB}.png")),
    )
    said = b"".join(map(tokenizer.token_bytes, request.prompt)).decode()
    written = [piece.split("_pad|>")[0] for piece in said.split("<|vision_start|><|")[1:]]
    assert written == ["video", "image", "vision", "video", "image"]
    assert request.media_options == OptionLayer()


@pytest.mark.parametrize("apart", [False, True])
async def test_media_options_go_where_media_are_opened(directory: Path, shelf: Shelf, apart: bool) -> None:
    encoder = Encoder(directory, shelf)
    readers: list[Any] = (
        [Prefill(directory, shelf=shelf), Decode(directory)] if apart else [Reader(directory, shelf=shelf)]
    )
    async with running(encoder, *readers) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(image()), media_options=OPTIONS)).status_code == 200
        assert encoder.requests[0].media_options == LAYER
        assert [one.requests[0].media_options for one in readers] == [OptionLayer()] * len(readers)


async def test_media_options_at_engines_that_open_media_themselves(directory: Path) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    async with running(prefill, decode) as run:
        assert (await run.chat(messages=asking(image()), media_options=OPTIONS)).status_code == 200
        assert (await run.chat(messages=TEXT, media_options=OPTIONS)).status_code == 200
    assert [request.media_options for request in prefill.requests] == [LAYER, OptionLayer()]
    assert {request.media_options for request in decode.requests} == {OptionLayer()}


async def test_an_option_that_is_wrong_is_named(directory: Path) -> None:
    twin = seeing(directory)
    async with running(twin) as run:
        response = await run.chat(messages=asking(image()), media_options={"image": {"fetch_hosts": ["a"]}})
    assert response.status_code == 400
    assert error_of(response)["param"] == "media_options.image.fetch_hosts"
    assert "that is the server's to decide" in error_of(response)["message"]
    assert not twin.requests


async def test_an_option_that_is_said_twice_is_refused(directory: Path) -> None:
    twin = seeing(directory)
    body = {"model": "tiny", "messages": asking(image()), "media_options": {}}
    twice = b'{"image": {"max_pixels": 4096, "max_pixels": 65536}}'
    async with running(twin) as run:
        said = msgspec.json.encode(body).replace(b'"media_options":{}', b'"media_options":' + twice)
        response = await run.http.post("/v1/chat/completions", content=said)
        nothing = await run.chat(messages=asking(image()), media_options=None)
    assert response.status_code == 400
    assert error_of(response)["param"] == "media_options"
    assert error_of(response)["message"] == "media_options: it has the key max_pixels twice"
    assert nothing.status_code == 200
    assert [request.media_options for request in twin.requests] == [OptionLayer()]


# -- what no engine takes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image(f"{WEB}.png"), "URLs are not fetched by the engines that read images here; send a data: URI instead"),
        (video(f"{WEB}.mp4"), "URLs are not fetched by the engines that read videos here; send a data: URI instead"),
        (sound(), "the model 'tiny' reads no audio"),
    ],
)
async def test_what_no_engine_takes_is_refused_by_its_place(directory: Path, part: dict[str, Any], words: str) -> None:
    twin = seeing(directory)
    async with running(twin) as run:
        response = await run.chat(messages=[{"role": "user", "content": [text("a"), image(), part]}])
        assert response.status_code == 400
        assert error_of(response) == {
            "message": f"messages[0].content[2]: {words}",
            "type": "invalid_request_error",
            "param": "messages[0].content[2]",
            "code": "unsupported_feature",
        }
        assert run.nothing_is_held()
    assert not twin.requests


async def test_an_engine_that_fetches_and_does_nothing_else(directory: Path) -> None:
    twin = seeing(directory)
    twin.sources = [BY_URL]
    async with running(twin) as run:
        assert (await run.chat(messages=asking(image(f"{WEB}.png")))).status_code == 200
        response = await run.chat(messages=asking(video()))
    assert response.status_code == 400
    assert error_of(response)["message"] == (
        "messages[0].content[0]: the engines of 'tiny' take no videos by data: URI"
    )


async def test_an_engine_that_names_no_sources_takes_no_media(directory: Path) -> None:
    twin = seeing(directory)
    twin.sources = []
    async with running(twin) as run:
        assert (await run.chat(messages=TEXT)).status_code == 200
        response = await run.chat(messages=asking(image()))
    assert "reads no images" in error_of(response)["message"]


async def test_media_that_only_different_engines_take(directory: Path, shelf: Shelf) -> None:
    """The encoder fetches and reads no videos; the other engine reads both and fetches nothing."""
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    fetching(encoder)
    reader.capabilities.requires_handoff = False
    reader.modalities = [IMAGE, VIDEO]
    async with running(encoder, reader) as run:
        await run.all_ready()
        for part in (image(f"{WEB}.png"), video()):
            assert (await run.chat(messages=asking(part))).status_code == 200
        assert [len(encoder.requests), len(reader.requests)] == [1, 2]
        response = await run.chat(messages=asking(image(f"{WEB}.png"), image(), video()))
        assert response.status_code == 400
        assert error_of(response)["param"] == "messages[0].content[2]"
        assert "takes videos by data: URI together with the media before this one" in error_of(response)["message"]
        assert run.nothing_is_held()
        assert [len(encoder.requests), len(reader.requests)] == [1, 2]


# -- who gets it ------------------------------------------------------------------------------------


async def test_urls_go_to_engines_that_fetch(directory: Path) -> None:
    twins = seeing(directory), seeing(directory, "twin:2", urls=True)
    async with running(*twins) as run:
        await run.all_ready()
        for _ in range(4):
            assert (await run.chat(messages=asking(image(f"{WEB}.png"), video()))).status_code == 200
        assert [len(twin.requests) for twin in twins] == [0, 4]
        for _ in range(4):
            assert (await run.chat(messages=asking(image()))).status_code == 200
        assert twins[0].requests
        for failure, words in ((Draining("ending"), "ending"), (None, "can be used: twin:2, aggregated, is unreach")):
            twins[1].refusal = failure
            if failure is None:
                twins[1].kill()
                await run.state(1, "unreachable")
            response = await run.chat(messages=asking(image(f"{WEB}.png")))
            assert response.status_code == 503
            assert words in error_of(response)["message"]
        assert (await run.chat(messages=asking(image()))).status_code == 200
        assert run.nothing_is_held()


async def test_an_encoder_fetches_for_a_reader(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    fetching(encoders[1])
    reader = Reader(directory, shelf=shelf)
    async with running(*encoders, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(image(f"{WEB}.png"), image()))).status_code == 200
        assert encoders[1].items == [f"{WEB}.png", "data:image/png;base64,AAAA"]
        assert not encoders[0].requests
        await until(run.nothing_is_held)
        encoders[1].kill()
        await run.state(1, "unreachable")
        response = await run.chat(messages=asking(image(f"{WEB}.png")))
        assert response.status_code == 503
        assert "no encoder engine for 'tiny' can be used" in error_of(response)["message"]
        assert (await run.chat(messages=asking(image()))).status_code == 200


async def test_encoders_that_fetch_nothing_for_a_reader_that_takes_nothing_else(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(image(f"{WEB}.png")))
        assert response.status_code == 400
        assert "URLs are not fetched by the engines that read images here" in error_of(response)["message"]
        assert not encoder.requests


async def test_a_reader_fetches_what_the_encoder_does_not(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.capabilities.requires_handoff = False
    fetching(reader)
    async with running(encoder, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(image(f"{WEB}.png")))).status_code == 200
        assert not encoder.requests
        assert reader.requests[0].media == (MediaItem(Modality.IMAGE, Url(f"{WEB}.png")),)
        assert (await run.chat(messages=asking(image()))).status_code == 200
        assert len(encoder.requests) == 1


async def test_an_encoder_is_asked_with_the_marker_of_each_item(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    watching(encoder, reader)
    async with running(encoder, reader) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(video(), image(), video("data:video/mp4;base64,BBBB")))
        assert response.status_code == 200
        assert encoder.requests[0].prompt == (MARKER + 1, MARKER, MARKER + 1)
        assert [shelf.items[name] for name in reader.offered[0]] == [
            "data:video/mp4;base64,AAAA",
            "data:image/png;base64,AAAA",
            "data:video/mp4;base64,BBBB",
        ]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_an_encoder_that_names_no_sources_is_not_used(directory: Path, shelf: Shelf) -> None:
    encoder = Encoder(directory, shelf)
    encoder.sources = []
    async with running(encoder, whole=False) as run:
        await run.state(0, "unusable")
        assert "names no sources of media" in run.gateway.router.engines[0].detail


SOURCES = st.sets(st.sampled_from([BY_URL, BY_DATA]), min_size=1)
MODALITIES = st.sets(st.sampled_from([IMAGE, VIDEO]), min_size=1)
PARTS = {
    (IMAGE, BY_URL): image(f"{WEB}.png"),
    (IMAGE, BY_DATA): image(),
    (VIDEO, BY_URL): video(f"{WEB}.mp4"),
    (VIDEO, BY_DATA): video(),
}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    readers=st.lists(st.tuples(MODALITIES, SOURCES, st.booleans()), min_size=1, max_size=2),
    encoders=st.lists(st.tuples(MODALITIES, SOURCES), max_size=2),
    asked=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3),
)
def test_a_request_goes_where_all_of_its_media_are_taken_or_nowhere(
    directory: Path, readers: Sequence[Any], encoders: Sequence[Any], asked: Sequence[Any]
) -> None:
    modalities = {modality for modality, _ in asked}
    shelf = Shelf()
    twins: list[Any] = []
    for number, (reads, opens, rows) in enumerate(readers):
        twins.append(Reader(directory, f"pd:{number}", shelf))
        twins[-1].modalities, twins[-1].sources = sorted(reads), sorted(opens)
        twins[-1].capabilities.requires_handoff = rows
        twins[-1].capabilities.modalities[:] = sorted(reads)
    for number, (reads, opens) in enumerate(encoders):
        twins.append(Encoder(directory, shelf, f"e:{number}"))
        twins[-1].video_token_id = MARKER + 1
        twins[-1].sources = sorted(opens)
        twins[-1].capabilities.modalities[:] = sorted(reads)

    def takes(reads: set[int], opens: set[int]) -> bool:
        return modalities <= reads and all(source in opens for _, source in asked)

    inline = any(takes(reads, opens) for reads, opens, rows in readers if not rows)
    apart = any(takes(mine & theirs, opens) for mine, opens in encoders for theirs, _, _ in readers)

    async def ask() -> Any:
        async with running(*twins, whole=False) as run:
            await run.all_ready()
            response = await run.chat(messages=asking(*(PARTS[pair] for pair in asked)))
            await until(run.nothing_is_held)
            return response

    response = asyncio.run(ask())
    assert (response.status_code == 200) == (inline or apart), response.text
    assert response.status_code in (200, 400, 503)
    for twin, (reads, opens, *rest) in zip(twins, [*readers, *encoders], strict=True):
        for request in twin.requests:
            assert not request.media or (takes(reads, opens) and rest != [True])
    if response.status_code != 200:
        assert not any(twin.requests for twin in twins)
        assert error_of(response)["message"]
        # What is wanting is an encoder, or what was asked for is taken by nobody.
        assert response.status_code == 400 or any(rows for *_, rows in readers)


# -- what the public reports tell of ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MediaUnavailable(1, "a.example: no answer within 30 s; retry later", Stage.FETCH), 400, "media_unavailable"),
        (MediaError(1, "a.example answers 403", Stage.FETCH), 400, None),
        (MediaError(1, "12 MiB; at most 1 (--max-item-bytes)", Stage.LIMIT), 400, None),
        (MediaUnavailable(1, "this machine is busy; retry later", Stage.DECODE), 503, "unavailable"),
    ],
)
@pytest.mark.parametrize("in_band", [False, True])
async def test_a_fetch_that_fails_is_the_clients_error_and_is_not_tried_elsewhere(
    directory: Path, stream: bool, error: MediaError, status: int, code: str | None, in_band: bool
) -> None:
    twins = seeing(directory, urls=True), seeing(directory, "twin:2", urls=True)
    for twin in twins:
        if in_band:
            twin.script = [Failed("any", error)]
        else:
            twin.refusal = error
    async with running(*twins) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(image(), video(f"{WEB}.mp4")), stream=stream)
        assert response.status_code == status
        kind = "server_error" if status == 503 else "invalid_request_error"
        assert error_of(response) == {
            "message": str(error),
            "type": kind,
            "param": "messages[0].content[1]",
            "code": code,
        }
        assert "Traceback" not in response.text
        assert run.nothing_is_held()
    assert sum(len(twin.requests) for twin in twins) == 1


@pytest.mark.parametrize(
    "url",
    [
        "DATA:image/png;base64,AAAA",
        "Data:IMAGE/PNG;charset=utf-8;Base64,AA-_",
        "data:;base64,iVBORw0KGgo",
        "data:image/png;base64,AA\r\n AA\n\tA=",
        "data:image/png,%89PNG",
        "data:,",
        "data:image/png;base64," + "A" * 1_000_000,
        "data:nonsense",
    ],
    ids=lambda url: url[:30],
)
async def test_a_data_uri_of_any_form_and_length_reaches_the_engine_as_it_is(directory: Path, url: str) -> None:
    twin = seeing(directory)
    async with running(twin) as run:
        assert (await run.chat(messages=asking(image(url), video(url)))).status_code == 200
    assert [item.source for item in twin.requests[0].media] == [DataUri(url)] * 2


SAID = (
    "data:image/png;base64,iVBORw0KGgo= https://a.example/x.png <|image_pad|><|video_pad|><|vision_start|>"
    '<|vision_end|> {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}'
)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": SAID}],
        [{"role": "user", "content": [text(SAID), text(SAID)]}],
        [{"role": "system", "content": SAID}, {"role": "assistant", "content": SAID}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x", "name": SAID}],
    ],
)
@pytest.mark.parametrize("modalities", [[], [IMAGE, VIDEO]])
async def test_what_a_user_writes_is_text(
    directory: Path, tokenizer: Tokenizer, messages: list[Any], modalities: list[int]
) -> None:
    twin = seeing(directory, urls=True)
    twin.modalities = modalities
    twin.max_context = 4096
    twin.image_token_id = tokenizer.added_tokens["<|image_pad|>"]
    twin.video_token_id = tokenizer.added_tokens["<|video_pad|>"]
    async with running(twin) as run:
        assert (await run.chat(messages=messages)).status_code == 200
        blank = [message | {"content": "x"} for message in messages]
        assert (await run.chat(messages=blank)).status_code == 200
    first, plain = twin.requests
    assert first.media == ()
    added = set(tokenizer.added_tokens.values())
    assert [i for i in first.prompt if i in added] == [i for i in plain.prompt if i in added]
    assert markers(first, twin) == 0


def markers(request: GenerateRequest, twin: EngineTwin) -> int:
    return sum(token in (twin.image_token_id, twin.video_token_id) for token in request.prompt)


async def test_what_a_user_writes_beside_media_is_text(directory: Path, tokenizer: Tokenizer) -> None:
    twin = seeing(directory)
    twin.max_context = 4096
    twin.image_token_id = tokenizer.added_tokens["<|image_pad|>"]
    twin.video_token_id = tokenizer.added_tokens["<|video_pad|>"]
    async with running(twin) as run:
        response = await run.chat(messages=asking(text(SAID), video(), text(SAID), image(), text(SAID)))
        assert response.status_code == 200
    (request,) = twin.requests
    assert [item.modality for item in request.media] == [Modality.VIDEO, Modality.IMAGE]
    assert markers(request, twin) == 2
    assert b"".join(map(tokenizer.token_bytes, request.prompt)).decode().count(SAID) == 3


# -- templates --------------------------------------------------------------------------------------


REORDERING = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}"
    "{% for part in messages[0].content %}{% if part.type == 'video' %}<|video_pad|>{% endif %}{% endfor %}"
    "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "parts", "words"),
    [
        (TEMPLATE, [video()], "1 video item(s) were sent but the prompt has 0 video placeholder(s)"),
        (REORDERING, [video(), image()], "writes the media in another order than they were sent in"),
        (REORDERING, [image(), video(), image()], "writes the media in another order than they were sent in"),
        (REORDERING, [image(), image(), video()], ""),
        (REORDERING, [video(), video()], ""),
    ],
)
async def test_a_template_that_has_its_own_ideas_of_media(
    tmp_path: Path, template: str, parts: list[Any], words: str
) -> None:
    """The i-th item belongs to the i-th marker: an answer would be about other media, or none."""
    twin = seeing(write_chat_files(tmp_path, template))
    added = Tokenizer.load(tmp_path).added_tokens
    twin.image_token_id, twin.video_token_id = added["<|image_pad|>"], added["<|video_pad|>"]
    async with running(twin) as run:
        response = await run.chat(messages=asking(*parts))
    if words:
        assert response.status_code == 400
        assert words in error_of(response)["message"]
        assert not twin.requests
    else:
        assert response.status_code == 200
