"""What the contract may promise: how each promise is made, how it is used, how its use is refused."""

from __future__ import annotations

import json
import uuid
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest

from tests.adapters import make_adapter
from tests.corpus.clips import Recipe, encoded
from tests.drawings import data_uri, shape_png
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.gen import encoder_pb2, error_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2
from triptych.wire.gen import generation_pb2 as g

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

REFUSED = grpc.StatusCode.UNIMPLEMENTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
SECONDS = 60.0
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PNG = shape_png("circle", "red")
FILES = {"a.png": PNG, "a.mp4": encoded(Recipe(codec="mpeg4", fps=Fraction(10)))}


class Engine(NamedTuple):
    """A served engine and what it says of itself."""

    inference: Any
    control: Any
    model: model_pb2.ModelInfo
    server: server_pb2.ServerInfo
    directory: Path
    scratch: Path
    peer: Any = None
    """Inference of another engine of a pair: what one makes the other takes."""
    web: str = ""
    """Where ``FILES`` can be fetched."""

    async def generate(self, *, metadata: Any = (), **fields: Any) -> list[g.GenerateResponse]:
        """The events of one greedy request of four tokens, with whatever the feature changes."""
        call = self.inference.Generate(self.asked(**fields), metadata=metadata, timeout=SECONDS)
        events = [event async for event in call]
        if self.prefills:
            return await self.finish(events, metadata, **fields)
        assert events[-1].WhichOneof("event") == "finished", events[-1]
        assert [event.HasField("usage") for event in events].count(True) == 1
        return events

    async def simplest(self, *, metadata: Any = (), **fields: Any) -> list[g.GenerateResponse]:
        """The events of a request for the least that the engine does."""
        if self.encodes:
            return [await self.encode(self.inference, metadata=metadata, **fields)]
        return await self.generate(metadata=metadata, **fields)

    async def rows(self, modality: int, *, options: dict[str, Any] | None = None, **source: Any) -> int:
        """How many rows one item has; what is wrong with it is an error, before or after acceptance."""
        prompt = {g.MODALITY_IMAGE: PICTURE, g.MODALITY_VIDEO: VIDEO}.get(modality, "what?")
        asked = g.GenerateRequest()
        asked.media_options.update(options or {})
        fields = {
            "prompt": prompt,
            "media": [g.MediaItem(modality=g.Modality.ValueType(modality), **source)],
            "media_options": asked.media_options,
        }
        (*_, last) = await self.simplest(**fields)
        if last.WhichOneof("event") == "encoder_ready":
            return ReferenceCodec().decode(last.encoder_ready.encoder_cache[0]).item.layout.rows
        return last.usage.prompt_tokens - 2  # with what a video has between its rows

    async def encode(self, inference: Any, *, metadata: Any = (), **fields: Any) -> g.GenerateResponse:
        """What an encoder engine, this one or its peer, makes of one picture."""
        item = g.MediaItem(modality=g.MODALITY_IMAGE, raw_bytes=PNG)
        usual = {"prompt": PICTURE, "media": [item], "encoder": encoder_pb2.EncoderOptions()}
        call = inference.Generate(self.asked(**(usual | fields)), metadata=metadata, timeout=SECONDS)
        (event,) = [event async for event in call]
        assert event.WhichOneof("event") == "encoder_ready", event
        assert not event.HasField("usage")
        return event

    @property
    def encodes(self) -> bool:
        return self.server.engine_role == server_pb2.ENGINE_ROLE_ENCODER

    @property
    def prefills(self) -> bool:
        return self.server.engine_role == server_pb2.ENGINE_ROLE_PREFILL

    def asked(self, **fields: Any) -> g.GenerateRequest:
        """The request."""
        usual = {
            "request_id": uuid.uuid4().hex,
            "model": self.model.served_model_name,
            "prompt": "hello",
            "sampling": g.SamplingParams(temperature=0),
            "stopping": g.StoppingOptions(max_tokens=4, ignore_eos=True),
        }
        return g.GenerateRequest(**(usual | fields))

    async def finish(self, events: list[g.GenerateResponse], metadata: Any, **fields: Any) -> list[g.GenerateResponse]:
        """What this engine has begun, ended by the other one."""
        assert events[-1].WhichOneof("event") == "prefill_ready", events[-1]
        request = self.asked(**fields)
        del request.media[:]
        request.kv.session.CopyFrom(events[-1].prefill_ready.kv_session)
        call = self.peer.Generate(request, metadata=metadata, timeout=SECONDS)
        rest = [event async for event in call]
        assert rest[-1].WhichOneof("event") == "finished", rest[-1]
        return events[:-1] + rest

    async def loads(self) -> bool:
        """Whether an adapter was loaded by its path."""
        directory = self.scratch / "adapter"
        if not directory.exists():
            make_adapter(self.directory, directory, seed=1)
        adapter = lora_pb2.LoraAdapter(lora_id=7, lora_name="seven", source_path=str(directory))
        loaded = await self.control.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter), timeout=SECONDS)
        return loaded.adapter == adapter


def tokens_of(events: list[g.GenerateResponse], output: int = 0) -> list[g.TokenInfo]:
    return [
        token
        for event in events
        if event.WhichOneof("event") == "token" and event.token.output_index == output
        for token in event.token.tokens
    ]


def text_of(events: list[g.GenerateResponse]) -> str:
    return "".join(event.token.text for event in events if event.WhichOneof("event") == "token")


# -- how features are used -----------------------------------------------------------------------


async def by_text(engine: Engine) -> None:
    assert len(tokens_of(await engine.generate())) == 4


async def by_token_ids(engine: Engine) -> None:
    events = await engine.generate(prompt=None, token_ids=g.TokenIds(ids=[1, 2, 3]))
    assert events[-1].usage.prompt_tokens == 3


SELECTIONS = {
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N: g.CandidateTokenSelection(top_n=3),
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS: g.CandidateTokenSelection(token_ids=g.TokenIds(ids=[5, 6, 7])),
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_ALL: g.CandidateTokenSelection(all=g.AllCandidates()),
}


def prompt_logprobs(mode: int) -> Callable[[Engine], Awaitable[None]]:
    async def use(engine: Engine) -> None:
        response = g.ResponseOptions(return_prompt_logprobs=True, prompt_candidates=SELECTIONS.get(mode))
        events = await engine.generate(prompt=None, token_ids=g.TokenIds(ids=[1, 2, 3, 4]), response=response)
        assert events[0].WhichOneof("event") == "prompt"
        first, *others = events[0].prompt.tokens
        assert not first.HasField("logprob")
        assert [token.token_id for token in others] == [2, 3, 4]
        assert all(token.logprob <= 0 and token.rank >= 1 for token in others)
        assert all(len(token.candidates) >= 3 for token in others) == (mode in SELECTIONS)

    return use


def output_logprobs(mode: int) -> Callable[[Engine], Awaitable[None]]:
    async def use(engine: Engine) -> None:
        response = g.ResponseOptions(return_output_logprobs=True, output_candidates=SELECTIONS.get(mode))
        tokens = tokens_of(await engine.generate(response=response))
        assert len(tokens) == 4
        assert all(token.logprob <= 0 and token.rank == 1 for token in tokens)
        assert all(len(token.candidates) >= 3 for token in tokens) == (mode in SELECTIONS)

    return use


async def top_n_to_the_limit(engine: Engine) -> None:
    most = engine.model.generation.output_logprobs.max_top_n
    selection = g.CandidateTokenSelection(top_n=most)
    response = g.ResponseOptions(return_output_logprobs=True, output_candidates=selection)
    assert all(len(token.candidates) == most for token in tokens_of(await engine.generate(response=response)))
    assert most == engine.model.generation.prompt_logprobs.max_top_n > 0
    selection = g.CandidateTokenSelection(top_n=most + 1)
    for response in (
        g.ResponseOptions(return_output_logprobs=True, output_candidates=selection),
        g.ResponseOptions(return_prompt_logprobs=True, prompt_candidates=selection),
    ):
        await refused(INVALID, engine.generate(response=response))


GUIDES: dict[int, tuple[g.GuidedDecoding, Callable[[str], bool]]] = {
    model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA: (
        g.GuidedDecoding(json_schema='{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'),
        lambda text: json.loads(text)["a"] in (1, 2),
    ),
    model_pb2.GUIDED_DECODING_MODE_REGEX: (
        g.GuidedDecoding(regex="(red|blue) [0-9]"),
        lambda text: len(text) in (5, 6),
    ),
    model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR: (
        g.GuidedDecoding(ebnf_grammar='root ::= "yes" | "no"'),
        lambda text: text in ("yes", "no"),
    ),
    model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG: (
        g.GuidedDecoding(
            structural_tag=json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "exactly this"}}
            )
        ),
        lambda text: text == "exactly this",
    ),
    model_pb2.GUIDED_DECODING_MODE_CHOICE: (
        g.GuidedDecoding(choice=g.ChoiceConstraint(choices=["left", 'ri"ght | \\'])),
        lambda text: text in ("left", 'ri"ght | \\'),
    ),
    model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT: (
        g.GuidedDecoding(json_object=g.JsonObjectConstraint()),
        lambda text: text.lstrip().startswith("{"),
    ),
}


def guided(mode: int) -> Callable[[Engine], Awaitable[None]]:
    async def use(engine: Engine) -> None:
        guide, right = GUIDES[mode]
        text = text_of(await engine.generate(guided=guide, stopping=g.StoppingOptions(max_tokens=100)))
        assert right(text), text

    return use


async def several_outputs(engine: Engine) -> None:
    most = engine.model.generation.max_num_sequences
    sampling = g.SamplingParams(temperature=1, seed=3, num_sequences=most)
    events = await engine.generate(sampling=sampling)
    assert all(len(tokens_of(events, output)) == 4 for output in range(most))
    sampling.num_sequences = most + 1
    await refused(INVALID, engine.generate(sampling=sampling))
    sampling.num_sequences = 0
    await refused(INVALID, engine.generate(sampling=sampling))


async def priority(engine: Engine) -> None:
    for value in ("5", "-2147483648"):
        await engine.generate(metadata=(("openengine-priority", value),))
    await refused(INVALID, engine.generate(metadata=(("openengine-priority", "2147483648"),)))


async def stop_in_output(engine: Engine) -> None:
    plain = tokens_of(await engine.generate())
    stop = g.StopCondition(stop_token_id=plain[1].token_id)
    shown = g.StoppingOptions(max_tokens=4, conditions=[stop], include_stop_in_output=True)
    events = await engine.generate(stopping=shown)
    assert tokens_of(events)[-1].token_id == plain[1].token_id
    assert events[-1].finished.stop_match.stop_token_id == plain[1].token_id


LONG = g.TokenIds(ids=[*range(10, 90)])


async def cached(engine: Engine, **kv: Any) -> int:
    events = await engine.generate(prompt=None, token_ids=LONG, kv=g.KvOptions(**kv))
    return int(events[-1].usage.cached_prompt_tokens)


async def cache_salt(engine: Engine) -> None:
    salt = uuid.uuid4().hex
    assert await cached(engine, cache_salt=salt) == 0
    assert await cached(engine, cache_salt=salt) > 0


async def prefix_cache_bypass(engine: Engine) -> None:
    await cached(engine)
    assert await cached(engine) > 0
    assert await cached(engine, bypass_prefix_cache=True) == 0


async def lora(engine: Engine) -> None:
    assert await engine.loads()
    base, adapted = tokens_of(await engine.generate()), tokens_of(await engine.generate(lora_name="seven"))
    assert [token.token_id for token in base] != [token.token_id for token in adapted]
    listed = await engine.control.ListLoras(lora_pb2.ListLorasRequest(), timeout=SECONDS)
    assert [adapter.lora_name for adapter in listed.adapters] == ["seven"]
    await engine.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="seven"), timeout=SECONDS)
    await refused(grpc.StatusCode.NOT_FOUND, engine.generate(lora_name="seven"))


async def use_of_an_adapter(engine: Engine) -> None:
    if engine.model.supports_lora:
        assert await engine.loads()
    await engine.generate(lora_name="seven")
    await engine.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="seven"), timeout=SECONDS)


def picture(**source: Any) -> Callable[[Engine], Awaitable[None]]:
    async def use(engine: Engine) -> None:
        assert await engine.rows(g.MODALITY_IMAGE, **source) == 16

    return use


def by_url(modality: int, name: str) -> Callable[[Engine], Awaitable[None]]:
    async def use(engine: Engine) -> None:
        rows = await engine.rows(modality, url=f"{engine.web}/{name}")
        assert rows == await engine.rows(modality, raw_bytes=FILES[name])
        item = g.MediaItem(modality=g.Modality.ValueType(modality), url=f"{engine.web}/none")
        prompt = VIDEO if modality == g.MODALITY_VIDEO else PICTURE
        encoder = encoder_pb2.EncoderOptions() if engine.encodes else None
        call = engine.inference.Generate(engine.asked(prompt=prompt, media=[item], encoder=encoder), timeout=SECONDS)
        (failed,) = [event async for event in call]
        assert failed.error.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert failed.error.message.startswith("media item 0: fetch: ")
        assert "404" in failed.error.message

    return use


async def video(engine: Engine) -> None:
    whole = await engine.rows(g.MODALITY_VIDEO, raw_bytes=FILES["a.mp4"])
    two = await engine.rows(g.MODALITY_VIDEO, raw_bytes=FILES["a.mp4"], options={"video": {"num_frames": 2}})
    assert 0 < two < whole
    # What stands for one in a prompt of token ids.
    marker = int(engine.model.extra.fields["video_token_id"].number_value)
    item = g.MediaItem(modality=g.MODALITY_VIDEO, raw_bytes=FILES["a.mp4"])
    await engine.simplest(prompt=None, token_ids=g.TokenIds(ids=[marker]), media=[item])


async def sound(engine: Engine) -> None:
    await engine.rows(g.MODALITY_AUDIO, raw_bytes=b"RIFF")


async def media_options(engine: Engine) -> None:
    options = {"image": {"min_pixels": 1024, "max_pixels": 4096}}
    assert await engine.rows(g.MODALITY_IMAGE, raw_bytes=PNG, options=options) == 4
    assert await engine.rows(g.MODALITY_IMAGE, raw_bytes=PNG, options={"image": {}}) == 16
    for wrong in ({"image": {"max_pixel": 1}}, {"image": {"max_item_bytes": 1}}, {"video": {"fps": 0}}, {"x": {}}):
        await refused(INVALID, engine.rows(g.MODALITY_IMAGE, raw_bytes=PNG, options=wrong))


async def new_session(engine: Engine, inference: Any) -> kv_pb2.KvSessionRef:
    """What an engine hands over when it is asked to."""
    request = engine.asked()
    request.extra.update({"request_type": "context_only"})
    events = [event async for event in inference.Generate(request, timeout=SECONDS)]
    assert events[-1].WhichOneof("event") == "prefill_ready", events[-1]
    return events[-1].prefill_ready.kv_session


async def hand_over(engine: Engine) -> None:
    made = await new_session(engine, engine.inference)
    connector = engine.server.kv_connector
    assert made.transfer_backend == connector.transfer_backend
    assert list(made.endpoints) == list(connector.local_endpoints)
    assert made.handoff_profile == connector.handoff_profile
    load = await engine.control.GetLoad(server_pb2.GetLoadRequest(), timeout=SECONDS)
    assert load.active_kv_sessions > 0


async def take_over(engine: Engine) -> None:
    if engine.peer is None or engine.prefills:
        await engine.generate(kv=g.KvOptions(session=kv_pb2.KvSessionRef(session_id="1")))
    made = await new_session(engine, engine.peer)
    alone = tokens_of(await engine.generate())
    events = await engine.generate(kv=g.KvOptions(session=made))
    assert [token.token_id for token in tokens_of(events)] == [token.token_id for token in alone]
    await refused(INVALID, engine.generate(kv=g.KvOptions(session=kv_pb2.KvSessionRef(session_id="1"))))


async def session_abort(engine: Engine) -> None:
    known = engine.server.kv_connector.supports_abort_cleanup
    made = await new_session(engine, engine.inference) if known else kv_pb2.KvSessionRef(session_id="1")
    target = lifecycle_pb2.AbortRequest(kv_session=made)
    for status in (lifecycle_pb2.ABORT_STATUS_ABORTED, lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED):
        assert (await engine.control.Abort(target, timeout=SECONDS)).status == status
    target.kv_session.session_id = "unknown"
    await refused(grpc.StatusCode.NOT_FOUND, engine.control.Abort(target, timeout=SECONDS))


async def produce(engine: Engine) -> None:
    capabilities = engine.model.encoder
    for backend in ("", *capabilities.transfer_backends):
        event = await engine.encode(engine.inference, encoder=encoder_pb2.EncoderOptions(transfer_backend=backend))
        (made,) = event.encoder_ready.encoder_cache
        assert made.instance_id == engine.server.instance_id
        assert made.transfer_backend in capabilities.transfer_backends
        read = ReferenceCodec().decode(made)
        assert read.fingerprint.hex() == capabilities.fingerprint
        assert g.MODALITY_IMAGE in capabilities.modalities
    other = encoder_pb2.EncoderOptions(transfer_backend="pigeons")
    await refused(INVALID, engine.encode(engine.inference, encoder=other))


async def new_output(engine: Engine) -> encoder_pb2.EncoderCacheRef:
    """One that waits at an encoder; something like it, where the engine is none."""
    if engine.model.encoder.producer:
        return (await engine.encode(engine.inference)).encoder_ready.encoder_cache[0]
    return encoder_pb2.EncoderCacheRef(cache_id="1")


async def consume(engine: Engine) -> None:
    if not engine.model.encoder.consumer:
        await engine.generate(prompt=PICTURE, encoder_cache=[encoder_pb2.EncoderCacheRef(cache_id="1")])
    ready = (await engine.encode(engine.peer)).encoder_ready
    assert ready.encoder_cache[0].transfer_backend in engine.model.encoder.transfer_backends
    assert ReferenceCodec().decode(ready.encoder_cache[0]).fingerprint.hex() == engine.model.encoder.fingerprint
    asked = {"prompt": f"{PICTURE}what colour?", "encoder_cache": ready.encoder_cache}
    events = await engine.generate(**asked)
    assert events[-1].usage.prompt_tokens > 16
    (spent,) = [event async for event in engine.inference.Generate(engine.asked(**asked), timeout=SECONDS)]
    assert (spent.error.code, spent.error.retryable) == (error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, True)
    changed = encoder_pb2.EncoderCacheRef.FromString(ready.encoder_cache[0].SerializeToString())
    changed.cache_id = "2"
    await refused(INVALID, engine.generate(prompt=PICTURE, encoder_cache=[changed]))


async def output_abort(engine: Engine) -> None:
    target = lifecycle_pb2.AbortRequest(encoder_cache=await new_output(engine))
    for status in (lifecycle_pb2.ABORT_STATUS_ABORTED, lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED):
        assert (await engine.control.Abort(target, timeout=SECONDS)).status == status
    target.encoder_cache.cache_id = "unknown"
    await refused(INVALID, engine.control.Abort(target, timeout=SECONDS))


async def output_outcome(engine: Engine) -> None:
    made = await new_output(engine)
    question = encoder_pb2.TransferEncoderCacheRequest(
        encoder_cache=made, transfer_id="transfer", consumer_instance_id="consumer"
    )
    for outcome in (encoder_pb2.TRANSFER_OUTCOME_NOT_STARTED, encoder_pb2.TRANSFER_OUTCOME_FAILED):
        for _ in range(2):
            answer = await engine.control.TransferEncoderCache(question, timeout=SECONDS)
            assert answer.outcome == outcome
        await engine.control.Abort(lifecycle_pb2.AbortRequest(encoder_cache=made), timeout=SECONDS)


async def kv_events(engine: Engine) -> None:
    call = engine.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(include_snapshot=True), timeout=SECONDS)
    try:
        assert (await call.read()).WhichOneof("event") == "batch"
    finally:
        call.cancel()


async def whole_window(engine: Engine) -> None:
    window = engine.model.max_context_length
    options = g.StoppingOptions(max_tokens=1)
    events = await engine.generate(prompt=None, token_ids=g.TokenIds(ids=[9] * (window - 1)), stopping=options)
    assert events[-1].usage.prompt_tokens == window - 1
    await refused(INVALID, engine.generate(prompt=None, token_ids=g.TokenIds(ids=[9] * window), stopping=options))


async def capacity(engine: Engine) -> None:
    load = await engine.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True), timeout=SECONDS)
    said = engine.server.capacity
    if engine.server.engine_role == server_pb2.ENGINE_ROLE_ENCODER:
        assert not any(part.HasField("total_kv_blocks") for part in (said, load, *load.ranks))
        return
    assert load.total_kv_blocks == said.total_kv_blocks > 0
    assert [rank.data_parallel_rank for rank in load.ranks] == [0]
    assert said.kv_block_size * said.total_kv_blocks >= engine.model.max_context_length


async def other_rank(engine: Engine) -> None:
    ranks = engine.server.parallelism.data_parallel_size
    await engine.simplest(metadata=(("openengine-target-dp-rank", f"{ranks - 1}"),))
    await refused(INVALID, engine.simplest(metadata=(("openengine-target-dp-rank", f"{ranks}"),)))


async def names(engine: Engine) -> None:
    for name in (*engine.server.supported_models, engine.model.model_id, *engine.model.served_model_aliases):
        await engine.simplest(model=name)
        found = await engine.control.GetModelInfo(model_pb2.GetModelInfoRequest(model=name), timeout=SECONDS)
        assert found == engine.model
    await refused(grpc.StatusCode.NOT_FOUND, engine.simplest(model="another"))


async def shutdown_of_another_start(engine: Engine) -> None:
    request = lifecycle_pb2.ShutdownRequest(expected_instance_id=f"{engine.server.instance_id}x")
    await refused(grpc.StatusCode.FAILED_PRECONDITION, engine.control.Shutdown(request, timeout=SECONDS))


class Feature(NamedTuple):
    """One promise of the contract."""

    fields: tuple[str, ...]
    """What in the messages promises it."""
    advertised: Callable[[Engine], bool]
    use: Callable[[Engine], Awaitable[None]]
    refusal: grpc.StatusCode = REFUSED


def always(_: Engine) -> bool:
    return True


def generates(engine: Engine) -> bool:
    return bool(engine.model.HasField("generation"))


def logprob_features() -> dict[str, Feature]:
    features = {}
    for side, make in (("prompt", prompt_logprobs), ("output", output_logprobs)):
        field = f"GenerationCapabilities.{side}_logprobs"

        def supported(engine: Engine, side: str = side) -> bool:
            return bool(getattr(engine.model.generation, f"{side}_logprobs").supported)

        features[f"{side} logprobs"] = Feature((field, "LogprobCapabilities.supported"), supported, make(0))
        for mode in SELECTIONS:

            def offered(engine: Engine, side: str = side, mode: int = mode) -> bool:
                return mode in getattr(engine.model.generation, f"{side}_logprobs").candidate_selection_modes

            word = model_pb2.CandidateTokenSelectionMode.Name(mode).removeprefix("CANDIDATE_TOKEN_SELECTION_MODE_")
            fields = (field, "LogprobCapabilities.candidate_selection_modes")
            features[f"{side} logprobs {word}"] = Feature(fields, offered, make(mode))
    fields = ("LogprobCapabilities.max_top_n",)
    features["top_n"] = Feature(fields, lambda e: e.model.generation.output_logprobs.supported, top_n_to_the_limit)
    return features


def guide_features() -> dict[str, Feature]:
    features = {}
    for mode in GUIDES:

        def offered(engine: Engine, mode: int = mode) -> bool:
            said = engine.model.generation.guided_decoding
            assert said.supported == bool(said.modes)
            return mode in said.modes

        fields = (
            "GenerationCapabilities.guided_decoding",
            "GuidedDecodingCapabilities.supported",
            "GuidedDecodingCapabilities.modes",
        )
        name = model_pb2.GuidedDecodingMode.Name(mode).removeprefix("GUIDED_DECODING_MODE_")
        features[f"guided {name}"] = Feature(fields, offered, guided(mode))
    return features


def takes(modality: int) -> Callable[[Engine], bool]:
    """Whether an engine opens such media."""

    def offered(engine: Engine) -> bool:
        said, encoder = engine.model.multimodal_capabilities, engine.model.encoder
        encoded = encoder.modalities if encoder.producer else ()
        known = modality in (*said.aggregate_modalities, *said.prefill_decode_modalities, *encoded)
        return known and bool(said.source_types)

    return offered


def takes_from(modality: int, source: int) -> Callable[[Engine], bool]:
    return lambda e: takes(modality)(e) and source in e.model.multimodal_capabilities.source_types


IMAGES = (
    "ModelInfo.supports_multimodal",
    "ModelInfo.multimodal_capabilities",
    "MultimodalCapabilities.aggregate_modalities",
    "MultimodalCapabilities.prefill_decode_modalities",
    "MultimodalCapabilities.source_types",
    "EncoderCapabilities.requires_handoff",
)

FEATURES: dict[str, Feature] = {
    "text": Feature(("ModelInfo.supports_text_input",), lambda e: e.model.supports_text_input, by_text),
    "token ids": Feature(
        ("ModelInfo.supports_token_ids_input",), lambda e: e.model.supports_token_ids_input, by_token_ids
    ),
    "window": Feature(
        ("ModelInfo.max_context_length",), lambda e: e.model.HasField("max_context_length"), whole_window
    ),
    "names": Feature(
        (
            "ModelInfo.model_id",
            "ModelInfo.served_model_name",
            "ModelInfo.served_model_aliases",
            "ServerInfo.supported_models",
        ),
        always,
        names,
    ),
    "several outputs": Feature(("GenerationCapabilities.max_num_sequences",), generates, several_outputs),
    "priority": Feature(
        ("GenerationCapabilities.supports_priority",), lambda e: e.model.generation.supports_priority, priority
    ),
    "stop in output": Feature(
        ("GenerationCapabilities.supports_stop_in_output",),
        lambda e: e.model.generation.supports_stop_in_output,
        stop_in_output,
    ),
    "cache salt": Feature(
        ("GenerationCapabilities.supports_cache_salt",), lambda e: e.model.generation.supports_cache_salt, cache_salt
    ),
    "prefix cache bypass": Feature(
        ("GenerationCapabilities.supports_prefix_cache_bypass",),
        lambda e: e.model.generation.supports_prefix_cache_bypass,
        prefix_cache_bypass,
    ),
    "lora": Feature(
        ("ModelInfo.supports_lora", "DeploymentCapacity.max_loras"),
        lambda e: e.model.supports_lora and e.server.capacity.max_loras > 0,
        lora,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    "use of an adapter": Feature(
        ("ModelInfo.supports_lora",),
        lambda e: e.model.supports_lora,
        use_of_an_adapter,
    ),
    "image by data URI": Feature(
        IMAGES, takes_from(g.MODALITY_IMAGE, g.MEDIA_SOURCE_TYPE_DATA_URI), picture(data_uri=data_uri(PNG))
    ),
    "image by bytes": Feature(
        IMAGES, takes_from(g.MODALITY_IMAGE, g.MEDIA_SOURCE_TYPE_RAW_BYTES), picture(raw_bytes=PNG)
    ),
    "image by URL": Feature(
        IMAGES, takes_from(g.MODALITY_IMAGE, g.MEDIA_SOURCE_TYPE_URL), by_url(g.MODALITY_IMAGE, "a.png")
    ),
    "video": Feature((*IMAGES, "ModelInfo.extra"), takes(g.MODALITY_VIDEO), video),
    "video by URL": Feature(
        IMAGES, takes_from(g.MODALITY_VIDEO, g.MEDIA_SOURCE_TYPE_URL), by_url(g.MODALITY_VIDEO, "a.mp4")
    ),
    "audio": Feature(IMAGES, takes(g.MODALITY_AUDIO), sound),
    "media options": Feature(
        ("MultimodalCapabilities.supports_per_request_media_options",),
        lambda e: e.model.multimodal_capabilities.supports_per_request_media_options,
        media_options,
    ),
    "session that is made": Feature(
        (
            *("ServerInfo.kv_connector", "KvConnectorInfo.enabled", "KvConnectorInfo.transfer_backend"),
            *("KvConnectorInfo.local_endpoints", "KvConnectorInfo.supported_protocols"),
            *("KvConnectorInfo.handoff_profile", "KvConnectorInfo.supports_decode_pull"),
        ),
        lambda e: e.server.kv_connector.supports_abort_cleanup,
        hand_over,
        INVALID,
    ),
    "session that is taken": Feature(
        ("ServerInfo.kv_connector", "KvConnectorInfo.supports_remote_prefill"),
        lambda e: e.server.kv_connector.supports_remote_prefill,
        take_over,
    ),
    "abort of a session": Feature(
        ("KvConnectorInfo.supports_abort_cleanup",),
        lambda e: e.server.kv_connector.supports_abort_cleanup,
        session_abort,
    ),
    "encoder output": Feature(
        (
            *("ModelInfo.encoder", "EncoderCapabilities.producer", "EncoderCapabilities.transfer_backends"),
            *("EncoderCapabilities.modalities", "EncoderCapabilities.fingerprint"),
        ),
        lambda e: e.model.encoder.producer,
        produce,
    ),
    "encoder input": Feature(
        ("ModelInfo.encoder", "EncoderCapabilities.consumer"), lambda e: e.model.encoder.consumer, consume
    ),
    "abort of an output": Feature(
        ("EncoderCapabilities.supports_abort_cleanup",), lambda e: e.model.encoder.supports_abort_cleanup, output_abort
    ),
    "outcome of an output": Feature(
        ("EncoderCapabilities.producer",), lambda e: e.model.encoder.producer, output_outcome
    ),
    "kv events": Feature(
        ("ServerInfo.extra",),
        lambda e: "kv_event_heartbeat_interval_ms" in e.server.extra.fields,
        kv_events,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    "capacity": Feature(
        ("ServerInfo.capacity", "DeploymentCapacity.kv_block_size", "DeploymentCapacity.total_kv_blocks"),
        always,
        capacity,
    ),
    "ranks": Feature(("ServerInfo.parallelism", "ParallelismInfo.data_parallel_size"), always, other_rank),
    "instance": Feature(("ServerInfo.instance_id",), always, shutdown_of_another_start),
    **logprob_features(),
    **guide_features(),
}

SAID_ONLY = {
    *("ServerInfo.engine_name", "ServerInfo.engine_version", "ServerInfo.engine_role", "ServerInfo.schema_release"),
    *("ServerInfo.schema_revision", "ServerInfo.minimum_client_revision"),
    *("DeploymentCapacity.max_running_requests", "DeploymentCapacity.max_batched_tokens"),
    *("ModelInfo.tokenizer_modes", "ModelInfo.tokenizer", "ModelInfo.generation"),
    *("TokenizerInfo.source", "TokenizerInfo.mode"),
    "MultimodalCapabilities.routing_image_token_id",
    *("KvEndpoint.host", "KvEndpoint.port", "KvEndpoint.protocol"),
    *(f"ParallelismInfo.{kind}_parallel_size" for kind in ("tensor", "pipeline", "decode_context")),
    *("ParallelismInfo.data_parallel_rank", "ParallelismInfo.data_parallel_start_rank"),
}
"""Fields that describe and promise nothing that a request could use."""


async def refused(status: grpc.StatusCode, attempt: Awaitable[Any], *or_by: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attempt
    assert caught.value.code() in (status, *or_by), caught.value.details()
    assert caught.value.details()
