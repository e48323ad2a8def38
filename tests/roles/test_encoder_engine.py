"""The encoder role whole: real towers, the memory transport, and rows that arrive as they were computed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.checkpoints import VISION_SHAPES
from tests.drawings import shape_png
from tests.roles.encoder_asks import MARKER, ask, outputs, rest
from tests.roles.encoder_engine import load_tower, running_encoder
from triptych.core.config import KIB
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.events import EncoderReady, Failed, Finished
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions
from triptych.engine.row_arena import ROW_LAYOUT
from triptych.roles.contract import AbortOutcome, HealthState, TransferOutcome
from triptych.transport.contract import FetchOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.core.request import GenerateRequest

BLOCK = ROW_LAYOUT.block_bytes


def picture(shape: str, colour: str, size: int) -> MediaItem:
    return MediaItem(Modality.IMAGE, RawBytes(shape_png(shape, colour, size)))


PICTURES = tuple(
    picture(shape, colour, size)
    for shape, colour, size in (("circle", "red", 64), ("square", "blue", 150), ("triangle", "green", 97))
)


def of(*media: MediaItem, **changes: Any) -> GenerateRequest:
    return ask(prompt=MARKER * len(media), media=media, **changes)


def as_bytes(rows: torch.Tensor) -> bytes:
    return rows.reshape(-1).view(torch.uint8).numpy().tobytes()


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", VISION_SHAPES)
async def test_rows_arrive_as_the_tower_computes_them(
    checkpoint: Callable[[str], Path], shape: str, dtype: str
) -> None:
    loaded = load_tower(checkpoint(shape), dtype=dtype)
    async with running_encoder(loaded) as bench:
        request = of(*PICTURES, picture("circle", "green", 700))
        references = await bench.encode(request)
        assert (references[-1].item.handle.blocks > 1) == (shape != "vl-plain")  # whose rows are the narrowest
        for reference, rows in zip(references, bench.rows(request), strict=True):
            item = reference.item
            assert reference.fingerprint == bench.role.engine.fingerprint
            assert (item.dtype, item.row_bytes) == (dtype, loaded.model.spec.row_bytes)
            assert item.layout.rows == len(rows)
            assert bench.role.transfer_outcome(item.handle.session_id) is TransferOutcome.NOT_STARTED
            assert bench.consumer.take(item) == (FetchOutcome.FINISHED, as_bytes(rows))
            assert bench.consumer.take(item).outcome is FetchOutcome.GONE
        await bench.idle()
        for reference in references:
            name = reference.item.handle.session_id
            assert bench.role.transfer_outcome(name) is TransferOutcome.FINISHED
            assert await bench.role.abort_rows(name) is AbortOutcome.ALREADY_FINISHED
        assert outputs(bench.role) == (0, 4, 4, 0, 0)


async def test_a_repeat_is_neither_opened_nor_encoded(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-deepstack"))) as bench:
        request = of(*PICTURES)
        first, second = await bench.encode(request), await bench.encode(request)
        for old, new, rows in zip(first, second, bench.rows(request), strict=True):
            assert old.item.handle.session_id != new.item.handle.session_id
            for one in (new, old):
                assert bench.consumer.take(one.item) == (FetchOutcome.FINISHED, as_bytes(rows))
        assert bench.role.statistics()["intake"]["image_loads"] == 3
        assert bench.role.statistics()["scheduler"]["encoded_items"] == 3
        await bench.idle()


async def test_many_requests_for_one_picture_compute_it_once(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain"))) as bench:
        found = await asyncio.gather(
            *(bench.encode(of(PICTURES[1], PICTURES[1], request_id=str(number))) for number in range(20))
        )
        (rows, _) = bench.rows(of(PICTURES[1], PICTURES[1]))
        for references in found:
            for one in references:
                assert bench.consumer.take(one.item) == (FetchOutcome.FINISHED, as_bytes(rows))
        assert bench.role.statistics()["scheduler"]["encoded_items"] == 1
        await bench.idle()


async def test_rows_that_were_driven_out_are_computed_again(checkpoint: Callable[[str], Path]) -> None:
    loaded = load_tower(checkpoint("vl-plain"))
    async with running_encoder(loaded) as bench:
        largest = max(len(as_bytes(rows)) for rows in bench.rows(of(*PICTURES)))
    loaded = replace(loaded, config=replace(loaded.config, encoder_cache_bytes=largest))  # of one item
    async with running_encoder(loaded) as bench:
        for number, one in enumerate(PICTURES * 2):
            (reference,) = await bench.encode(of(one))
            (rows,) = bench.rows(of(one))
            assert bench.consumer.take(reference.item) == (FetchOutcome.FINISHED, as_bytes(rows)), number
        assert bench.role.statistics()["scheduler"]["gone"] == 3
        assert bench.role.statistics()["known_items"]["hits"] == 3
        references = await bench.encode(of(*PICTURES))  # some are known, and what is encoded drives them out
        for reference, one in zip(references, PICTURES, strict=True):
            (rows,) = bench.rows(of(one))
            taken = bench.consumer.take(reference.item)
            assert taken.outcome is FetchOutcome.FINISHED
            assert taken.data == as_bytes(rows)
        await bench.idle()


async def test_tenants_share_nothing(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain"))) as bench:
        for salt in ("", "a", "b"):
            await bench.encode(of(PICTURES[0], cache=CacheOptions(salt=salt)))
        assert bench.role.statistics()["intake"]["image_loads"] == 3
        assert bench.role.statistics()["scheduler"]["encoded_items"] == 3


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_a_request_that_can_never_be_held_says_which_item(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain")), quota=2 * BLOCK) as bench:
        answer = await bench.role.accept(of(*PICTURES))
        (end,) = await rest(answer)
        assert isinstance(end, Failed)
        assert isinstance(end.error, InvalidRequest)
        assert str(end.error).startswith("media item 2: ")
        assert "--encoder-quota" in str(end.error)
        await answer.aclose()
        await bench.idle()


async def test_who_finds_no_room_waits_until_somebody_is_done(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain")), quota=2 * BLOCK) as bench:
        first, second = await bench.encode(of(*PICTURES[:2]))
        waiting = asyncio.create_task(bench.encode(of(PICTURES[2], PICTURES[0], request_id="second")))
        assert bench.consumer.take(first.item).outcome is FetchOutcome.FINISHED
        while bench.role.statistics()["scheduler"]["leased_bytes"] > BLOCK:
            await asyncio.sleep(0.001)
        assert not waiting.done()  # there is room for one of its items, and it takes none of it
        assert await bench.role.abort_rows(second.item.handle.session_id) is AbortOutcome.ABORTED
        assert bench.consumer.take((await waiting)[1].item).outcome is FetchOutcome.FINISHED


async def test_nobody_came(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain")), ttl=0.05) as bench:
        (reference,) = await bench.encode(of(PICTURES[0]))
        await bench.idle()
        assert bench.consumer.take(reference.item).outcome is FetchOutcome.GONE
        assert bench.role.transfer_outcome(reference.item.handle.session_id) is TransferOutcome.FAILED
        assert outputs(bench.role) == (0, 1, 0, 1, 0)


async def test_what_was_aborted_cannot_be_taken(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain"))) as bench:
        first, second = await bench.encode(of(*PICTURES[:2]))
        assert await bench.role.abort_rows(first.item.handle.session_id) is AbortOutcome.ABORTED
        assert await bench.role.abort_rows(first.item.handle.session_id) is AbortOutcome.ALREADY_FINISHED
        while len(bench.memory.exchange.sessions) > 1:
            await asyncio.sleep(0.001)
        assert bench.consumer.take(first.item).outcome is FetchOutcome.GONE
        assert bench.role.transfer_outcome(first.item.handle.session_id) is TransferOutcome.FAILED
        assert bench.consumer.take(second.item).outcome is FetchOutcome.FINISHED
        await bench.idle()


async def test_a_picture_that_breaks_the_tower_is_named(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tower(checkpoint("vl-plain"))
    tower = type(loaded.model.tower)
    encode = tower.encode

    def broken(self: Any, inputs: Any) -> Any:
        if any(one.layout.rows == bad for one in inputs):
            raise RuntimeError("no")
        return encode(self, inputs)

    async with running_encoder(loaded) as bench:
        bad = bench.inputs(of(PICTURES[1]))[0].layout.rows
        monkeypatch.setattr(tower, "encode", broken)
        answer = await bench.role.accept(of(*PICTURES))
        (end,) = await rest(answer)
        assert isinstance(end, Failed)
        assert isinstance(end.error, Internal)
        assert str(end.error).startswith("media item 1: ")
        await answer.aclose()
        await bench.idle()  # the others' rows too
        monkeypatch.undo()
        assert len(await bench.encode(of(*PICTURES))) == 3


async def test_a_probe_runs_the_tower_and_leaves_nothing_behind(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain"))) as bench:
        for number in (1, 2):
            checks = {check.name: check for check in await bench.role.health(probe=True)}
            assert checks["inference_probe"].state is HealthState.READY, checks
            assert checks["encoder_connector"].message == "memory"
            assert bench.role.statistics()["scheduler"]["encoded_items"] == number
        await bench.idle()


async def test_a_drain_with_outputs_outstanding(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(load_tower(checkpoint("vl-plain"))) as bench:
        first, second = await bench.encode(of(*PICTURES[:2]))
        draining = asyncio.create_task(bench.role.drain(60))
        assert bench.consumer.take(first.item).outcome is FetchOutcome.FINISHED
        await asyncio.sleep(0)
        assert not draining.done()
        assert bench.consumer.take(second.item).outcome is FetchOutcome.FINISHED
        await draining
        assert bench.held() == {}


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_five_hundred_requests_in_memory_for_few(checkpoint: Callable[[str], Path]) -> None:
    chance = random.Random(5)
    pictures = [
        picture(shape, colour, size)
        for shape in ("circle", "square", "triangle")
        for colour in ("red", "blue")
        for size in (64, 97)
    ]
    loaded = load_tower(checkpoint("vl-plain"))
    loaded = replace(loaded, config=replace(loaded.config, encoder_cache_bytes=6 * KIB, encoder_items=4))
    async with running_encoder(loaded, quota=6 * BLOCK) as bench:
        expected = {}
        for one in pictures:
            request = of(one)
            expected[bench.inputs(request)[0].layout.content_key] = as_bytes(bench.rows(request)[0])
        ends = dict.fromkeys(("taken", "aborted", "cancelled", "left"), 0)
        numbers = iter(range(500))

        async def one_of_them(number: int) -> None:
            media = [chance.choice(pictures) for _ in range(chance.randrange(1, 4))]
            answer = await bench.role.accept(of(*media, request_id=str(number)))
            try:
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.random() / 100)
                    if chance.random() < 0.5:
                        ends["left"] += 1
                        return
                    await bench.role.abort(str(number))
                (end,) = await rest(answer)
            finally:
                await answer.aclose()
            assert isinstance(end, EncoderReady | Finished)
            if isinstance(end, Finished):
                ends["cancelled"] += 1
                return
            for reference in end.references:
                item = reference.item
                if chance.random() < 0.3:
                    assert await bench.role.abort_rows(item.handle.session_id) is AbortOutcome.ABORTED
                    ends["aborted"] += 1
                else:
                    taken = bench.consumer.take(item)
                    assert taken.outcome is FetchOutcome.FINISHED
                    # whoever shared its step decides about the last bits
                    ours, alone = (
                        np.frombuffer(data, np.float32) for data in (taken.data, expected[item.layout.content_key])
                    )
                    np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-4)
                    ends["taken"] += 1

        async def worker() -> None:
            for number in numbers:
                await one_of_them(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(32):
                group.create_task(worker())
        assert min(ends.values()) > 0
        assert bench.role.statistics()["scheduler"]["gone"] > 0
        await bench.idle()
        checks = {check.name: check for check in await bench.role.health(probe=False)}
        assert checks["scheduler"].state is HealthState.READY, checks["scheduler"].message
