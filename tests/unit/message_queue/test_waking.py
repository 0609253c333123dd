"""Who sleeps is woken."""

from __future__ import annotations

import pytest

from tests.unit.message_queue.queues import LIMIT_S, Queues
from torchft_like.message_queue import MessageQueue


def test_no_wake_up_is_lost(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends fall asleep all the time: the ring holds one message, nobody watches before sleeping, and
    nobody looks again by himself."""
    for module in ("writer", "local"):
        monkeypatch.setattr(f"torchft_like.message_queue.{module}.RECHECK_S", 2 * LIMIT_S)
    writer, readers = queues.make(2, chunk_bytes=256, chunks=1)
    for end in (writer, *readers):
        monkeypatch.setattr(end._end._spin, "watch", lambda *_: False)
    count = 2000

    def read(reader: MessageQueue) -> list[object]:
        return [reader.dequeue(LIMIT_S) for _ in range(count)]

    found = [queues.run(read, reader) for reader in readers]
    for number in range(count):
        writer.enqueue(number, LIMIT_S)
    assert [one.result(LIMIT_S) for one in found] == [list(range(count))] * 2
