"""The ring over plain memory: what a writer writes is what a reader reads, and nothing else is believed."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest

from tests.forking import is_so_in_a_fork
from tests.unit.message_queue.queues import LIMIT_S
from torchft_like.errors import QueueCorruptError, QueueError, QueueMemoryError, QueueTimeoutError
from torchft_like.message_queue import memory, ring
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.message_queue.leaves import file_of, reading_ring
from torchft_like.message_queue.memory import map_received, reserve, seal
from torchft_like.message_queue.queue import CALLERS_MAX, HELLO_S_MAX, JoinListener, call
from torchft_like.message_queue.ring import (
    INLINE,
    PAGE_BYTES,
    PUBLISHED,
    RECORD_BYTES,
    Geometry,
    RingReader,
    RingWriter,
)


class Pair:
    """Both ends on the same memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.geometry = Geometry(slots, slot_bytes)
        self.memory = bytearray(self.geometry.memory_bytes)
        self.writer = RingWriter(memoryview(self.memory), self.geometry)
        self.reader = RingReader(memoryview(self.memory), self.geometry)

    def write(self, *parts: bytes) -> None:
        nbytes = sum(map(len, parts))
        self.writer.write(INLINE, parts, nbytes, self.geometry.slots_for(nbytes))

    def read(self) -> bytes:
        place, nbytes, structure_bytes, slots, _ = self.reader.next_record()
        leaves = bytearray(nbytes - structure_bytes)
        structure = self.reader.read(place, structure_bytes)
        reading_ring(self.reader, place + structure_bytes)(memoryview(leaves))
        self.reader.consumed += slots
        return structure + bytes(leaves)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 256), (3, 256), (7, 320), (2, 64 * 1024)])
def test_messages_of_every_size_come_out_as_they_went_in(slots: int, slot_bytes: int) -> None:
    pair, luck = Pair(slots, slot_bytes), random.Random(1)
    most = slots * slot_bytes - RECORD_BYTES
    for length in [0, 1, most, most - 1, *(luck.randint(0, most) for _ in range(200))]:
        message = luck.randbytes(length)
        cut = luck.randint(0, length)
        pair.write(message[:cut], message[cut:])
        assert pair.read() == message


def test_a_message_takes_as_many_slots_as_it_needs() -> None:
    geometry = Geometry(4, 256)
    assert [geometry.slots_for(n) for n in (0, 256 - RECORD_BYTES, 257 - RECORD_BYTES)] == [1, 1, 2]
    assert [geometry.slots_for(n) for n in (4 * 256 - RECORD_BYTES, 4 * 256 - RECORD_BYTES + 1)] == [4, 5]


def test_a_message_that_was_overwritten_is_not_believed() -> None:
    pair = Pair(2, 256)
    for _ in range(3):  # a writer that waits for nobody
        pair.write(b"x")
    with pytest.raises(QueueCorruptError, match="holds no message"):
        pair.reader.next_record()


FIELDS = {
    "number": (0, "<Q"),
    "nbytes": (8, "<Q"),
    "structure": (16, "<I"),
    "slots": (20, "<I"),
    "kind": (24, "<I"),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 5),
        ("nbytes", 2**40),
        ("nbytes", 300),
        ("structure", 11),
        ("slots", 0),
        ("slots", 2),
        ("kind", 9),
    ],
)
def test_a_record_with_a_wrong_field_is_not_believed(field: str, value: int) -> None:
    pair = Pair(4, 256)
    pair.write(b"0123456789")
    pair.write(b"another")
    at, form = FIELDS[field]
    struct.pack_into(form, pair.memory, PAGE_BYTES + at, value)
    with pytest.raises(QueueCorruptError):
        pair.reader.next_record()


def test_a_published_number_that_is_impossible_is_not_believed() -> None:
    pair = Pair(4, 256)
    pair.write(b"x")
    pair.writer.words[PUBLISHED] = 2**63
    with pytest.raises(QueueCorruptError):
        pair.reader.next_record()


# The lock that fences memory is free, whatever happens to those who have used it.


FENCES = pytest.mark.parametrize("pass_fence", [ring._one_round, ring._two_rounds])


@FENCES
def test_a_fence_that_was_interrupted_holds_nobody_up(pass_fence: object) -> None:
    def interrupt(_: FrameType, event: str, function: object) -> None:
        if event == "c_return" and getattr(function, "__name__", "") == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(interrupt)
        try:
            pass_fence()  # type: ignore[operator]
        finally:
            sys.setprofile(None)
    assert not ring._lock.locked()


def test_a_fork_has_a_fence_of_its_own() -> None:
    """Another thread may have been in one."""

    def passes() -> bool:
        passing = threading.Thread(target=ring._two_rounds, daemon=True)
        passing.start()
        passing.join(LIMIT_S)
        return not passing.is_alive()

    with ring._lock:
        assert is_so_in_a_fork(passes)


# The small mechanisms of the queue: the handle, memory, and the listener.


TOKEN = bytes(range(32))

# ---------------------------------------------------------------------------------- handle


def _handle(**changes: object) -> dict[str, object]:
    plain = QueueHandle("name", TOKEN, 4, 256, (0, 2), 1).to_plain()
    return {**plain, **changes}


def test_a_handle_does_not_show_its_secrets() -> None:
    assert repr(TOKEN)[2:20] not in repr(QueueHandle.from_plain(_handle()))


@pytest.mark.parametrize(
    "plain",
    [
        None,
        {},
        "handle",
        _handle(version=0),
        _handle(token="text"),
        _handle(slots=0),
        _handle(slots=True),
        _handle(slot_bytes=2**60),
        _handle(local_ranks=[1, 1]),
        _handle(local_ranks=[-1]),
        _handle(local_ranks="01"),
        _handle(n_remote=-1),
        _handle(address="tcp://127.0.0.1:1", server_key=None),
    ],
    ids=repr,
)
def test_what_is_no_handle_is_a_value_error(plain: object) -> None:
    with pytest.raises(ValueError, match=r"handle"):
        QueueHandle.from_plain(plain)


# ---------------------------------------------------------------------------------- memory


@pytest.fixture
def sealed() -> Iterator[int]:
    descriptor = reserve(8192, "a test")
    with mmap.mmap(descriptor, 8192) as mapped:
        mapped[:5] = b"hello"
        seal(descriptor)
        yield descriptor
    os.close(descriptor)


def test_who_gets_sealed_memory_reads_it_and_cannot_write_nor_shrink_it(sealed: int) -> None:
    with map_received(sealed, 8192, writable=False) as mapped:
        assert mapped[:5] == b"hello"
    with pytest.raises(PermissionError):
        mmap.mmap(sealed, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed, 0)
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"x", 0)


def test_memory_of_another_size_or_that_may_shrink_is_refused(sealed: int) -> None:
    with pytest.raises(QueueError, match="not 4096 bytes"):
        map_received(sealed, 4096, writable=False)
    open_ended = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(open_ended, 4096)
    with pytest.raises(QueueError, match="shrink"):
        map_received(open_ended, 4096, writable=True)
    fcntl.fcntl(open_ended, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(QueueError, match="shrink"):
        map_received(open_ended, 4096, writable=True)
    os.close(open_ended)


def test_a_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for folder, limit, used in ((tmp_path / "job", "1000000", "400000"), (inner, "max", "1")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert list(memory._of_ancestors(tmp_path, "/job/step", ("memory.max", "memory.current"))) == [650000]
    assert memory._number_in("MemTotal: 9 kB\nMemAvailable:    7 kB\n", "MemAvailable:") == 7


# ---------------------------------------------------------------------------------- the listener


@pytest.fixture
def listener() -> Iterator[JoinListener]:
    listener = JoinListener([0, 3], TOKEN)
    yield listener
    listener.close()


def _known(listener: JoinListener, token: bytes = TOKEN) -> QueueHandle:
    return QueueHandle(listener.name, token, 1, 256, (0, 3), 0)


def _admit(listener: JoinListener) -> list[tuple[int, socket.socket]]:
    assert select.select([listener], [], [], 10)[0]
    return list(listener.admit())


@pytest.mark.parametrize("said", [b"x", b"y" * 10_000], ids=["too short", "too long"])
def test_who_says_something_else_is_shown_the_door(listener: JoinListener, said: bytes) -> None:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(f"\0{listener.name}")
    caller.send(said)
    assert _admit(listener) == []
    assert caller.recv(100) == b""
    caller.close()


def test_silent_callers_keep_nobody_out(listener: JoinListener, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = []
    for _ in range(CALLERS_MAX):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(f"\0{listener.name}")
        silent.append(caller)
    assert _admit(listener) == []
    honest = call(_known(listener), 0)
    assert list(listener.admit()) == []  # all seats are taken
    later = time.monotonic() + HELLO_S_MAX + 1  # the clock jumps, instead of a wait
    monkeypatch.setattr("torchft_like.message_queue.queue.time.monotonic", lambda: later)
    list(listener.admit())
    ((rank, connection),) = listener.admit()
    assert rank == 0
    for end in (*silent, honest, connection):
        end.close()


def test_all_readers_can_knock_before_the_writer_looks() -> None:
    ranks = range(CALLERS_MAX + 10)
    listener = JoinListener(ranks, TOKEN)
    known = QueueHandle(listener.name, TOKEN, 1, 256, tuple(ranks), 0)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(lambda: [call(known, rank) for rank in ranks])
        try:
            callers = calling.result(60)
            arrived = [arrival for _ in range(2) for arrival in listener.admit()]
        finally:
            listener.close()
    assert [rank for rank, _ in arrived] == [*ranks]
    for end in (*callers, *(connection for _, connection in arrived)):
        end.close()


def test_a_crowd_at_the_door_is_a_timeout(listener: JoinListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.message_queue.queue.CONNECT_S_MAX", 1.0)
    crowd = [call(_known(listener), 0) for _ in range(CALLERS_MAX + 1)]  # one more than the system's row
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call, _known(listener), 3)
        try:
            with pytest.raises(QueueTimeoutError, match="too many readers wait"):
                calling.result(60)
            arrived = [arrival for _ in range(2) for arrival in listener.admit()]
            honest = call(_known(listener), 3)
            arrived += listener.admit()
        finally:
            listener.close()
    assert [rank for rank, _ in arrived] == [0, 3]
    for end in (*crowd, honest, *(connection for _, connection in arrived)):
        end.close()


def test_a_file_with_a_message_is_written_once() -> None:
    descriptor = file_of([b"structure", memoryview(b"leaf")], 13)
    assert os.pread(descriptor, 100, 0) == b"structureleaf"
    for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.truncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)


def test_a_file_for_which_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    with pytest.raises(
        QueueMemoryError, match=r"200 bytes, more than the ring holds, needs.*100 are missing"
    ):
        file_of([b"x" * 200], 200)
