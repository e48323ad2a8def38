"""Room for messages: who may send, who waits, who is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.cli import engine
from triptych.cli.main import main
from triptych.cli.media import MediaFlags
from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions
from triptych.cli.serve import EngineFlags
from triptych.core.config import GIB
from triptych.core.errors import Overloaded, TriptychError
from triptych.rpc.message_bytes import MAX_LINE, MessageBytes
from triptych.wire.limits import MAX_MESSAGE


class Context:
    """A call whose client sends when the test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set once the call may send."""
        self.sent: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        self.asked.set()
        return await self.sent


@dataclass
class Call:
    """One that stays until the test ends it."""

    context: Context = field(default_factory=Context)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0
    task: asyncio.Task[None] | None = None

    def begin(self, messages: MessageBytes) -> Call:
        self.task = asyncio.create_task(self._run(messages))
        return self

    async def _run(self, messages: MessageBytes) -> None:
        async with messages.receive(self.context) as message:
            self.size = message.size
            assert len(message.take()) == self.size
            assert message.take() == b""
            self.taken.set()
            await self.end.wait()

    async def refusal(self) -> TriptychError:
        assert self.task is not None
        with pytest.raises(TriptychError) as caught:
            await self.task
        return caught.value


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_comes_while_all_room_is_given_away_waits_in_order() -> None:
    messages = MessageBytes(2 * MAX_MESSAGE)
    calls = [Call().begin(messages) for _ in range(5)]
    await settle()
    assert [call.context.asked.is_set() for call in calls] == [True, True, False, False, False]
    calls[0].context.sent.set_result(b"")  # it is here, and needs no room
    await settle()
    assert [call.context.asked.is_set() for call in calls] == [True, True, True, False, False]
    assert calls[3].task is not None
    calls[3].task.cancel()
    calls[1].context.sent.set_result(b"")
    await settle()
    assert calls[4].context.asked.is_set()
    for call in calls:
        call.end.set()
        if not call.context.sent.done():
            call.context.sent.set_result(b"")
    await asyncio.gather(*(call.task for call in calls if call.task), return_exceptions=True)
    assert messages.statistics() == {"held_bytes": 0, "arriving": 0, "waiting": 0, "refused": 0}


async def test_what_is_here_and_leaves_no_room_refuses_who_comes_and_who_waits() -> None:
    messages = MessageBytes(MAX_MESSAGE + 99)
    first, waiting = Call().begin(messages), Call().begin(messages)
    await settle()
    first.context.sent.set_result(bytes(100))
    says = rf"messages of 100 bytes .* {MAX_MESSAGE}; at most {MAX_MESSAGE + 99} \(--max-message-bytes-held\); retry"
    for refused in (waiting, Call().begin(messages)):
        error = await refused.refusal()
        assert isinstance(error, Overloaded)
        assert error.retryable
        with pytest.raises(Overloaded, match=says):
            raise error
        assert not refused.context.asked.is_set()
    assert messages.statistics()["refused"] == 2
    first.end.set()
    await settle()
    third = Call().begin(messages)
    await settle()
    assert third.context.asked.is_set()
    third.context.sent.set_result(bytes(99))  # leaves just enough
    fourth = Call().begin(messages)
    await settle()
    assert fourth.context.asked.is_set()


async def test_the_only_one_is_never_refused() -> None:
    messages = MessageBytes(1)
    call = Call().begin(messages)
    await settle()
    call.context.sent.set_result(bytes(1000))
    await asyncio.wait_for(call.taken.wait(), 20)


async def test_so_many_may_wait() -> None:
    messages = MessageBytes(1)
    calls = [Call().begin(messages) for _ in range(1 + MAX_LINE)]
    await settle()
    assert f"{MAX_LINE} calls already wait" in str(await Call().begin(messages).refusal())
    for call in calls[1:]:
        assert call.task is not None
        call.task.cancel()
    await settle()
    assert messages.statistics()["waiting"] == 0


async def test_who_leaves_in_the_moment_of_its_turn_gives_it_back() -> None:
    messages = MessageBytes(1)
    first, second, third = (Call().begin(messages) for _ in range(3))
    await settle()
    first.end.set()
    first.context.sent.set_result(b"")
    while messages.statistics()["waiting"] == 2:
        await asyncio.sleep(0)
    assert not second.context.asked.is_set()
    assert second.task is not None
    second.task.cancel()
    await settle()
    assert third.context.asked.is_set()


async def test_who_leaves_in_the_moment_of_its_arrival_leaves_nothing() -> None:
    messages = MessageBytes(1)
    call = Call().begin(messages)
    await settle()
    call.context.sent.set_result(bytes(1000))
    while not messages.statistics()["held_bytes"]:
        await asyncio.sleep(0)
    assert not call.taken.is_set()
    assert call.task is not None
    call.task.cancel()
    await settle()
    assert not call.taken.is_set()
    assert messages.statistics()["held_bytes"] == 0


async def test_what_arrives_too_late_counts_until_it_is_gone() -> None:
    messages = MessageBytes(1, seconds=0.01)
    slow = Call().begin(messages)
    assert "did not arrive within 0.01 s" in str(await slow.refusal())
    waiting = Call().begin(messages)
    await settle()
    assert not waiting.context.asked.is_set()
    slow.context.sent.set_result(bytes(1000))  # nobody takes it any more
    await settle()
    assert waiting.context.asked.is_set()
    assert messages.statistics()["held_bytes"] == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "send", "end", "leave", "fail"]), st.integers(0, 9), st.integers(0, 200)),
    max_size=60,
)


@settings(max_examples=60)
@given(STEPS, st.sampled_from([1, MAX_MESSAGE + 150, 3 * MAX_MESSAGE]))
def test_whatever_calls_do_there_is_no_more_than_the_limit_and_in_the_end_nothing(
    steps: list[tuple[str, int, int]], most: int
) -> None:
    async def run() -> None:
        messages = MessageBytes(most)
        calls: list[Call] = []
        for what, which, size in steps:
            if what == "begin":
                calls.append(Call().begin(messages))
            elif calls:
                act(calls[which % len(calls)], what, size)
            if size % 2:
                await settle()
                now = messages.statistics()
                counted = now["held_bytes"] + now["arriving"] * MAX_MESSAGE
                assert counted <= max(most, MAX_MESSAGE)
                if now["waiting"]:
                    assert counted
                    assert counted + MAX_MESSAGE > most
        for call in calls:
            act(call, "end", 0)
        await settle()
        for call in calls:  # those that were in line are asked one after the other
            act(call, "send", 0)
            await settle()
        await asyncio.gather(*(call.task for call in calls if call.task), return_exceptions=True)
        await messages.settled()
        assert messages.statistics() | {"refused": 0} == {"held_bytes": 0, "arriving": 0, "waiting": 0, "refused": 0}

    asyncio.run(run())


def act(call: Call, what: str, size: int) -> None:
    assert call.task is not None
    if what == "send" and not call.context.sent.done():
        call.context.sent.set_result(bytes(size))
    elif what == "fail" and not call.context.sent.done():
        call.context.sent.set_result(object())  # the end of its stream
    elif what == "leave":
        call.task.cancel()
    elif what == "end":
        call.end.set()


def test_the_flag_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(engine, "run", lambda *words, **_: seen.append(words[4]))
    for words in ((), ("--max-message-bytes-held", "1GiB")):
        with pytest.raises(SystemExit):
            main(["engine", "demo", *words])
    assert [listeners.max_message_bytes_held for listeners in seen] == [4 * GIB, GIB]
    flags = EngineFlags(EngineOptions(max_message_bytes_held=5), MediaFlags(), HandoffOptions(), EncoderOptions())
    for role in ("aggregated", "prefill", "decode", "encoder"):
        said = flags.words(role, (role,))
        assert said[said.index("--max-message-bytes-held") + 1] == "5"
