"""What ``triptych engine`` does around the serving."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.roles.fake_engine import FakeEngine, fake_role
from triptych.cli import engine
from triptych.core.clip import FrameSampling
from triptych.core.errors import Draining


class Assigned:
    """Loads a thousand objects."""

    closed = False
    signer = None

    def close(self) -> None:
        self.closed = True

    def load(self, *args: Any) -> list[list[int]]:
        return [[number] for number in range(1000)]


def test_what_is_loaded_is_kept_from_the_collector_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[bool] = []

    async def serve(start: list[list[int]], *_: Any) -> int:
        loaded = {id(each) for each in start}
        walked.append(any(id(each) in loaded for each in gc.get_objects()))
        return 7

    monkeypatch.setattr(engine, "_serve", serve)
    nowhere = engine.Listeners("127.0.0.1:0", None, False, None)
    assert engine.run("demo", Assigned(), None, None, nowhere, announce=False) == 7
    assert walked == [False]
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("early", [False, True])
async def test_both_pools_end_though_the_server_would_not_stop(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        address = "127.0.0.1:1"

        async def stop(self, grace: float) -> None:
            raise OSError(f"it would not stop within {grace} s")

    async def serve(*_: Any, **__: Any) -> Server:
        return Server()

    async def stopped(*_: Any) -> None:
        if early:
            raise RuntimeError("before anybody asked")

    monkeypatch.setattr(engine, "serve_role", serve)
    monkeypatch.setattr(engine, "stopped_or_failed", stopped)
    desk, assigned = fake_role(FakeEngine()), Assigned()
    nowhere = engine.Listeners("127.0.0.1:0", None, False, None)
    with pytest.raises(OSError, match="it would not stop"):
        await engine._serve(lambda _: desk, assigned, nowhere, None)
    media = desk._intake.media
    assert media is not None
    with pytest.raises(RuntimeError, match="after shutdown"):
        media._threads.submit(print)
    with pytest.raises(Draining):
        await media._decoder.survey(0, b"", FrameSampling(), None)
    assert assigned.closed
