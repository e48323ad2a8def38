"""How an engine process ends: by a signal and by Control.Shutdown, on the same path, with exit code 0."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest

from tests.e2e.servers import Engine, engine_process
from triptych.wire.gen import error_pb2, generation_pb2, lifecycle_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 60.0


class Client(NamedTuple):
    """One engine and its two services."""

    engine: Engine
    inference: openengine_pb2_grpc.InferenceStub
    control: openengine_pb2_grpc.ControlStub

    def stream(self, request_id: str, tokens: int) -> Any:
        """An answer of so many tokens, accepted and begun."""
        request = generation_pb2.GenerateRequest(request_id=request_id, model="demo", prompt="hello")
        request.stopping.max_tokens = tokens
        request.stopping.ignore_eos = True
        responses = self.inference.Generate(request, timeout=SECONDS)
        next(responses)
        return responses

    def shutdown(self, instance_id: str, **fields: int) -> int:
        """The status of one Shutdown call."""
        request = lifecycle_pb2.ShutdownRequest(expected_instance_id=instance_id, **fields)
        return int(self.control.Shutdown(request, timeout=SECONDS).status)

    def instance_id(self) -> str:
        """The id of this start."""
        return str(self.control.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=SECONDS).instance_id)


@pytest.fixture
def client() -> Iterator[Client]:
    with engine_process("demo") as engine, grpc.insecure_channel(engine.address) as channel:
        yield Client(engine, openengine_pb2_grpc.InferenceStub(channel), openengine_pb2_grpc.ControlStub(channel))


def refusal(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


def test_shutdown_lets_live_requests_finish_and_refuses_new_ones(client: Client) -> None:
    live = client.stream("live", 1500)
    assert refusal(lambda: client.shutdown("")) is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(lambda: client.shutdown("another start")) is grpc.StatusCode.FAILED_PRECONDITION
    instance_id = client.instance_id()
    assert client.shutdown(instance_id) == lifecycle_pb2.SHUTDOWN_STATUS_STARTED
    assert client.shutdown(instance_id, grace_period_ms=1) == lifecycle_pb2.SHUTDOWN_STATUS_ALREADY_IN_PROGRESS
    assert refusal(lambda: client.stream("late", 1)) is grpc.StatusCode.UNAVAILABLE
    health = client.control.Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)
    assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
    assert list(live)[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert client.engine.process.wait(SECONDS) == 0


def test_shutdown_ends_what_outlives_its_grace(client: Client) -> None:
    live = client.stream("live", 4000)
    assert client.shutdown(client.instance_id(), grace_period_ms=0) == lifecycle_pb2.SHUTDOWN_STATUS_STARTED
    last = list(live)[-1]
    assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert last.error.retryable
    assert client.engine.process.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_the_same_path(client: Client, number: signal.Signals) -> None:
    live = client.stream("live", 1500)
    client.engine.process.send_signal(number)
    assert list(live)[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert client.engine.process.wait(SECONDS) == 0
