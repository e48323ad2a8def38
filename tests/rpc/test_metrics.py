"""The Prometheus page of a role."""

from __future__ import annotations

import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rpc.scripted_role import ScriptedRole
from triptych.core.errors import StartupError
from triptych.rpc.message_bytes import MessageBytes
from triptych.rpc.metrics import serve_metrics


async def page(address: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://{address}/metrics")


async def test_every_number_of_load_and_ledgers_is_a_gauge() -> None:
    server = await serve_metrics(ScriptedRole(live={"a"}), MessageBytes(), "127.0.0.1", 0)
    response = await page(server.address)
    assert response.status_code == 200
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert all(family.type == "gauge" for family in families.values())
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["triptych_load_running_requests"] == 1
    assert values["triptych_load_total_blocks"] == 100
    assert values["triptych_blocks_free"] == 97
    assert values["triptych_messages_held_bytes"] == 0
    assert values["triptych_encoder_cache_hit_rate"] == 0.5
    await server.stop()


async def test_numbers_are_those_of_the_scrape() -> None:
    role = ScriptedRole()
    server = await serve_metrics(role, MessageBytes(), "127.0.0.1", 0)
    assert "triptych_load_running_requests 0.0" in (await page(server.address)).text
    role.live.add("a")
    assert "triptych_load_running_requests 1.0" in (await page(server.address)).text
    await server.stop()


async def test_the_role_is_read_on_its_own_loop() -> None:
    seen: list[int] = []

    class Watched(ScriptedRole):
        def statistics(self) -> dict[str, dict[str, float]]:
            seen.append(threading.get_ident())
            return {}

    server = await serve_metrics(Watched(), MessageBytes(), "127.0.0.1", 0)
    await page(server.address)
    assert seen == [threading.get_ident()]
    await server.stop()


async def test_a_taken_port_is_a_startup_error_that_names_it() -> None:
    server = await serve_metrics(ScriptedRole(), MessageBytes(), "127.0.0.1", 0)
    with pytest.raises(StartupError, match=server.address):
        await serve_metrics(ScriptedRole(), MessageBytes(), "127.0.0.1", int(server.address.rpartition(":")[2]))
    await server.stop()


async def test_metrics_for_other_machines_need_the_flag() -> None:
    with pytest.raises(StartupError, match="--allow-plaintext"):
        await serve_metrics(ScriptedRole(), MessageBytes(), "0.0.0.0", 0)
    server = await serve_metrics(ScriptedRole(), MessageBytes(), "0.0.0.0", 0, allow_plaintext=True)
    await server.stop()


async def test_stopping_closes_the_port_and_the_thread() -> None:
    before = set(threading.enumerate())
    server = await serve_metrics(ScriptedRole(), MessageBytes(), "127.0.0.1", 0)
    await page(server.address)
    await server.stop()
    with pytest.raises(httpx.ConnectError):
        await page(server.address)
    # The event loop keeps the workers of to_thread for itself.
    left = [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    assert left == []
