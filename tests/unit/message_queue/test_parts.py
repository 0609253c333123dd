"""The small mechanisms of the queue: the handle, memory, and the listener."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchft_like.errors import QueueError, QueueMemoryError, QueueTimeoutError
from torchft_like.message_queue import memory
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.message_queue.leaves import file_of
from torchft_like.message_queue.memory import map_received, reserve, seal
from torchft_like.message_queue.queue import (
    CALLERS_MAX,
    HELLO_S_MAX,
    JoinListener,
    call,
)

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
