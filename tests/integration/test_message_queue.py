"""Queues between processes that are killed, stopped and ended while others wait for them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.queue_end import End
from torchft_like.testing.ranks import Act, Rank, RankError, end_all

pytestmark = pytest.mark.integration

CHUNKS = 4


class Cast:
    """The ranks of one test."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.names: list[str] = []

    def rank(self) -> Rank:
        self.ranks.append(Rank(End))
        return self.ranks[-1]

    def queue(self, local: int, remote: int = 0, chunk_bytes: int = 64 * 1024) -> tuple[Rank, list[Rank]]:
        """A writer, its local readers and then its remote ones, all ready."""
        writer, readers = self.rank(), [self.rank() for _ in range(local + remote)]
        handle = writer.ask(End.write, local + remote, list(range(local)), chunk_bytes, CHUNKS)
        self.names.append(handle["name"])
        for number, reader in enumerate(readers):
            reader.tell(End.join, handle, number)
        writer.ask(End.ready)
        for reader in readers:
            reader.answer()
        return writer, readers


@pytest.fixture
def cast() -> Iterator[Cast]:
    made = Cast()
    yield made
    end_all(made.ranks)


def fill(writer: Rank) -> None:
    for number in range(CHUNKS):
        writer.ask(End.enqueue, number)


def read(reader: Rank, count: int) -> list[object]:
    return [reader.ask(End.dequeue) for _ in range(count)]


def error_of(rank: Rank, act: Act, *args: Any) -> str:
    rank.tell(act, *args)
    return error(rank)


def error(rank: Rank) -> str:
    """The error that a call has ended with."""
    with pytest.raises(RankError) as raised:
        rank.answer()
    return str(raised.value)


@pytest.mark.parametrize("remote", [0, 1], ids=["local", "remote"])
def test_a_writer_that_waits_for_a_reader_goes_on_when_it_is_killed(cast: Cast, remote: int) -> None:
    writer, readers = cast.queue(2 - remote, remote)
    survivor, victim = readers
    fill(writer)
    assert read(survivor, CHUNKS) == list(range(CHUNKS))
    writer.tell(End.enqueue, "after", None)
    writer.wait_blocked()
    victim.kill()
    writer.answer()
    assert read(survivor, 1) == ["after"]
    assert writer.ask(End.readers) == ([0], [1])


@pytest.mark.parametrize("remote", [0, 1], ids=["local", "remote"])
def test_a_stopped_reader_costs_the_writer_its_timeout_and_nobody_a_message(cast: Cast, remote: int) -> None:
    writer, readers = cast.queue(2 - remote, remote)
    fast, stopped = readers
    stopped.signal(signal.SIGSTOP)
    fill(writer)
    assert read(fast, CHUNKS) == list(range(CHUNKS))
    for _ in range(2):
        text = error_of(writer, End.enqueue, CHUNKS, 0.1)
        assert "QueueTimeoutError" in text
        assert "readers [1]" in text
    stopped.signal(signal.SIGCONT)
    writer.tell(End.enqueue, CHUNKS)
    assert read(stopped, CHUNKS + 1) == list(range(CHUNKS + 1))
    writer.answer()
    assert read(fast, 1) == [CHUNKS]
    assert writer.ask(End.readers) == ([0, 1], [])


def test_readers_that_wait_notice_that_the_writer_was_killed(cast: Cast) -> None:
    writer, readers = cast.queue(2, 1)
    writer.ask(End.enqueue, "last")
    for reader in readers:
        assert read(reader, 1) == ["last"]
        reader.tell(End.dequeue, None)
        reader.wait_blocked()
    writer.kill()
    for reader in readers:
        assert "QueueWriterLostError" in error(reader)
        assert "QueueWriterLostError" in error_of(reader, End.dequeue, None)


@pytest.mark.parametrize(
    ("ends", "error"), [("killed", "QueueWriterLostError"), ("exits", "QueueClosedError")]
)
def test_what_a_writer_wrote_before_its_end_is_still_read(cast: Cast, ends: str, error: str) -> None:
    writer, readers = cast.queue(1, int(ends == "exits"))
    fill(writer)
    if ends == "killed":
        writer.kill()
    else:
        writer.tell(End.leave)
    for reader in readers:
        assert read(reader, CHUNKS) == list(range(CHUNKS))
        assert error in error_of(reader, End.dequeue, None)
    writer.process.wait()


def test_a_reader_that_just_exits_has_left_in_peace(cast: Cast) -> None:
    writer, readers = cast.queue(2)
    readers[0].tell(End.leave)
    readers[0].process.wait()
    fill(writer)
    assert read(readers[1], CHUNKS) == list(range(CHUNKS))
    writer.ask(End.enqueue, "more")
    assert writer.ask(End.readers) == ([1], [])


@pytest.mark.parametrize("after", [1, 10, 30])
def test_a_writer_killed_in_the_middle_of_long_messages_leaves_no_half_ones(cast: Cast, after: int) -> None:
    writer, readers = cast.queue(2, chunk_bytes=2 * 1024 * 1024)
    reader, slow = readers
    sizes = [500_000]
    writer.tell(End.stream, sizes, 10_000)
    slow.tell(End.drain, sizes, 10_000)
    assert reader.ask(End.drain, sizes, after) == (after, "")
    writer.kill()
    number, ended_with = slow.answer()
    assert ended_with == "QueueWriterLostError"
    assert number >= after - CHUNKS


@pytest.mark.parametrize("victim", [0, 1], ids=["local", "remote"])
def test_readers_killed_in_the_middle_of_messages_leave_the_others_whole(cast: Cast, victim: int) -> None:
    writer, readers = cast.queue(1, 1, chunk_bytes=2 * 1024 * 1024)
    sizes, count = [500_000, 5], 40
    for reader in readers:
        reader.tell(End.drain, sizes, count)
    writer.tell(End.stream, sizes, count)
    readers[victim].kill()
    assert readers[1 - victim].answer() == (count, "")
    writer.answer()
    assert writer.ask(End.lost, victim) == [victim]


def test_a_fork_of_a_reader_neither_reads_nor_hides_its_death(cast: Cast) -> None:
    writer, (victim, survivor) = cast.queue(2)
    fork, said = victim.ask(End.fork)
    assert said == "QueueClosedError"
    writer.ask(End.enqueue, "both")
    assert read(victim, 1) == read(survivor, 1) == ["both"]  # it is still the parent's
    victim.signal(signal.SIGKILL)
    assert writer.ask(End.lost, 0) == [0]
    assert psutil.pid_exists(fork)


def test_forks_of_both_ends_of_a_remote_queue_leave_it_alone(cast: Cast) -> None:
    writer, (reader,) = cast.queue(0, 1)
    fork, said = reader.ask(End.fork)
    assert said == "QueueClosedError"
    for end, its_fork in ((reader, fork), (writer, writer.ask(End.fork)[0])):
        assert _connections(its_fork) < _connections(end.pid), "it hides the death of its parent"
    fill(writer)
    assert read(reader, CHUNKS) == list(range(CHUNKS))
    writer.tell(End.shutdown)
    assert "QueueClosedError" in error_of(reader, End.dequeue, None)
    writer.answer()


def _connections(pid: int) -> set[object]:
    return {(c.laddr, c.raddr) for c in psutil.Process(pid).net_connections("tcp") if c.raddr}


def test_readers_that_wait_use_no_processor(cast: Cast) -> None:
    _, readers = cast.queue(1, 1)
    for reader in readers:
        reader.tell(End.dequeue, None)
        reader.wait_blocked()
    before = [_processor_s(reader) for reader in readers]
    time.sleep(0.5)  # what is measured is a length of time
    for reader, seconds in zip(readers, before, strict=True):
        assert _processor_s(reader) - seconds < 0.2


def _processor_s(rank: Rank) -> float:
    times = psutil.Process(rank.pid).cpu_times()
    return times.user + times.system


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["writer first", "writer last"])
def test_nothing_is_left_when_everybody_is_killed(cast: Cast, order: Sequence[int]) -> None:
    writer, readers = cast.queue(1, 1)
    [name] = cast.names
    assert _is_bound(name)
    everybody = [writer, *readers]
    fill(writer)
    writer.tell(End.stream, [10_000_000], 10)
    writer.wait_blocked()
    files = {path for rank in everybody for path in _shared_files(rank)}
    for place in order:
        everybody[place].kill()
    assert not _is_bound(name)
    assert not [path for path in files if path.exists()]


def _is_bound(name: str) -> bool:
    """Whether any process has a Unix socket of that name."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f"@{name}") for line in sockets)


def _shared_files(rank: Rank) -> list[Path]:
    """Those with a name that it has mapped."""
    maps = psutil.Process(rank.pid).memory_maps()
    return [Path(mapped.path) for mapped in maps if mapped.path.startswith("/dev/shm/")]
