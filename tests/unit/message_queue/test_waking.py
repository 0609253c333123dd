"""Who sleeps is woken: once, in time, and again where he fell asleep again."""

from __future__ import annotations

import time

import pytest

from tests.unit.message_queue.queues import LIMIT_S, Queues
from torchft_like.message_queue import MessageQueue
from torchft_like.message_queue.ring import SLEEPING
from torchft_like.plain_data import dissect


def test_no_wake_up_is_lost(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends fall asleep all the time: the ring holds one message, nobody watches before sleeping, and
    nobody looks again by himself."""
    for module in ("writer", "local_reader"):
        monkeypatch.setattr(f"torchft_like.message_queue.{module}.RECHECK_S", 2 * LIMIT_S)
    writer, readers = queues.make(2, chunk_bytes=256, chunks=1)
    for end in (writer, *readers):
        monkeypatch.setattr(end._end._patience, "watch", lambda *_, **__: False)  # type: ignore[union-attr]
    count = 2000

    def read(reader: MessageQueue) -> list[object]:
        return [reader.dequeue(LIMIT_S) for _ in range(count)]

    found = [queues.run(read, reader) for reader in readers]
    for number in range(count):
        writer.enqueue(number, LIMIT_S)
    assert [one.result(LIMIT_S) for one in found] == [list(range(count))] * 2


def test_a_reader_woken_before_the_message_sleeps_again_and_is_woken_again(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message takes its time: it is ready only when the reader, announced to, is asleep once more."""
    monkeypatch.setattr("torchft_like.message_queue.local_reader.RECHECK_S", 2 * LIMIT_S)
    writer, (reader,) = queues.make()
    monkeypatch.setattr(writer._end._local, "_cores", 2)  # type: ignore[union-attr]
    sleeping = writer._end._local._members[0].words  # type: ignore[union-attr]

    def wait_for_sleep_after(earlier: int) -> int:
        deadline = time.monotonic() + LIMIT_S
        while (sleep := sleeping[SLEEPING]) <= earlier:
            assert time.monotonic() < deadline, f"the reader did not sleep after sleep {earlier}"
            time.sleep(0.001)
        return sleep

    def prepare(value: object) -> tuple[bytes, list[object]]:
        wait_for_sleep_after(asleep)
        return dissect(value)  # type: ignore[return-value]

    monkeypatch.setattr("torchft_like.message_queue.writer.dissect", prepare)
    found = queues.run(reader.dequeue, LIMIT_S)
    asleep = wait_for_sleep_after(0)
    writer.enqueue("at last", LIMIT_S)
    assert found.result(LIMIT_S) == "at last"


def test_readers_are_not_woken_early_where_they_outnumber_the_other_cores(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, readers = queues.make(2)
    audience = writer._end._local  # type: ignore[union-attr]
    strokes: list[str] = []
    monkeypatch.setattr("torchft_like.message_queue.audience._ring", lambda _: strokes.append("ring"))
    for reader in readers:
        reader._end._words[SLEEPING] = 1  # type: ignore[union-attr]
    monkeypatch.setattr(audience, "_cores", 2)
    audience.announce()
    assert not strokes
    monkeypatch.setattr(audience, "_cores", 3)
    audience.announce()
    audience.wake()
    assert strokes == ["ring"]  # one for both, and none again for the same sleep
