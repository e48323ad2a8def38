"""The LoRA adapters of an engine by name and by id: what is loaded, what is being loaded, what a request means.

    load      checked, then read on a thread of its own, one at a time; two loads of the very same become one
    resolve   a request takes the adapter itself, so that unloading never touches what runs
    unload    the name and the id are free again; the weights go with the last request that uses them

A load goes on when its caller leaves, and may therefore be found in the list later. Until it has ended its name
cannot be unloaded: whether there is anything to unload is not known yet.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    Internal,
    Overloaded,
    TriptychError,
    UnsupportedFeature,
    WrongState,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.adapter import Adapter, AdapterInfo

log = logging.getLogger(__name__)

NAMES_SHOWN = 8
"""Loaded names that an error lists."""


class _Loading(NamedTuple):
    """A load under way."""

    info: AdapterInfo
    task: asyncio.Task[TriptychError | None]
    """Its result is why it failed."""


class Adapters:
    """Belongs to the event loop.

    Args:
        load: reads an adapter from its directory, blocking; raises InvalidRequest for one that cannot be used.
        limit: adapters that may be loaded at once, those being loaded included; 0 switches them off.
    """

    def __init__(self, load: Callable[[AdapterInfo], Adapter], limit: int) -> None:
        self._read = load
        self._limit = limit
        self._loaded: dict[str, Adapter] = {}
        self._loading: dict[str, _Loading] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._loads = 0
        self._failures = 0

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters, oldest first."""
        return tuple(adapter.info for adapter in self._loaded.values())

    def resolve(self, name: str) -> Adapter | None:
        """The adapter that a request names; None for the base model's empty name.

        Raises:
            AdapterNotFound: none of this name is loaded.
            UnsupportedFeature: adapters are switched off.
        """
        if not name:
            return None
        if not self._limit:
            raise UnsupportedFeature(f"lora_name is {name!r} but LoRA adapters are switched off (--max-loras 0)")
        adapter = self._loaded.get(name)
        if adapter is None:
            raise self._not_found(name)
        return adapter

    async def load(self, info: AdapterInfo) -> bool:
        """Load an adapter; see ``Role.load_adapter``."""
        self._refuse_if_off()
        for other in self.infos:
            if other == info:
                return True
            _refuse_conflict(info, other, "loaded")
        for loading in self._loading.values():
            if loading.info == info:
                await self._outcome(loading)
                return True
            _refuse_conflict(info, loading.info, "being loaded")
        if len(self._loaded) + len(self._loading) >= self._limit:
            raise Overloaded(
                f"{self._limit} LoRA adapters are loaded or being loaded, as many as --max-loras allows; unload one"
            )
        reading = asyncio.get_running_loop().run_in_executor(self._pool, self._read, info)
        task = asyncio.create_task(self._settle(info, reading), name=f"load adapter {info.lora_id}")
        self._loading[info.name] = loading = _Loading(info, task)
        await self._outcome(loading)
        return False

    def unload(self, name: str) -> AdapterInfo:
        """Forget an adapter; see ``Role.unload_adapter``."""
        self._refuse_if_off()
        if name in self._loading:
            raise WrongState(f"the LoRA adapter {_short(name)!r} is still being loaded; retry once it is")
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise self._not_found(name)
        return adapter.info

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {
            "loaded": len(self._loaded),
            "loading": len(self._loading),
            "loads": self._loads,
            "failures": self._failures,
        }

    async def close(self) -> None:
        """Wait for the load under way and those behind it, which are bounded; there must be no new ones."""
        await asyncio.to_thread(self._pool.shutdown, wait=True)
        await asyncio.gather(*(loading.task for loading in self._loading.values()))

    async def _settle(self, info: AdapterInfo, reading: asyncio.Future[Adapter]) -> TriptychError | None:
        try:
            adapter = await reading
        except TriptychError as error:
            self._failures += 1
            return error
        except Exception:
            log.exception("loading the LoRA adapter %r failed", info.name)
            self._failures += 1
            return Internal("loading the LoRA adapter failed; the engine's log has details")
        else:
            self._loads += 1
            self._loaded[info.name] = adapter
            return None
        finally:
            del self._loading[info.name]

    @staticmethod
    async def _outcome(loading: _Loading) -> None:
        error = await asyncio.shield(loading.task)
        if error is not None:
            raise error

    def _refuse_if_off(self) -> None:
        if not self._limit:
            raise WrongState("LoRA adapters are switched off (--max-loras 0)")

    def _not_found(self, name: str) -> AdapterNotFound:
        names = [f"{_short(known)!r}" for known in list(self._loaded)[:NAMES_SHOWN]]
        if len(self._loaded) > NAMES_SHOWN:
            names.append(f"{len(self._loaded) - NAMES_SHOWN} more")
        return AdapterNotFound(f"no LoRA adapter {_short(name)!r} is loaded; loaded: {', '.join(names) or 'none'}")


def _refuse_conflict(info: AdapterInfo, other: AdapterInfo, state: str) -> None:
    for field, same in (("id", info.lora_id == other.lora_id), ("name", info.name == other.name)):
        if same:
            raise AdapterConflict(
                f"the LoRA adapter {_short(other.name)!r} with id {other.lora_id}, {state} from {other.path!r}, has "
                f"this {field}; unload it first"
            )


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:64]}..."
