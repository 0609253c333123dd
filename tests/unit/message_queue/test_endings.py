"""Ends that are gone: what they left unread hides nothing that they said; forks leave their numbers alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import pytest

from tests.unit.message_queue.queues import LIMIT_S, Queues, wait_for
from torchft_like.errors import QueueClosedError, QueueTimeoutError
from torchft_like.message_queue import MessageQueue
from torchft_like.message_queue.local import WAKE
from torchft_like.runtime import long_waits

LONGER_THAN_THE_RING = b"x" * 100_000


def test_messages_longer_than_the_ring_are_read_though_the_writer_left_a_word_unread(queues: Queues) -> None:
    writer, (reader,) = queues.make()
    for _ in range(3):
        writer.enqueue(LONGER_THAN_THE_RING)
    reader._end._connection.send(WAKE)  # type: ignore[attr-defined] # what a reader says that gives room back
    writer.shutdown()
    assert [reader.dequeue() for _ in range(3)] == [LONGER_THAN_THE_RING] * 3
    with pytest.raises(QueueClosedError):
        reader.dequeue()


def test_a_reader_that_leaves_with_a_message_unread_has_left(queues: Queues) -> None:
    writer, (reader, _) = queues.make(2)
    writer.enqueue(LONGER_THAN_THE_RING)
    reader.shutdown()
    assert (writer.left_readers, writer.lost_readers) == ([0], [])


@pytest.mark.parametrize("leave", ["reader", "writer"])
def test_a_fork_closes_nothing_that_took_the_numbers_of_a_closed_end(queues: Queues, leave: str) -> None:
    writer, (reader,) = queues.make()
    _, (other,) = queues.make()
    before = set(os.listdir("/proc/self/fd"))
    {"reader": reader, "writer": writer}[leave].shutdown()
    freed = len(before) - len(os.listdir("/proc/self/fd"))
    assert freed > 0
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(freed + 2)]
    try:
        assert _in_a_fork(lambda: all(map(_is_open, others)) and other._end._is_closed)
    finally:
        for descriptor in others:
            os.close(descriptor)


def _in_a_fork(is_so: Callable[[], bool]) -> bool:
    if not (child := os.fork()):
        code = 1
        try:
            code = 0 if is_so() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("remote", [(), (0,)], ids=["local", "remote"])
def test_a_long_wait_is_logged_again_and_again_with_its_reason(
    queues: Queues, remote: Sequence[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, (reader,) = queues.make(remote=remote)
    monkeypatch.setattr(long_waits, "LONG_WAIT_S", 0.01)
    with caplog.at_level(logging.INFO), pytest.raises(QueueTimeoutError):
        reader.dequeue(0.5)
    assert sum("waiting for" in text and "the writer wrote nothing" in text for text in caplog.messages) > 1
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.raises(QueueTimeoutError):
        reader.dequeue(0.5, indefinite=True)
    assert caplog.messages == []
    with caplog.at_level(logging.INFO):
        assert isinstance(_error_of_filling(writer), QueueTimeoutError)
    assert any("no room: readers [0] have not read" in text for text in caplog.messages)


@pytest.mark.parametrize("remote", [(), (0,)], ids=["local", "remote"])
def test_an_end_is_closed_as_soon_as_a_call_says_so(queues: Queues, remote: Sequence[int]) -> None:
    _, (reader,) = queues.make(remote=remote)

    def read() -> bool:
        with pytest.raises(QueueClosedError):
            reader.dequeue()
        return reader.is_closed

    waiting = queues.run(read)
    wait_for(reader._end._lock.locked)
    reader.shutdown()
    assert waiting.result(LIMIT_S)


def _error_of_filling(writer: MessageQueue) -> Exception | None:
    for _ in range(1000):
        try:
            writer.enqueue(b"more than the reader takes", 0.5)
        except QueueTimeoutError as error:
            return error
    return None
