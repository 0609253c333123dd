"""What the two ends of a remote connection make of nonsense from the other."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from lighthouse.address import LOOPBACK, parse_address
from tests.descriptors import descriptors_left, left_open_since, open_descriptors
from tests.equality import same
from tests.faults import raising
from tests.unit.message_queue.queues import LIMIT_S, Queues
from tests.waiting import wait_for
from torchft_like.errors import (
    QueueClosedError,
    QueueCorruptError,
    QueueDescriptorsError,
    QueueError,
    QueueMemoryError,
    QueueTimeoutError,
    QueueWriterLostError,
)
from torchft_like.message_queue import MessageQueue
from torchft_like.message_queue import remote as remote_ends
from torchft_like.message_queue.remote import (
    HELLO,
    NUMBERED,
    TAG_CLOSED,
    TAG_DATA,
    TAG_HELLO,
    TAG_LEAVE,
    TAG_READ,
    RemoteReader,
    RemoteReaders,
)
from torchft_like.plain_data import dissect
from torchft_like.testing.relay import Relay


@contextlib.contextmanager
def stranger(writer: MessageQueue) -> Iterator[zmq.Socket[bytes]]:
    """A socket that has the key, and so a connection."""
    handle: Any = writer.export_handle()
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, handle["server_key"])
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.connect(handle["address"])
        yield dealer


def test_remote_readers_find_a_host_that_knows_its_own_name_as_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian has it so (127.0.1.1); the address is that of the default route."""
    monkeypatch.delenv("TORCHFT_HOSTNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-3")
    monkeypatch.setattr("torchft_like.runtime.hosts.source_towards", lambda *_: LOOPBACK)
    monkeypatch.setattr("torchft_like.runtime.hosts._outer_address", lambda: "127.0.0.2")
    with MessageQueue(1, 0) as writer:
        handle: Any = writer.export_handle()
        assert handle["address"].startswith("tcp://127.0.0.2:")


def test_a_connection_that_says_nonsense_disturbs_nobody(queues: Queues) -> None:
    writer, (reader, remote) = queues.make(2, remote=[1])
    token: Any = writer.export_handle()["token"]
    with stranger(writer) as dealer:
        for said in (b"", b"H", b"?" * 500, NUMBERED.pack(TAG_READ, 2**60), TAG_LEAVE):
            dealer.send(said)
        dealer.send_multipart([b"several", b"parts"])
        dealer.send(HELLO.pack(TAG_HELLO, bytes(32), 1))
        dealer.send(HELLO.pack(TAG_HELLO, token, 1))  # knows everything, and comes too late
        refused: list[bytes] = []
        wait_for(lambda: bool(writer.readers) and _heard(dealer, refused))
        assert b"joined already" in refused[0]
        for number in range(6):
            writer.enqueue(number, LIMIT_S)
            assert [end.dequeue(LIMIT_S) for end in (reader, remote)] == [number, number]
        dealer.send(b"!" * 100_000)  # longer than anything a reader says: the end of the connection
        writer.enqueue("after", LIMIT_S)
        assert remote.dequeue(LIMIT_S) == "after"
    assert writer.readers == [0, 1]
    assert writer.lost_readers == []


def test_a_connection_without_the_key_is_closed(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    configure = remote_ends._configure

    def impatient(end: zmq.Socket[bytes]) -> None:
        configure(end)
        end.setsockopt(zmq.HANDSHAKE_IVL, 2000)

    monkeypatch.setattr(remote_ends, "_configure", impatient)
    writer, (remote,) = queues.make(1, remote=[0])
    handle: Any = writer.export_handle()
    place = parse_address(handle["address"].removeprefix("tcp://"))
    with socket.create_connection((place.host, place.port), LIMIT_S) as silent:
        while silent.recv(100):  # ZeroMQ greets everybody
            pass
    writer.enqueue("after", LIMIT_S)
    assert remote.dequeue(LIMIT_S) == "after"


def _heard(dealer: zmq.Socket[bytes], found: list[bytes]) -> bool:
    with contextlib.suppress(zmq.Again):
        found.append(dealer.recv(zmq.NOBLOCK))
    return bool(found)


def test_a_reader_that_has_read_what_was_never_written_is_evicted(queues: Queues) -> None:
    writer, (reader, hostile) = queues.make(2, remote=[1])
    hostile._end._tell(NUMBERED.pack(TAG_READ, 7))  # type: ignore[attr-defined]
    wait_for(lambda: writer.lost_readers == [1])
    writer.enqueue("on", LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "on"


@pytest.mark.parametrize("last", [b"into the silence", bytes(2**26)], ids=["short", "longer than buffers"])
def test_a_silent_connection_is_over_for_both(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    """Nobody hangs up: from one moment on nothing that either says arrives."""
    monkeypatch.setattr("torchft_like.message_queue.remote.SILENCE_S", 2.0)
    flows = threading.Event()
    flows.set()

    def carry(data: bytes) -> bytes:
        flows.wait()
        return data

    writer = queues.keep(MessageQueue(2, 1, connect_ip=LOOPBACK))
    handle = writer.export_handle()
    port = int(str(handle["address"]).rpartition(":")[2])
    relay = Relay(("127.0.0.1", port), lambda: carry, carry)
    near = queues.join(writer, 0)
    handle["address"] = f"tcp://127.0.0.1:{relay.port}"
    far = queues.keep(MessageQueue.create_from_handle(handle, 1))
    ready = [queues.run(end.wait_until_ready, LIMIT_S) for end in (writer, near, far)]
    for one in ready:
        one.result(LIMIT_S)
    writer.enqueue("before", LIMIT_S)
    assert [near.dequeue(LIMIT_S), far.dequeue(LIMIT_S)] == ["before"] * 2
    flows.clear()
    try:
        writer.enqueue(last, LIMIT_S)
        with pytest.raises(QueueWriterLostError):
            far.dequeue(LIMIT_S)
        wait_for(lambda: writer.lost_readers == [1])
        writer.enqueue("after", LIMIT_S)
        assert [near.dequeue(LIMIT_S) for _ in range(2)] == [last, "after"]
    finally:
        flows.set()


def test_a_connection_that_fails_at_once_is_lost(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = RemoteReader._connect

    def connect_in_vain(reader: RemoteReader, address: str, server_key: bytes) -> None:
        connect(reader, address, server_key)
        assert reader._monitor.poll(int(LIMIT_S) * 1000)

    monkeypatch.setattr(RemoteReader, "_connect", connect_in_vain)
    handle = {**queues.keep(MessageQueue(1, 0, connect_ip=LOOPBACK)).export_handle(), "server_key": b"x" * 40}
    reader = queues.keep(MessageQueue.create_from_handle(handle, 0))
    with pytest.raises(QueueWriterLostError):
        reader.wait_until_ready(LIMIT_S)


STRUCTURE, LEAVES = dissect({"t": torch.ones(3)})
LEAF = b"\x00" * 12
MESSAGES = {
    "no number": [b"", STRUCTURE, LEAF],
    "another number": [NUMBERED.pack(TAG_DATA, 5), STRUCTURE, LEAF],
    "another tag": [NUMBERED.pack(b"?", 0), STRUCTURE, LEAF],
    "no structure": [NUMBERED.pack(TAG_DATA, 0)],
    "a damaged structure": [NUMBERED.pack(TAG_DATA, 0), STRUCTURE[:-1], LEAF],
    "a leaf too few": [NUMBERED.pack(TAG_DATA, 0), STRUCTURE],
    "a leaf too many": [NUMBERED.pack(TAG_DATA, 0), STRUCTURE, LEAF, LEAF],
    "a leaf too short": [NUMBERED.pack(TAG_DATA, 0), STRUCTURE, LEAF[:-1]],
    "a goodbye too early": [NUMBERED.pack(TAG_CLOSED, 3)],
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_what_is_no_message_is_an_error_for_the_reader(queues: Queues, message: list[bytes]) -> None:
    writer, (reader,) = queues.make(remote=[0])
    writer._end._remote.send(message)  # type: ignore[attr-defined]
    with pytest.raises(QueueCorruptError, match="reader 0 has left"):
        reader.dequeue(LIMIT_S)
    with pytest.raises(QueueClosedError):
        reader.dequeue(LIMIT_S)
    wait_for(lambda: writer.readers == [])


def test_the_message_that_those_are_made_of_is_one(queues: Queues) -> None:
    writer, (reader,) = queues.make(remote=[0])
    assert dissect({"t": torch.ones(3)})[0] == STRUCTURE
    writer._end._remote.send([NUMBERED.pack(TAG_DATA, 0), STRUCTURE, LEAF])  # type: ignore[attr-defined]
    assert reader.dequeue(LIMIT_S)["t"].tolist() == [0.0] * 3  # type: ignore[index]


@pytest.mark.parametrize("host", ["no-such-host", "256.1.1.1", "192.0.2.1", "a b"])
def test_a_host_that_is_not_of_this_machine_is_a_value_error(host: str) -> None:
    with pytest.raises(ValueError, match="no address of this machine"):
        MessageQueue(1, 0, connect_ip=host)


@pytest.mark.parametrize("wrong", [{"address": "nowhere"}, {"server_key": b"short"}], ids=str)
def test_a_handle_with_an_unusable_address_or_key_is_a_value_error(wrong: dict[str, object]) -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        before = open_descriptors()
        with pytest.raises(ValueError, match="handle"):
            MessageQueue.create_from_handle({**writer.export_handle(), **wrong}, 0)
        assert not left_open_since(before)


def test_who_has_read_all_holds_no_writer_up(queues: Queues, caplog: pytest.LogCaptureFixture) -> None:
    writer, (reader,) = queues.make(remote=[0])
    writer.enqueue("all", LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "all"
    queues.run(writer.shutdown, 10 * LIMIT_S).result(LIMIT_S)  # the reader looks elsewhere all the time
    assert _connection_has_ended(reader)
    assert not caplog.records
    with pytest.raises(QueueClosedError, match="everything was read"):
        reader.dequeue(LIMIT_S)


def test_who_has_read_all_and_found_the_goodbye_is_not_lost(
    queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    writer, (quick, slow) = queues.make(2, remote=[0, 1])
    writer.enqueue("all", LIMIT_S)
    assert quick.dequeue(LIMIT_S) == "all"
    closing = queues.run(writer.shutdown, LIMIT_S)
    with pytest.raises(QueueClosedError):
        quick.dequeue(LIMIT_S)
    quick.shutdown()
    watched = writer._end._remote  # type: ignore[attr-defined]
    wait_for(lambda: watched.ranks == [1])
    assert slow.dequeue(LIMIT_S) == "all"
    closing.result(LIMIT_S)
    assert (writer.lost_readers, caplog.records) == ([], [])


def test_what_came_before_the_end_can_be_read(queues: Queues, caplog: pytest.LogCaptureFixture) -> None:
    writer, (reader,) = queues.make(remote=[0])
    for number in range(3):
        writer.enqueue(number, LIMIT_S)
    writer.shutdown(timeout=0)
    assert "remote reader 0 had not read all" in caplog.text
    assert _connection_has_ended(reader)
    assert [reader.dequeue(LIMIT_S) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(QueueClosedError, match="everything was read"):
        reader.dequeue(LIMIT_S)


def _connection_has_ended(reader: MessageQueue) -> bool:
    return bool(reader._end._monitor.poll(int(LIMIT_S) * 1000))  # type: ignore[attr-defined]


def test_an_interrupted_farewell_leaves_nothing(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    queues.make(remote=[0])  # what is made once per process
    before = open_descriptors()
    writer, (reader,) = queues.make(remote=[0])
    writer.enqueue("unread", LIMIT_S)
    monkeypatch.setattr(RemoteReaders, "_behind", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer.shutdown()
    assert reader.dequeue(LIMIT_S) == "unread"
    reader.shutdown()
    assert not left_open_since(before)


# What is said where no file descriptor, or no memory, is left.


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
    writer = queues.keep(MessageQueue(1, 1))
    reader = queues.join(writer, 0)
    writer.wait_until_ready(LIMIT_S)
    monkeypatch.setattr("torchft_like.message_queue.queue.map_received", raising(failure))
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


def test_a_reader_without_a_connection_is_told_so() -> None:
    writer = MessageQueue(1, 0, [], 4096, 4, LOOPBACK)
    with writer, socket.create_server((LOOPBACK, 0)) as silent:
        gone = {**writer.export_handle(), "address": f"tcp://{LOOPBACK}:{silent.getsockname()[1]}"}
        with MessageQueue.create_from_handle(gone, 0) as reader:
            with pytest.raises(QueueTimeoutError, match="there is no connection to the writer yet"):
                reader.wait_until_ready(0.2)
            silent.close()
            with pytest.raises(QueueWriterLostError, match="there is no connection to the writer: check"):
                reader.wait_until_ready(LIMIT_S)
