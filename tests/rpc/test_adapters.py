"""The RPCs of LoRA adapters: their answers and their statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.rpc.scripted_role import ScriptedRole
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import InvalidRequest, Overloaded, TriptychError
from triptych.wire.gen import lora_pb2

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve, Served

FIRST: dict[str, Any] = {"lora_id": 1, "lora_name": "first", "source_path": "/adapters/first"}


async def load(served: Served, **changes: Any) -> lora_pb2.LoadLoraResponse:
    request = lora_pb2.LoadLoraRequest(adapter=lora_pb2.LoraAdapter(**(FIRST | changes)))
    response: lora_pb2.LoadLoraResponse = await served.control.LoadLora(request)
    return response


async def listed(served: Served) -> list[str]:
    response = await served.control.ListLoras(lora_pb2.ListLorasRequest())
    return [adapter.lora_name for adapter in response.adapters]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_loaded_listed_and_unloaded(serve: Serve) -> None:
    served = await serve()
    response = await load(served)
    assert response.adapter == lora_pb2.LoraAdapter(**FIRST)
    assert not response.already_loaded
    assert served.role.loras == [AdapterInfo(1, "first", "/adapters/first")]
    assert (await load(served)).already_loaded
    await load(served, lora_id=2**63 - 1, lora_name="second")
    assert await listed(served) == ["first", "second"]
    unloaded = await served.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="first"))
    assert unloaded.adapter == lora_pb2.LoraAdapter(**FIRST)
    assert await listed(served) == ["second"]


@pytest.mark.parametrize("changes", [{"lora_id": 2}, {"lora_name": "second"}, {"source_path": "/adapters/other"}])
async def test_a_conflict_already_exists(serve: Serve, changes: dict[str, Any]) -> None:
    served = await serve()
    await load(served)
    code, message = await status_of(load(served, **changes))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "is another one" in message


async def test_an_unknown_name_is_not_found(serve: Serve) -> None:
    served = await serve()
    code, _ = await status_of(served.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="first")))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"lora_id": 0}, "lora_id must be positive, not 0"),
        ({"lora_id": -5}, "lora_id"),
        ({"lora_name": ""}, "lora_name must not be empty"),
        ({"lora_name": "é" * 513}, "lora_name has 1026 bytes"),
        ({"source_path": ""}, "source_path must be an absolute directory"),
        ({"source_path": "adapters/first"}, "source_path"),
        ({"source_path": "/" + "a" * 4096}, "source_path has 4097 bytes"),
    ],
)
async def test_wrong_fields_are_named_and_never_reach_the_role(
    serve: Serve, changes: dict[str, Any], name: str
) -> None:
    served = await serve()
    code, message = await status_of(load(served, **changes))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert name in message
    assert served.role.loras == []


async def test_what_is_absent_is_named(serve: Serve) -> None:
    served = await serve()
    code, message = await status_of(served.control.LoadLora(lora_pb2.LoadLoraRequest()))
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "adapter is absent")
    code, message = await status_of(served.control.UnloadLora(lora_pb2.UnloadLoraRequest()))
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "lora_name must not be empty")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("adapter_config.json is absent"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("2 adapters are loaded"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (MemoryError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_the_role_refuses(serve: Serve, error: Exception, status: grpc.StatusCode) -> None:
    class Refusing(ScriptedRole):
        async def load_adapter(self, info: AdapterInfo) -> bool:
            raise error

    code, message = await status_of(load(await serve(Refusing())))
    assert code is status
    assert (message == str(error)) == isinstance(error, TriptychError)


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("LoadLora", lora_pb2.LoadLoraRequest(adapter=lora_pb2.LoraAdapter(**FIRST))),
        ("UnloadLora", lora_pb2.UnloadLoraRequest(lora_name="first")),
        ("ListLoras", lora_pb2.ListLorasRequest()),
    ],
)
async def test_switched_off_is_a_failed_precondition(serve: Serve, rpc: str, request_: Any) -> None:
    served = await serve(ScriptedRole(description={"max_loras": 0}))
    code, message = await status_of(getattr(served.control, rpc)(request_))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "--max-loras" in message
