"""One side of a transport in a process of its own, which a test drives and ends as it likes.

    python -m tests.contract.peer producer|consumer TRANSPORT PLACE BLOCKS LAYOUT

Commands come as lines of JSON on stdin, answers go as lines of JSON to stdout. LAYOUT is one in JSON. Pools have the
seeds of ``Sides``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract.transports import LARGE, PATIENCE, TRANSPORTS, Fetching, make_pool
from triptych.core.handles import Handle, KvLayout, RowLayout
from triptych.transport.contract import Move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contract.transports import BlockLayout
    from triptych.transport.contract import SessionEvent

ROOT = Path(__file__).parents[2]


class Peer:
    """The test's end."""

    def __init__(self, side: str, transport: str, place: str, blocks: int, layout: BlockLayout = LARGE) -> None:
        fields = json.dumps(dataclasses.asdict(layout))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.peer", side, transport, place, str(blocks), fields],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "up"

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def say(self, verb: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def offer(self, session_id: str, blocks: list[int]) -> Handle[Any]:
        self.say("offer", session_id, blocks)
        return from_json(self.answer())

    def end(self) -> None:
        """Let it close its side and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE) == 0

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._process.kill()
        self._process.wait(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def to_json(handle: Handle[Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(handle), "state": base64.b64encode(handle.state).decode()}


def from_json(fields: dict[str, Any]) -> Handle[Any]:
    return Handle(**{**fields, "layout": layout_of(fields["layout"]), "state": base64.b64decode(fields["state"])})


def layout_of(fields: dict[str, Any]) -> BlockLayout:
    return KvLayout(**fields) if "layers" in fields else RowLayout(**fields)


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _commands() -> Iterator[tuple[str, list[Any]]]:
    _say("up")
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        yield verb, arguments


def _produce(transport: str, place: str, blocks: int, layout: BlockLayout) -> None:
    def tell(session_id: str, event: SessionEvent) -> None:
        del session_id, event

    row = TRANSPORTS[transport]
    publisher = row.publisher(place, make_pool(layout, blocks, 1), uuid.uuid4().hex, tell)
    for verb, arguments in _commands():
        session_id = arguments[0]
        if verb == "offer":
            publisher.open(session_id)
            for block in arguments[1]:
                publisher.publish(session_id, [block])
            _say(to_json(publisher.seal(session_id)))
    publisher.close()


def _consume(transport: str, place: str, blocks: int, layout: BlockLayout) -> None:
    row = TRANSPORTS[transport]
    pool = make_pool(layout, blocks, 2)
    fetcher = row.fetcher(place, pool, uuid.uuid4().hex)
    for verb, arguments in _commands():
        if verb == "fetch":
            handle = from_json(arguments[0])
            fetching = Fetching(fetcher, pool)
            fetching.start(handle, [Move(index, index) for index in range(handle.blocks)])
            threading.Thread(target=lambda each=fetching: _say(each.wait().value), daemon=True).start()
    fetcher.close()


if __name__ == "__main__":
    sides = {"producer": _produce, "consumer": _consume}
    sides[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]), layout_of(json.loads(sys.argv[5])))
