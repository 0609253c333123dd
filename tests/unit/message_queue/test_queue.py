"""A queue whose ends are threads of one process: what travels, what waits, what is said when it ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lighthouse.address import LOOPBACK
from tests.descriptors import left_open_since, open_descriptors
from tests.equality import same
from tests.faults import raising
from tests.forking import is_so_in_a_fork
from tests.unit.message_queue.queues import LIMIT_S, Queues
from tests.waiting import wait_for
from torchft_like.errors import (
    NotSupportedError,
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueError,
    QueueMemoryError,
    QueueReadersLostError,
    QueueTimeoutError,
    QueueWriterLostError,
)
from torchft_like.message_queue import MessageQueue
from torchft_like.message_queue.memory import available_bytes
from torchft_like.message_queue.queue import FILES_UNREAD_MAX, WAKE
from torchft_like.message_queue.ring import CONSUMED, PAGE_BYTES, SLEEPING
from torchft_like.runtime import long_waits

NEAR_AND_FAR = pytest.mark.parametrize("remote", [(), (0,)], ids=["local", "remote"])
VALUES = [
    None,
    {"step": 3, "nested": [1, (2.5, "x"), b"y"]},
    b"b" * 1000,
    b"c" * 5000,  # more than a slot
    "d" * 14_000,
    b"e" * 100_000,  # more than the ring
    list(range(30_000)),
    torch.arange(12, dtype=torch.int64).view(3, 4),
    torch.ones(2, dtype=torch.bfloat16),
    torch.empty(0, 5),
    torch.arange(20.0).view(4, 5).t(),
    torch.arange(100_000, dtype=torch.float64),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.zeros((0, 2)),
    [torch.ones(3000), np.ones(3000), b"f" * 9000, "g" * 9000, torch.tensor(True)],
]


@pytest.mark.parametrize("remote", [(), (1,)], ids=["local", "with a remote reader"])
def test_every_reader_gets_every_value(queues: Queues, remote: Sequence[int]) -> None:
    writer, readers = queues.make(2, remote=remote)
    for value in VALUES * 2:
        sent = queues.run(writer.enqueue, value, LIMIT_S)
        for reader in readers:
            assert same(reader.dequeue(LIMIT_S), value)
        sent.result(LIMIT_S)


def test_what_was_sent_and_what_was_received_share_no_memory(queues: Queues) -> None:
    writer, (reader, other) = queues.make(2)
    sent = {"t": torch.zeros(4), "a": np.zeros(4)}
    writer.enqueue(sent, LIMIT_S)
    sent["t"] += 1  # type: ignore[operator]
    sent["a"] += 1  # type: ignore[operator]
    first = reader.dequeue(LIMIT_S)
    first["t"] += 2  # type: ignore[index]
    first["a"] += 2  # type: ignore[index]
    second = other.dequeue(LIMIT_S)
    assert second["t"].sum() == 0  # type: ignore[index]
    assert second["a"].sum() == 0  # type: ignore[index]
    for _ in range(8):
        writer.enqueue(b"\xff" * 4000, LIMIT_S)
        reader.dequeue(LIMIT_S)
        other.dequeue(LIMIT_S)
    assert first["t"].tolist() == [2.0] * 4  # type: ignore[index]
    assert second["a"].tolist() == [0.0] * 4  # type: ignore[index]


def test_few_files_are_unread_at_any_time(queues: Queues) -> None:
    writer, (reader,) = queues.make(chunk_bytes=256, chunks=64)
    for number in range(FILES_UNREAD_MAX):
        writer.enqueue([number, b"x" * 20_000], LIMIT_S)
    with pytest.raises(QueueTimeoutError):
        writer.enqueue([99, b"x" * 20_000], 0.01)
    before = open_descriptors()
    found = [reader.dequeue(LIMIT_S) for _ in range(FILES_UNREAD_MAX)]
    assert [value[0] for value in found] == list(range(FILES_UNREAD_MAX))  # type: ignore[index]
    writer.enqueue([100, b"x" * 20_000], LIMIT_S)
    assert same(reader.dequeue(LIMIT_S), [100, b"x" * 20_000])
    assert not left_open_since(before)


def test_an_empty_queue_times_out(queues: Queues) -> None:
    writer, (reader,) = queues.make()
    with pytest.raises(QueueTimeoutError, match="wrote nothing"):
        reader.dequeue(0.01)
    with pytest.raises(QueueTimeoutError):
        reader.dequeue(0)
    writer.enqueue("late", LIMIT_S)
    assert reader.dequeue(0) == "late"


def test_a_value_that_does_not_travel_leaves_the_queue_as_it_was(queues: Queues) -> None:
    writer, (reader,) = queues.make()
    with pytest.raises(PlainDataError, match=r"\[1\] is a set"):
        writer.enqueue([1, {2}])
    writer.enqueue("next", LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "next"


@NEAR_AND_FAR
def test_shutdown_wakes_a_reader_that_waits(queues: Queues, remote: Sequence[int]) -> None:
    writer, (reader,) = queues.make(remote=remote)

    def read() -> bool:
        with pytest.raises(QueueClosedError, match="reader 0 has left"):
            reader.dequeue()
        return reader.is_closed

    waiting = queues.run(read)
    wait_for(reader._end._lock.locked)
    reader.shutdown()
    assert waiting.result(LIMIT_S), "it is closed as soon as a call says so"
    wait_for(lambda: writer.readers == [])
    assert writer.lost_readers == []  # it left in peace
    with pytest.raises(QueueReadersLostError):
        writer.enqueue("to nobody")


@NEAR_AND_FAR
def test_shutdown_wakes_a_writer_that_waits(queues: Queues, remote: Sequence[int]) -> None:
    writer, _ = queues.make(remote=remote)
    for number in range(4):
        writer.enqueue(number, LIMIT_S)
    waiting = queues.run(writer.enqueue, 4)
    closing = queues.run(writer.shutdown)
    with pytest.raises(QueueClosedError):
        waiting.result(LIMIT_S)
    for reader in _:
        reader.shutdown()
    closing.result(LIMIT_S)


@NEAR_AND_FAR
def test_a_writer_that_closes_wakes_a_reader_that_waits(queues: Queues, remote: Sequence[int]) -> None:
    writer, (reader,) = queues.make(remote=remote)
    waiting = queues.run(reader.dequeue)
    writer.shutdown()
    with pytest.raises(QueueClosedError, match="everything was read"):
        waiting.result(LIMIT_S)


def test_readers_that_have_not_come_are_named(queues: Queues) -> None:
    writer = MessageQueue(3, 2, connect_ip=LOOPBACK)
    with pytest.raises(QueueTimeoutError, match=r"local readers \[0, 1\] and 1 remote readers") as caught:
        writer.wait_until_ready(0.01)
    assert caught.value.ranks == (0, 1)
    reader = queues.join(writer, 0)
    with pytest.raises(QueueTimeoutError, match="did not let this reader in"):
        reader.wait_until_ready(0.01)
    writer.shutdown()
    with pytest.raises(QueueWriterLostError):
        reader.wait_until_ready(LIMIT_S)


def test_a_reader_that_comes_late_has_missed_nothing(queues: Queues) -> None:
    writer = MessageQueue(1, 1, None, 4096, 4)
    writer.enqueue("early", LIMIT_S)
    reader = queues.join(writer, 0)
    joined = queues.run(reader.wait_until_ready, LIMIT_S)
    writer.wait_until_ready(LIMIT_S)
    joined.result(LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "early"
    writer.shutdown()


@pytest.mark.parametrize("remote", [(), (0, 1)], ids=["local", "remote"])
def test_a_second_reader_of_one_rank_is_refused(queues: Queues, remote: Sequence[int]) -> None:
    writer, readers = queues.make(2, remote=remote)
    impostor = queues.join(writer, 1)
    refused = queues.run(impostor.wait_until_ready, LIMIT_S)
    wait_for(lambda: bool(writer.readers) and refused.done())
    with pytest.raises(QueueError, match="joined already"):
        refused.result(LIMIT_S)
    with pytest.raises(QueueClosedError, match="reader 1 has left"):
        impostor.dequeue(LIMIT_S)
    writer.enqueue("x", LIMIT_S)
    assert [reader.dequeue(LIMIT_S) for reader in readers] == ["x", "x"]


def test_who_does_not_know_the_token_gets_nothing(queues: Queues) -> None:
    writer = MessageQueue(2, 1, connect_ip=LOOPBACK)
    forged = {**writer.export_handle(), "token": bytes(32)}
    local = MessageQueue.create_from_handle(forged, 0)
    remote = MessageQueue.create_from_handle(forged, 1)
    with pytest.raises(QueueTimeoutError):
        writer.wait_until_ready(0.1)
    with pytest.raises(QueueError, match="token"):
        local.wait_until_ready(LIMIT_S)
    with pytest.raises(QueueTimeoutError):
        remote.wait_until_ready(0.1)
    for queue in (local, remote, writer):
        queue.shutdown()


def test_who_does_not_know_the_key_gets_no_connection() -> None:
    writer = MessageQueue(1, 0, connect_ip=LOOPBACK)
    stranger = MessageQueue.create_from_handle({**writer.export_handle(), "server_key": b"x" * 40}, 0)
    with pytest.raises((QueueWriterLostError, QueueTimeoutError)):
        stranger.wait_until_ready(1)
    assert writer.readers == []
    stranger.shutdown()
    writer.shutdown()


def test_a_reader_that_writes_nonsense_into_its_page_is_evicted(queues: Queues) -> None:
    writer, (hostile, honest) = queues.make(2)
    hostile._end._words[CONSUMED] = 2**63  # type: ignore[attr-defined]
    for number in range(12):
        writer.enqueue(number, LIMIT_S)
        assert honest.dequeue(LIMIT_S) == number
    assert writer.lost_readers == [0]
    assert writer.readers == [1]
    # What is gone for the hostile one is its connection: it reads what the ring still holds, at the most.
    with pytest.raises((QueueWriterLostError, QueueCorruptError)):
        _read_all(hostile)


def test_a_full_wake_up_counter_keeps_nobody_asleep(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.message_queue.queue.RECHECK_S", 2 * LIMIT_S)
    writer, (hostile, honest) = queues.make(2)
    for number in range(3):
        os.eventfd_write(hostile._end._wake_up, 2**64 - 2)  # type: ignore[attr-defined]
        waiting = queues.run(honest.dequeue, LIMIT_S)
        wait_for(lambda: honest._end._words[SLEEPING] > 0)  # type: ignore[attr-defined]
        writer.enqueue(number, LIMIT_S)
        assert waiting.result(LIMIT_S) == number
        hostile.dequeue(LIMIT_S)
        os.eventfd_read(hostile._end._wake_up)  # type: ignore[attr-defined]


def _read_all(reader: MessageQueue) -> None:
    while True:
        reader.dequeue(LIMIT_S)


@pytest.mark.parametrize("at", [0, 8, 16, 20, 24, 64, 70], ids=lambda at: f"byte {at}")
def test_a_damaged_message_is_an_error_and_the_reader_leaves(queues: Queues, at: int) -> None:
    writer, (reader, other) = queues.make(2)
    writer.enqueue({"a": [1, 2, 3]}, LIMIT_S)
    assert other.dequeue(LIMIT_S) == {"a": [1, 2, 3]}
    writer._end._memory[PAGE_BYTES + at] ^= 0x55  # type: ignore[attr-defined]
    with pytest.raises(QueueCorruptError, match="reader 0 has left"):
        reader.dequeue(LIMIT_S)
    with pytest.raises(QueueClosedError):
        reader.dequeue(LIMIT_S)
    for number in range(8):
        writer.enqueue(number, LIMIT_S)
        assert other.dequeue(LIMIT_S) == number


def test_each_end_does_its_own_part_only(queues: Queues) -> None:
    writer, (reader,) = queues.make()
    with pytest.raises(NotSupportedError, match="writer's end"):
        writer.dequeue()
    for call in (lambda: reader.enqueue(1), lambda: reader.readers, lambda: reader.lost_readers):
        with pytest.raises(NotSupportedError, match="reader's end"):
            call()
    assert writer.is_writer
    assert not reader.is_writer


@pytest.mark.parametrize("n_local", [0, 1], ids=["remote", "local"])
@pytest.mark.parametrize("rank", [-1, "0", None, 0.0, False, 2**31, 2**33], ids=str)
def test_what_is_no_rank_is_a_value_error_and_leaves_nothing(n_local: int, rank: object) -> None:
    with MessageQueue(1, n_local, connect_ip=LOOPBACK) as writer:
        before = open_descriptors()
        with pytest.raises(ValueError, match="no rank of a reader"):
            MessageQueue.create_from_handle(writer.export_handle(), rank)  # type: ignore[arg-type]
        assert not left_open_since(before)
    with pytest.raises(ValueError, match="distinct ranks"):
        MessageQueue(1, 1, local_reader_ranks=[rank])  # type: ignore[list-item]


def test_a_ring_for_which_there_is_no_memory_is_refused_and_leaves_nothing() -> None:
    before = open_descriptors()
    with pytest.raises(QueueMemoryError, match="are missing"):
        MessageQueue(1, 1, None, available_bytes() // 16 + 2**30, 16)
    assert not left_open_since(before)


def test_nothing_is_left_of_queues_that_were_shut_down(queues: Queues) -> None:
    def use(remote: Sequence[int]) -> None:
        made = Queues()
        writer, readers = made.make(2, remote=remote)
        for value in (1, b"x" * 100_000):
            writer.enqueue(value, LIMIT_S)
            for reader in readers:
                reader.dequeue(LIMIT_S)
        made.close()

    use([1])  # what is made once per process
    before = open_descriptors(), set(threading.enumerate())
    for _ in range(10):
        use([])
        use([1])
    assert not left_open_since(before[0])
    assert set(threading.enumerate()) <= before[1]


def test_a_program_that_is_started_gets_no_descriptor_of_a_queue(queues: Queues) -> None:
    before = open_descriptors()
    queues.make(2, remote=[1])
    opened = open_descriptors() - before
    assert opened
    assert not any(os.get_inheritable(int(number)) for number, *_ in opened)


def test_a_queue_that_is_dropped_is_shut_down(queues: Queues) -> None:
    dropped = MessageQueue(1, 1)
    handle, reader = dropped.export_handle(), queues.join(dropped, 0)
    del dropped
    with pytest.raises(QueueWriterLostError):
        reader.wait_until_ready(LIMIT_S)
    with pytest.raises(QueueWriterLostError, match="finds no writer"):
        MessageQueue.create_from_handle(handle, 0)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["assembled", "LocalReader._free"])
@pytest.mark.parametrize("size", [100, 100_000], ids=["inline", "in a file"])
def test_a_reader_interrupted_while_it_reads_reads_the_message_once_more(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str, size: int
) -> None:
    writer, (reader,) = queues.make()
    before = open_descriptors()
    for number in range(3):
        writer.enqueue([number, b"x" * size], LIMIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(f"torchft_like.message_queue.queue.{where}", raising(error))
            with pytest.raises(error):
                reader.dequeue(LIMIT_S)
        assert same(reader.dequeue(LIMIT_S), [number, b"x" * size])
        assert not left_open_since(before)


@pytest.mark.parametrize("is_corrupt", [True, False], ids=["leaves", "shuts down"])
def test_a_reader_that_ends_before_it_has_read_leaves_no_file(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, is_corrupt: bool
) -> None:
    error = QueueCorruptError if is_corrupt else MemoryError
    before = open_descriptors()
    made = Queues()
    writer, (reader,) = made.make()
    open_then = open_descriptors()
    for number in range(3):
        writer.enqueue([number, b"x" * 100_000], LIMIT_S)
    monkeypatch.setattr("torchft_like.message_queue.queue.assembled", raising(error("no message")))
    with pytest.raises(error):
        reader.dequeue(LIMIT_S)
    assert len(open_descriptors() - open_then) == (not is_corrupt)
    made.close()
    assert not left_open_since(before)


def test_a_writer_interrupted_as_it_writes_is_lost(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, (reader,) = queues.make()
    monkeypatch.setattr(writer._end._local, "wake", raising(KeyboardInterrupt))  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        writer.enqueue("who knows who has it", LIMIT_S)
    with pytest.raises(QueueClosedError):
        writer.enqueue("more", LIMIT_S)
    assert writer.lost_readers == []
    with pytest.raises(QueueClosedError):
        assert writer.readers
    with pytest.raises(QueueClosedError):
        writer.wait_until_ready(LIMIT_S)
    writer.shutdown()
    assert writer.lost_readers == []
    assert reader.dequeue(LIMIT_S) == "who knows who has it"
    with pytest.raises(QueueWriterLostError):
        reader.dequeue(LIMIT_S)


def test_a_file_is_not_taken_for_an_interrupted_one(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, (reader,) = queues.make()
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(writer._end, "_write", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.enqueue(b"a" * 100_000, LIMIT_S)
    assert reader._end._hear()  # type: ignore[attr-defined]  # as it does before it sleeps
    writer.enqueue(b"b" * 100_000, LIMIT_S)
    assert reader.dequeue(LIMIT_S) == b"b" * 100_000
    assert not left_open_since(before)


# Where what is read arrives.


@NEAR_AND_FAR
def test_tensors_arrive_on_the_cpu_whatever_the_default_is(queues: Queues, remote: tuple[int, ...]) -> None:
    writer, (reader,) = queues.make(remote=remote)
    sent = [torch.arange(3), torch.empty(0, 3), b"c" * 5000]
    with torch.device("meta"):
        writer.enqueue(sent, LIMIT_S)
        found = reader.dequeue(LIMIT_S)
    assert same(found, sent)
    assert [tensor.device.type for tensor in found[:2]] == ["cpu", "cpu"]  # type: ignore[index]


# Who sleeps is woken.


def test_no_wake_up_is_lost(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends fall asleep all the time: the ring holds one message, nobody watches before sleeping, and
    nobody looks again by himself."""
    monkeypatch.setattr("torchft_like.message_queue.queue.RECHECK_S", 2 * LIMIT_S)
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


# Readers that have no time to wait, and look again and again.


def is_answered(call: Callable[..., object], answers: list[object]) -> Callable[[], bool]:
    """Whether it has no need to wait; its answer is kept."""

    def look() -> bool:
        try:
            answers.append(call(timeout=0))
        except QueueTimeoutError:
            return False
        return True

    return look


@NEAR_AND_FAR
def test_a_reader_that_only_looks_joins_and_reads(queues: Queues, remote: Sequence[int]) -> None:
    writer = queues.keep(MessageQueue(1, 1 - len(remote), connect_ip=LOOPBACK))
    reader = queues.join(writer, 0)
    joining = queues.run(writer.wait_until_ready, LIMIT_S)
    answers: list[object] = []
    wait_for(is_answered(reader.wait_until_ready, answers))
    joining.result(LIMIT_S)
    writer.enqueue("a", LIMIT_S)
    wait_for(is_answered(reader.dequeue, answers))
    assert answers == [None, "a"]


@NEAR_AND_FAR
def test_a_reader_that_only_looks_hears_of_a_lost_writer(queues: Queues, remote: Sequence[int]) -> None:
    writer, (reader,) = queues.make(1, remote=remote)
    writer.enqueue("read before that", LIMIT_S)
    writer._end._is_broken = True  # type: ignore[attr-defined]
    if writer._end._remote is not None:  # type: ignore[attr-defined]
        writer._end._remote._readers.clear()  # type: ignore[attr-defined]
    writer.shutdown()  # without a word, as one that is killed
    wait_for(is_answered(reader.dequeue, []))
    with pytest.raises(QueueWriterLostError):
        wait_for(is_answered(reader.dequeue, []))


# Numbers that make no sense.


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, 0),
        (1, 2),
        (5000, 1),
        (1, 1, None, 100),
        (1, 1, None, 2**41),
        (1, 1, None, 4096, 0),
        (1, 1, None, 256, 2**20 + 1),
        (1, 1, None, 1e4),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_value_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"local|max_chunk"):
        MessageQueue(*arguments)


def test_ranks_and_timeouts_that_make_no_sense_are_value_errors(queues: Queues) -> None:
    with pytest.raises(ValueError, match="distinct"):
        MessageQueue(2, 2, local_reader_ranks=[1, 1])
    writer, (reader,) = queues.make()
    for timeout in (-1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            reader.dequeue(timeout)
        with pytest.raises(ValueError, match="timeout"):
            writer.enqueue(1, timeout)
    with pytest.raises(ValueError, match="no local reader"):
        MessageQueue.create_from_handle(writer.export_handle(), 5)


# Ends that are gone: what they left unread hides nothing that they said; forks leave their numbers alone.


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
        assert is_so_in_a_fork(lambda: all(map(_is_open, others)) and other._end._is_closed)
    finally:
        for descriptor in others:
            os.close(descriptor)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@NEAR_AND_FAR
def test_a_long_wait_is_logged_again_and_again_with_its_reason(
    queues: Queues, remote: Sequence[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, (reader,) = queues.make(remote=remote)
    monkeypatch.setattr(long_waits, "LONG_WAIT_S", 0.01)

    def said(reason: str) -> int:
        return sum("waiting for" in text and reason in text for text in caplog.messages)

    with caplog.at_level(logging.INFO):
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(0.5, indefinite=True)
        assert not said("the writer wrote nothing")
        reading = queues.run(reader.dequeue, LIMIT_S)
        wait_for(lambda: said("the writer wrote nothing") > 1)
        writer.enqueue("read", LIMIT_S)
        assert reading.result(LIMIT_S) == "read"
        for number in range(4):
            writer.enqueue(number, LIMIT_S)
        writing = queues.run(writer.enqueue, "no room", LIMIT_S)
        wait_for(lambda: said("no room: readers [0] have not read"))
        assert reader.dequeue(LIMIT_S) == 0
        writing.result(LIMIT_S)
