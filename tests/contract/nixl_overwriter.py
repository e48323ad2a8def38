"""A producer in a process of its own that gives blocks to other content while they are being read.

    python -m tests.contract.nixl_overwriter SECRET BLOCKS SESSIONS

Writes one line of JSON for each session's handle. Session number k consists of blocks that are filled with
``pattern(k, index)``. Every other session is withdrawn first, as an engine does; the rest are not, so that nothing
but the generations tells the consumer.
"""

from __future__ import annotations

import json
import random
import sys
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np

from tests.contract.peer import to_json
from tests.contract.transports import LARGE, make_pool
from triptych.transport.nixl_agent import NixlOptions
from triptych.transport.nixl_publisher import NixlPublisher

if TYPE_CHECKING:
    from triptych.transport.contract import SessionEvent


def pattern(session: int, index: int) -> int:
    """What a session's block is filled with, as uint64."""
    return session << 20 | index


def main(secret: str, blocks: int, sessions: int) -> None:
    pool = make_pool(LARGE, blocks, 1)
    words = pool.memory.view(np.uint64)

    def tell(session_id: str, event: SessionEvent) -> None:
        del session_id, event

    publisher = NixlPublisher(pool, uuid.uuid4().hex, tell, NixlOptions(secret.encode()))
    rng = random.Random(sessions)
    before: str | None = None
    for session in range(sessions):
        if before is not None and session % 2:
            publisher.withdraw(before)
        chosen = rng.sample(range(blocks), blocks // 2)
        for index, block in enumerate(chosen):
            pool.generations[block] += 1
            words[block] = pattern(session, index)
        if before is not None:
            publisher.withdraw(before)
        before = str(session)
        publisher.open(before)
        publisher.publish(before, chosen)
        sys.stdout.write(json.dumps(to_json(publisher.seal(before))) + "\n")
        sys.stdout.flush()
        if rng.random() < 0.2:  # time for one to be finished
            time.sleep(0.03)
        else:
            time.sleep(rng.uniform(0, 0.004))
    sys.stdin.readline()
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
