"""What is said where no file descriptor, or no memory, is left."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.descriptors import descriptors_left, left_open_since, open_descriptors
from tests.equality import same
from tests.unit.message_queue.queues import LIMIT_S, Queues
from torchft_like.errors import QueueClosedError, QueueDescriptorsError, QueueError, QueueMemoryError
from torchft_like.message_queue import MessageQueue

LARGE_BYTES = 72 * 1024 * 1024  # more than the C library finds in what it has reserved for threads


@contextlib.contextmanager
def memory_left(nbytes: int) -> Iterator[None]:
    """So much can still be mapped, and no `LARGE_BYTES` be found in what others have given back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, hard))
    holes = []
    try:
        with contextlib.suppress(MemoryError):
            while True:
                holes.append(np.empty(LARGE_BYTES, np.uint8))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def shortages(act: Callable[[], object]) -> int:
    """Return with how many free descriptors `act` succeeds; with fewer it says so and leaves nothing."""
    for count in range(60):
        if not is_short(act, count):
            return count
        before = open_descriptors()  # with what the first failure opened once for the whole process
        assert is_short(act, count)
        assert not left_open_since(before)
    raise AssertionError("it never succeeds")


def is_short(act: Callable[[], object], count: int) -> bool:
    """Return whether `act` fails for want of descriptors where `count` are free."""
    try:
        with descriptors_left(count):
            act()
    except QueueDescriptorsError as error:
        said = str(error)
    else:
        return False
    assert "limit of open files" in said
    return True


def test_a_shortage_of_descriptors_is_said_and_leaves_nothing(queues: Queues) -> None:
    assert shortages(lambda: queues.keep(MessageQueue(2, 2))) > 5
    known = queues.keep(MessageQueue(1, 1)).export_handle()
    assert shortages(lambda: queues.keep(MessageQueue.create_from_handle(known, 0))) == 3
    writer, (reader,) = queues.make()
    assert shortages(lambda: writer.enqueue(b"x" * 100_000, LIMIT_S)) == 1
    assert reader.dequeue(LIMIT_S) == b"x" * 100_000


@pytest.mark.parametrize("join", [MessageQueue.wait_until_ready, MessageQueue.dequeue])
def test_a_reader_without_descriptors_for_the_memory_leaves_the_queue(
    queues: Queues, join: Callable[[MessageQueue, float], object]
) -> None:
    """It needs three for what it receives, and one for each of two mappings."""
    needed = 5
    writer = queues.keep(MessageQueue(needed + 1, needed + 1))
    readers = [queues.join(writer, rank) for rank in range(needed + 1)]
    writer.wait_until_ready(LIMIT_S)
    writer.enqueue("first", LIMIT_S)
    for left, reader in enumerate(readers[:needed]):
        with descriptors_left(left), pytest.raises(QueueDescriptorsError, match="limit of open files"):
            join(reader, LIMIT_S)
        with pytest.raises(QueueClosedError, match="has left"):
            reader.dequeue(LIMIT_S)
    with descriptors_left(needed):
        join(readers[needed], LIMIT_S)
    writer.enqueue("second", LIMIT_S)
    assert writer.readers == [needed]
    assert readers[needed].dequeue(LIMIT_S) == ("second" if join is MessageQueue.dequeue else "first")


def test_a_reader_without_a_descriptor_for_a_message_leaves_the_queue(queues: Queues) -> None:
    writer, (reader,) = queues.make()
    for _ in range(2):
        writer.enqueue(b"x" * 100_000, LIMIT_S)
    assert reader.dequeue(LIMIT_S) == b"x" * 100_000
    with descriptors_left(0), pytest.raises(QueueDescriptorsError, match="limit of open files"):
        reader.dequeue(LIMIT_S)
    _has_left(writer, reader)


def test_a_reader_without_memory_for_the_ring_leaves_the_queue(queues: Queues) -> None:
    writer = queues.keep(MessageQueue(1, 1, None, 1024 * 1024, 64))
    reader = queues.join(writer, 0)
    writer.wait_until_ready(LIMIT_S)
    with memory_left(16 * 1024 * 1024), pytest.raises(QueueMemoryError, match="mapping the writer's memory"):
        reader.wait_until_ready(LIMIT_S)
    _has_left(writer, reader)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(OSError(errno.ENOSPC, "no watches"), QueueError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["the system", "Ctrl-C"],
)
def test_a_reader_whom_something_keeps_from_the_memory_leaves_the_queue(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, failure: BaseException, told: type[BaseException]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    writer = queues.keep(MessageQueue(1, 1))
    reader = queues.join(writer, 0)
    writer.wait_until_ready(LIMIT_S)
    monkeypatch.setattr("torchft_like.message_queue.queue.map_received", fail)
    with pytest.raises(told):
        reader.wait_until_ready(LIMIT_S)
    _has_left(writer, reader)


def _has_left(writer: MessageQueue, reader: MessageQueue) -> None:
    with pytest.raises(QueueClosedError, match="has left"):
        reader.dequeue(LIMIT_S)
    assert writer.left_readers == [0]


def test_a_writer_without_descriptors_for_its_readers_says_so_and_lets_them_in_later(queues: Queues) -> None:
    writer = queues.keep(MessageQueue(2, 2, None, 4096, 4))
    readers = [queues.join(writer, rank) for rank in range(2)]
    with descriptors_left(0):
        with pytest.raises(QueueDescriptorsError, match="limit of open files"):
            writer.wait_until_ready(LIMIT_S)
        assert writer.readers == []
        for number in range(4):
            writer.enqueue(number, LIMIT_S)
        with pytest.raises(QueueDescriptorsError, match="limit of open files"):
            writer.enqueue("no room before they have come", LIMIT_S)
    writer.wait_until_ready(LIMIT_S)
    for reader in readers:
        assert [reader.dequeue(LIMIT_S) for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["in the ring", "in a file", "from another machine"])
@pytest.mark.parametrize(
    "make",
    [lambda: torch.arange(LARGE_BYTES // 8), lambda: np.arange(LARGE_BYTES // 8), lambda: b"x" * LARGE_BYTES],
    ids=["tensor", "array", "bytes"],
)
def test_a_message_too_large_is_read_later(queues: Queues, where: str, make: Callable[[], object]) -> None:
    remote = [0] if where == "from another machine" else []
    writer, (reader,) = queues.make(
        chunk_bytes=1024 * 1024, chunks=80 if where == "in the ring" else 8, remote=remote
    )
    large = make()
    writer.enqueue(large, LIMIT_S)
    writer.enqueue("next", LIMIT_S)
    if remote:
        assert reader._end._dealer.poll(int(LIMIT_S) * 1000)  # type: ignore[attr-defined]
    with memory_left(LARGE_BYTES // 3), pytest.raises(QueueMemoryError, match="a copy of the message"):
        reader.dequeue(LIMIT_S)
    assert same(reader.dequeue(LIMIT_S), large)
    assert reader.dequeue(LIMIT_S) == "next"
