"""What ``triptych engine`` does around the serving."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from triptych.cli import engine

if TYPE_CHECKING:
    import pytest


class Assigned:
    """Loads a thousand objects."""

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
