"""Queues between processes that are killed, stopped and ended while others wait for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.queue_worker import LIMIT_S, Peer
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

CHUNKS = 4
COUNT = 30
SIZES = [1, 1000, 150_000, 7, 20_000]  # elements; a slot, some slots, a file


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a process with torch loaded forks for everybody who connects."""
    starter = Processes()
    try:
        host = starter.fork("tests.integration.queue_worker")
        yield int(host.wait_for_output(r"port (\d+)")[1])
    finally:
        starter.kill_all()


class Cast:
    """The processes of one test."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: list[Peer] = []
        self.forks: list[int] = []
        self.names: list[str] = []

    def peer(self) -> Peer:
        self._peers.append(Peer(self._port))
        return self._peers[-1]

    def queue(self, local: int, remote: int = 0, chunk_bytes: int = 64 * 1024) -> tuple[Peer, list[Peer]]:
        """A writer, its local readers and then its remote ones, all ready."""
        writer, readers = self.peer(), [self.peer() for _ in range(local + remote)]
        arguments = [local + remote, chunk_bytes, CHUNKS]
        handle = writer.ask("write", arguments=arguments, local=list(range(local)))
        self.names.append(handle["name"])
        for rank, reader in enumerate(readers):
            reader.begin("join", handle=handle, rank=rank)
        writer.ask("ready")
        for reader in readers:
            reader.result()
        return writer, readers

    def end(self) -> None:
        for pid in (*self.forks, *(peer.pid for peer in self._peers)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for peer in self._peers:
            peer.close()


@pytest.fixture
def cast(port: int) -> Iterator[Cast]:
    made = Cast(port)
    try:
        yield made
    finally:
        made.end()


def fill(writer: Peer) -> None:
    for number in range(CHUNKS):
        writer.ask("enqueue", value=number, timeout=LIMIT_S)


def read(reader: Peer, count: int) -> list[object]:
    return [reader.ask("dequeue", timeout=LIMIT_S) for _ in range(count)]


def wait_for_its_wait(peer: Peer) -> None:
    """Until the call that the process was told to begin sleeps: it waits for another process."""
    peer.wait_for_begin()
    process = psutil.Process(peer.pid)
    deadline = time.monotonic() + LIMIT_S
    while process.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("remote", [0, 1], ids=["local", "remote"])
def test_a_writer_that_waits_for_a_reader_goes_on_when_it_is_killed(cast: Cast, remote: int) -> None:
    writer, readers = cast.queue(2 - remote, remote)
    survivor, victim = readers
    fill(writer)
    assert read(survivor, CHUNKS) == list(range(CHUNKS))
    writer.begin("enqueue", value="after", timeout=None)
    wait_for_its_wait(writer)
    victim.kill()
    writer.result()
    assert read(survivor, 1) == ["after"]
    assert writer.ask("readers") == [[0], [1]]


@pytest.mark.parametrize("remote", [0, 1], ids=["local", "remote"])
def test_a_stopped_reader_costs_the_writer_its_timeout_and_nobody_a_message(cast: Cast, remote: int) -> None:
    writer, readers = cast.queue(2 - remote, remote)
    fast, stopped = readers
    stopped.signal(signal.SIGSTOP)
    fill(writer)
    assert read(fast, CHUNKS) == list(range(CHUNKS))
    for _ in range(2):
        assert "QueueTimeoutError" in (error := writer.fails("enqueue", value=CHUNKS, timeout=0.1))
        assert "readers [1]" in error
    stopped.signal(signal.SIGCONT)
    writer.begin("enqueue", value=CHUNKS, timeout=LIMIT_S)
    assert read(stopped, CHUNKS + 1) == list(range(CHUNKS + 1))
    writer.result()
    assert read(fast, 1) == [CHUNKS]
    assert writer.ask("readers") == [[0, 1], []]


def test_readers_that_wait_notice_that_the_writer_was_killed(cast: Cast) -> None:
    writer, readers = cast.queue(2, 1)
    writer.ask("enqueue", value="last", timeout=LIMIT_S)
    for reader in readers:
        assert read(reader, 1) == ["last"]
        reader.begin("dequeue", timeout=None)
        wait_for_its_wait(reader)
    writer.kill()
    for reader in readers:
        assert "QueueWriterLostError" in reader.error()
        assert "QueueWriterLostError" in reader.fails("dequeue", timeout=None)


def test_what_a_killed_writer_had_written_is_still_read(cast: Cast) -> None:
    writer, (reader,) = cast.queue(1)
    fill(writer)
    writer.kill()
    assert read(reader, CHUNKS) == list(range(CHUNKS))
    assert "QueueWriterLostError" in reader.fails("dequeue", timeout=None)


def test_a_writer_that_just_exits_has_closed_the_queue(cast: Cast) -> None:
    writer, readers = cast.queue(1, 1)
    fill(writer)
    writer.begin("exit")
    for reader in readers:
        assert read(reader, CHUNKS) == list(range(CHUNKS))
        assert "QueueClosedError" in reader.fails("dequeue", timeout=None)
    writer.wait()


def test_a_reader_that_just_exits_has_left_in_peace(cast: Cast) -> None:
    writer, readers = cast.queue(2)
    readers[0].begin("exit")
    readers[0].wait()
    fill(writer)
    assert read(readers[1], CHUNKS) == list(range(CHUNKS))
    writer.ask("enqueue", value="more", timeout=LIMIT_S)
    assert writer.ask("readers") == [[1], []]


@pytest.mark.parametrize("remote", [0, 1], ids=["local", "with a remote reader"])
def test_many_messages_of_all_sizes_arrive_whole_and_in_order(cast: Cast, remote: int) -> None:
    writer, readers = cast.queue(2, remote)
    for reader in readers:
        reader.begin("drain", sizes=SIZES, count=COUNT)
    writer.ask("stream", sizes=SIZES, count=COUNT)
    assert [reader.result() for reader in readers] == [[COUNT, None]] * len(readers)


@pytest.mark.parametrize("after", [1, 10, 30])
def test_a_writer_killed_in_the_middle_of_long_messages_leaves_no_half_ones(cast: Cast, after: int) -> None:
    writer, readers = cast.queue(2, chunk_bytes=2 * 1024 * 1024)
    reader, slow = readers
    sizes = [500_000]
    writer.begin("stream", sizes=sizes, count=10_000)
    slow.begin("drain", sizes=sizes, count=10_000)
    assert reader.ask("drain", sizes=sizes, count=after) == [after, None]
    writer.kill()
    number, error = slow.result()
    assert error == "QueueWriterLostError"
    assert number >= after - CHUNKS


@pytest.mark.parametrize("victim", [0, 1], ids=["local", "remote"])
def test_readers_killed_in_the_middle_of_long_messages_leave_the_others_whole(
    cast: Cast, victim: int
) -> None:
    writer, readers = cast.queue(1, 1, chunk_bytes=2 * 1024 * 1024)
    sizes, count = [500_000, 5], 40
    for reader in readers:
        reader.begin("drain", sizes=sizes, count=count)
    writer.begin("stream", sizes=sizes, count=count)
    readers[victim].kill()
    assert readers[1 - victim].result() == [count, None]
    writer.result()
    assert writer.ask("lost", rank=victim) == [victim]


def test_a_fork_of_a_reader_neither_reads_nor_hides_its_death(cast: Cast) -> None:
    writer, (victim, survivor) = cast.queue(2)
    fork, said = victim.ask("fork")
    cast.forks.append(fork)
    assert said == "QueueClosedError"
    writer.ask("enqueue", value="both", timeout=LIMIT_S)
    assert read(victim, 1) == read(survivor, 1) == ["both"]  # it is still the parent's
    victim.signal(signal.SIGKILL)
    assert writer.ask("lost", rank=0) == [0]
    assert psutil.pid_exists(fork)


def test_forks_of_both_ends_of_a_remote_queue_leave_it_alone(cast: Cast) -> None:
    writer, (reader,) = cast.queue(0, 1)
    fork, said = reader.ask("fork")
    cast.forks.append(fork)
    assert said == "QueueClosedError"
    cast.forks.append(writer.ask("fork")[0])
    for end, its_fork in zip((reader, writer), cast.forks, strict=True):
        assert _connections(its_fork) < _connections(end.pid), "it hides the death of its parent"
    fill(writer)
    assert read(reader, CHUNKS) == list(range(CHUNKS))
    writer.begin("shutdown")
    assert "QueueClosedError" in reader.fails("dequeue", timeout=None)
    writer.result()


def _connections(pid: int) -> set[object]:
    return {(c.laddr, c.raddr) for c in psutil.Process(pid).net_connections("tcp") if c.raddr}


def test_readers_that_wait_use_no_processor(cast: Cast) -> None:
    _, readers = cast.queue(1, 1)
    for reader in readers:
        reader.begin("dequeue", timeout=None)
        wait_for_its_wait(reader)
    before = [_processor_s(reader) for reader in readers]
    time.sleep(0.5)  # what is measured is a length of time
    for reader, seconds in zip(readers, before, strict=True):
        assert _processor_s(reader) - seconds < 0.2


def _processor_s(peer: Peer) -> float:
    times = psutil.Process(peer.pid).cpu_times()
    return times.user + times.system


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["writer first", "writer last"])
def test_nothing_is_left_when_everybody_is_killed(cast: Cast, order: Sequence[int]) -> None:
    writer, readers = cast.queue(1, 1)
    [name] = cast.names
    assert _is_bound(name)
    everybody = [writer, *readers]
    fill(writer)
    writer.begin("stream", sizes=[10_000_000], count=10)
    wait_for_its_wait(writer)
    files = {path for peer in everybody for path in _shared_files(peer)}
    for place in order:
        everybody[place].kill()
    assert not _is_bound(name)
    assert not [path for path in files if path.exists()]


def _is_bound(name: str) -> bool:
    """Whether any process has a Unix socket of that name."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f"@{name}") for line in sockets)


def _shared_files(peer: Peer) -> list[Path]:
    """Those with a name that it has mapped."""
    maps = psutil.Process(peer.pid).memory_maps()
    return [Path(mapped.path) for mapped in maps if mapped.path.startswith("/dev/shm/")]
