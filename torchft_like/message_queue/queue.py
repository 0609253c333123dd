"""MessageQueue: one writer, any number of readers, each of which gets every message; and its writing end.

The writer writes one message at a time: it waits until every reader has room for the message, and only then
touches the ring, so that a call that times out has written nothing. A waiting thread sleeps in one place,
where a reader's message, a reader's death, a newcomer and `shutdown` all end the sleep.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lighthouse.forks import Turn, in_each_fork
from torchft_like.errors import NotSupportedError, QueueReadersLostError
from torchft_like.message_queue.endpoint import (
    LINGER_S,
    RANK_MAX,
    READERS_MAX,
    RECHECK_S,
    SLOT_BYTES_MAX,
    SLOTS_MAX,
    TOKEN_BYTES,
    Endpoint,
    Limit,
    QueueHandle,
    is_rank,
)
from torchft_like.message_queue.leaves import FILE_RECORD, file_of
from torchft_like.message_queue.local import LocalReader, LocalReaders
from torchft_like.message_queue.memory import descriptors_for, reserve, seal
from torchft_like.message_queue.ring import (
    CLOSED,
    IN_FILE,
    INLINE,
    PUBLISHED,
    SLEEPING,
    SLOT_BYTES_MIN,
    Bytes,
    Geometry,
    RingWriter,
    full_fence,
)
from torchft_like.plain_data import bytes_of, dissect
from torchft_like.runtime import living
from torchft_like.runtime.hosts import own_host

if TYPE_CHECKING:  # queues without remote readers need no ZeroMQ
    from torchft_like.message_queue.remote import Prepared, RemoteReaders


class Writer(Endpoint):
    """The writer's end of a `MessageQueue`. It takes over `remote`."""

    def __init__(
        self, geometry: Geometry, local_ranks: Sequence[int], token: bytes, remote: RemoteReaders | None
    ) -> None:
        self._geometry = geometry
        self._is_broken = False  # an exception interrupted it while it wrote
        self._is_ready = False
        self._sleeps = 0
        self._files_sent = 0  # readers may have files of attempts that an exception has interrupted
        self._n_readers = len(local_ranks) + (remote.n_readers if remote else 0)
        purpose = f"a ring of {geometry.slots} x {geometry.slot_bytes} bytes"
        self._remote = remote
        with contextlib.ExitStack() as undo:
            self._descriptor = reserve(geometry.memory_bytes, purpose)
            undo.callback(os.close, self._descriptor)
            self._memory = mmap.mmap(self._descriptor, geometry.memory_bytes)
            undo.callback(self._memory.close)
            seal(self._descriptor)
            self._ring = RingWriter(memoryview(self._memory), geometry)
            undo.callback(self._ring.release)
            self._local = LocalReaders(geometry, self._descriptor, local_ranks, token)
            undo.callback(self._local.close)
            self.name = self._local.listener.name  # to which local readers connect
            self._readers: list[LocalReaders | RemoteReaders] = [self._local, *([remote] if remote else [])]
            super().__init__("this queue was shut down")
            undo.callback(os.close, self._stop)
            self._undo = undo.pop_all()

    def ranks(self, choose: Callable[[LocalReaders | RemoteReaders], list[int]], late: bool) -> list[int]:
        """Return the ranks that `choose` returns of the readers on this machine, and of the others.

        Args:
            late: whether the call is allowed after the end of the queue.
        """
        with self._lock:
            if not late:
                self._require_open()
            if not self._is_closing:  # nor did an exception interrupt it while it wrote
                self._attend()
            return [rank for readers in self._readers for rank in choose(readers)]

    def wait_until_ready(self, limit: Limit) -> None:
        with self._lock:
            self._require_open()
            self._attend()
            self._wait(self._all_joined, limit, self._describe_missing)

    def enqueue(self, value: object, limit: Limit) -> None:
        with self._lock:
            self._require_open()
            structure, leaves = dissect(value)
            parts = [structure, *map(bytes_of, leaves)] if leaves else [structure]
            nbytes = sum(map(len, parts)) if leaves else len(structure)
            if not self._is_ready:
                self._attend()
                self._is_ready = self._all_joined()
            prepared = self._remote.prepare(parts) if self._remote else []
            slots = self._geometry.slots_for(nbytes)
            if slots <= self._geometry.slots:
                if self._remote or self._ring.words[PUBLISHED] + slots > self._local.free_until:
                    self._await_room(slots, False, limit)
                self._write(INLINE, parts, nbytes, slots, prepared)
            else:
                self._write_file(parts, nbytes, limit, prepared)

    def _say_goodbye(self) -> None:
        self._ring.words[CLOSED] = not self._is_broken

    def _abandon(self) -> None:
        self._remote = None
        self._release()

    def _release(self, linger_s: float = 0.0) -> None:
        # First, so that a waiting local reader need not wait for the goodbye to remote ones.
        self._local.close()
        with self._undo:  # whatever interrupts the goodbye
            if self._remote:
                self._remote.close(linger_s)

    def _attend(self) -> None:
        for readers in self._readers:
            readers.attend()

    def _all_joined(self) -> bool:
        return not any(readers.describe_missing() for readers in self._readers)

    def _describe_missing(self) -> tuple[str, Sequence[int]]:
        parts = filter(None, (readers.describe_missing() for readers in self._readers))
        return f"{' and '.join(parts)} did not join: each has to call wait_until_ready", self._local.missing

    def _write_file(self, parts: Sequence[Bytes], nbytes: int, limit: Limit, prepared: Prepared) -> None:
        """Send a message that is longer than the ring as a file in memory; its slot only says so."""
        slots = self._geometry.slots_for(FILE_RECORD.size)
        self._await_room(slots, True, limit)
        descriptor = file_of(parts, nbytes)
        try:
            self._files_sent += 1
            self._local.send_file(descriptor, self._files_sent, self._ring.words[PUBLISHED] + slots)
        finally:
            os.close(descriptor)
        record = FILE_RECORD.pack(self._files_sent, len(parts[0]), nbytes)
        self._write(IN_FILE, [record], len(record), slots, prepared)

    def _write(self, kind: int, parts: Sequence[Bytes], nbytes: int, slots: int, prepared: Prepared) -> None:
        try:
            self._ring.write(kind, parts, nbytes, slots)
            self._local.wake()
            if self._remote:
                self._remote.send(prepared)
        except BaseException:  # also for Ctrl-C: it is unknown which readers have the message
            self._is_closing = self._is_broken = True
            self._local.close()
            raise

    def _await_room(self, slots: int, is_file: bool, limit: Limit) -> None:
        local, remote, published = self._local, self._remote, self._ring.words[PUBLISHED]
        until = published + slots
        if local.has_room(until, published) and not is_file and remote is None:
            if local.is_empty and self._n_readers:
                raise self._nobody()
            return

        def reached() -> bool:
            return (
                local.has_room(until, published)
                and (not is_file or local.may_send_file(published))
                and (remote is None or remote.has_room())
            )

        def describe() -> tuple[str, Sequence[int]]:
            if (is_file or remote) and not self._all_joined():
                return self._describe_missing()
            ranks = local.laggards(until) + (remote.laggards() if remote else [])
            return f"no room: readers {ranks} have not read what was written long ago", ranks

        self._attend()
        self._wait(reached, limit, describe)
        if self._n_readers and all(readers.is_empty for readers in self._readers):
            raise self._nobody()

    def _nobody(self) -> QueueReadersLostError:
        return QueueReadersLostError(f"all {self._n_readers} readers of the queue are gone")

    def _require_possible(self, reached: Callable[[], bool]) -> None:
        """Raise an error if no reader can be let in for want of descriptors: a wait would be no sleep."""
        if (shortage := self._local.listener.shortage) is not None:
            with descriptors_for("a reader that wants to join the message queue"):
                raise shortage

    def _sleep(self, reached: Callable[[], bool], seconds: float) -> None:
        events = select.poll()
        events.register(self._stop, select.POLLIN)
        for readers in self._readers:
            for descriptor in readers.descriptors():
                events.register(descriptor, select.POLLIN)
        self._sleeps += 1
        self._ring.words[SLEEPING] = self._sleeps
        full_fence()
        try:
            if not reached():
                events.poll(min(seconds, RECHECK_S) * 1000)
        finally:
            self._ring.words[SLEEPING] = 0
        self._attend()


MAX_CHUNK_BYTES = 1024 * 1024
MAX_CHUNKS = 16
_LINE_BYTES = 64


class MessageQueue:
    """A queue with one writer and many readers, each of which gets every message, in order.

    The process that makes it writes. It sends `export_handle()` to the readers, over any channel that they
    have, and they call `create_from_handle`. Then the writer and all readers call `wait_until_ready`.

    A message is plain data (torchft_like.plain_data): None, bool, int, float, str, bytes, list, tuple,
    dict, tensors and arrays of numbers. Nothing is pickled. Tensors arrive on the CPU.

    One thread at a time writes, and one per reader reads; others wait for it. Any thread may call `shutdown`,
    which ends every wait of the queue. In a fork, a queue of the parent is closed.

    Args:
        n_reader: the number of readers.
        n_local_reader: how many of them run on this machine and read shared memory; the others connect
            to a port of this machine.
        local_reader_ranks: the ranks of the local readers; 0 to n_local_reader - 1 unless given. Every
            other rank is a remote reader.
        max_chunk_bytes, max_chunks: size and number of the ring's slots, and so the shared memory that
            the queue takes. A message takes as many slots as it needs; one that is longer than the whole
            ring travels as a file in memory of its own. A remote reader may be `max_chunks` messages
            behind.
        connect_ip: the address of this machine at which remote readers reach it; that of this host's name
            unless given.

    Raises:
        ValueError: the numbers make no sense, or `connect_ip` is no address of this machine.
        QueueMemoryError: there is not enough memory for the ring; says how much is missing.
        QueueDescriptorsError: too many files are open.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
    ) -> None:
        ranks = _local_ranks(n_reader, n_local_reader, local_reader_ranks)
        geometry = _geometry(max_chunk_bytes, max_chunks)
        token = secrets.token_bytes(TOKEN_BYTES)
        n_remote = n_reader - n_local_reader
        remote = None
        with descriptors_for("a message queue"), contextlib.ExitStack() as undo:
            if n_remote:
                from torchft_like.message_queue.remote import RemoteReaders  # noqa: PLC0415 - zmq

                remote = RemoteReaders(connect_ip or own_host(), n_remote, max_chunks, token, ranks)
                undo.callback(remote.close)
            writer = Writer(geometry, ranks, token, remote)
            undo.pop_all()
        where = (remote.address, remote.server_key) if remote else ()
        self._become(writer, QueueHandle(writer.name, token, *geometry, ranks, n_remote, *where), None)

    @classmethod
    def create_from_handle(cls, handle: object, rank: int) -> Self:
        """Open a reader's end.

        Args:
            handle: what the writer's `export_handle` returned.
            rank: the rank of this reader; no other reader has it.

        Raises:
            ValueError: the value is no handle, or the rank is not one of its readers.
            QueueWriterLostError: the writer is gone.
            QueueTimeoutError: too many readers connect at once, and the writer does not look: try again.
            QueueDescriptorsError: too many files are open.
        """
        known = QueueHandle.from_plain(handle)
        if not is_rank(rank):
            raise ValueError(f"{rank!r} is no rank of a reader, which is an int from 0 to {RANK_MAX}")
        reader: Endpoint
        with descriptors_for(f"reader {rank} of a message queue"):
            if rank in known.local_ranks:
                reader = LocalReader(known, rank)
            else:
                from torchft_like.message_queue.remote import RemoteReader  # noqa: PLC0415 - zmq

                reader = RemoteReader(known, rank)
        queue = cls.__new__(cls)
        queue._become(reader, known, rank)
        return queue

    @staticmethod
    def create_from_process_group(
        pg: Any,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        writer_rank: int = 0,
        external_writer_handle: object = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """Open the caller's end of a queue that one member of a process group writes and all others read.

        All members call it, and agree on their arguments. Readers on the writer's machine read shared memory.
        The queue does not end with the group.

        Args:
            pg: torch's own group or any of ours.
            writer_rank: the writer's rank in the group.
            external_writer_handle: on that member, the handle of a queue whose writer is outside the group:
                then all members read it, each as the reader of its rank in the group.
            blocking: wait until all have joined; otherwise call `wait_until_ready` before it is used.

        Raises:
            ValueError: the caller's arguments make no sense; CollectiveMismatchError on the other members.
            GroupCoordinatorError: a member is gone.
        """
        from torchft_like.message_queue import members  # noqa: PLC0415 - a queue alone needs no groups

        group = members.members_of(pg, max_chunk_bytes, max_chunks)
        return members.create_broadcaster(group, writer_rank, external_writer_handle, blocking)

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[MessageQueue, list[object]]:
        """Make a queue that the caller writes; one member gets the handles of all members' queues.

        All members call it, and agree on their arguments. The reading member opens each handle as reader 0.

        Args:
            pg: torch's own group or any of ours.
            reader_rank: the reader's rank in the whole job, as in vLLM.
            blocking: must be False: no member can have opened the queues before the call returns.

        Returns:
            The queue; and on the reader the handles in the order of ranks, its own among them.

        Raises:
            ValueError: the caller's arguments make no sense; CollectiveMismatchError on the other members.
            GroupCoordinatorError: a member is gone.
        """
        from torchft_like.message_queue import members  # noqa: PLC0415

        group = members.members_of(pg, max_chunk_bytes, max_chunks)
        return members.create_single_reader(group, lambda: members.rank_in(pg, reader_rank), blocking)

    def _become(self, end: Endpoint, handle: QueueHandle, rank: int | None) -> None:
        self._end = end
        self._handle = handle
        self._rank = rank
        # The finalizer also runs at the end of the interpreter: a writer that exits in good order has not
        # died.
        self._finalizer = weakref.finalize(self, end.shutdown)
        _ends.add(end)
        living.lives(self)

    @property
    def is_writer(self) -> bool:
        """Whether this is the writer's end."""
        return self._rank is None

    @property
    def is_closed(self) -> bool:
        """Whether this end is over: `shutdown` was called, it has left the queue, or it is a fork's."""
        return self._end.is_closing

    def export_handle(self) -> dict[str, object]:
        """Return what readers need, as plain data. A process that has it can read the queue."""
        return self._handle.to_plain()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader has joined; at a reader, until this reader has.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            QueueTimeoutError: a reader has not joined; the text names it.
            QueueWriterLostError, QueueClosedError: the writer is gone.
            QueueError: the writer refuses this reader; says why.
            QueueDescriptorsError, QueueMemoryError: too many files are open, or there is no room to map the
                ring. A reader has left the queue; a writer can call again, and the readers that have joined
                stay.
        """
        self._end.wait_until_ready(_limit(timeout))

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Write a message. Local readers can read it when this returns, whatever happens to this process.

        Args:
            obj: plain data; the caller may change it as soon as the call returns.
            timeout: seconds to wait for room; None waits for ever.

        Raises:
            PlainDataError: the object is of a type that cannot be sent; the text names the part.
            QueueTimeoutError: there was no room; the text names the readers that are behind. Nothing was
              written.
            QueueReadersLostError: no reader is left.
            QueueMemoryError: it is longer than the ring, and there is no memory for its file.
            QueueDescriptorsError: there is no descriptor for that file; or the call had to wait, and there is
                none for a reader that has come. Nothing was written.
            QueueClosedError: the queue was shut down.
        """
        self._end.enqueue(obj, _limit(timeout))

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """Read the next message; the object shares no memory with the queue.

        Args:
            timeout: seconds to wait for it; None waits for ever.
            indefinite: the message may be long in coming: the log does not report the wait every minute.

        Raises:
            QueueTimeoutError: nothing was written in time.
            QueueClosedError: after the last message, the writer having shut the queue down; or this
                reader has left.
            QueueWriterLostError: after the last message, the writer having died.
            QueueCorruptError: what is there was not written by a writer. The reader has left the queue.
            QueueMemoryError: there is no room for a copy of it. It can still be read.
            QueueDescriptorsError: none was left for a message longer than the ring. The reader has left.
            QueueDescriptorsError, QueueMemoryError: as from `wait_until_ready`, if that was not called.
        """
        return self._end.dequeue(_limit(timeout), indefinite)

    def broadcast_object(self, obj: object = None, timeout: float | None = None) -> object:
        """Write `obj` at the writer, read it at the readers, and return it at all of them."""
        if self.is_writer:
            self.enqueue(obj, timeout)
            return obj
        return self.dequeue(timeout)

    @property
    def readers(self) -> list[int]:
        """The ranks of the readers that are there now; only the writer has it."""
        return sorted(self._writer().ranks(lambda readers: readers.ranks, late=False))

    @property
    def lost_readers(self) -> list[int]:
        """The ranks of the readers that died, and that the writer goes on without; only the writer has it."""
        return self._writer().ranks(lambda readers: readers.lost, late=True)

    @property
    def left_readers(self) -> list[int]:
        """The ranks of the readers that left by themselves; only the writer has it."""
        return self._writer().ranks(lambda readers: readers.left, late=True)

    def shutdown(self, timeout: float = LINGER_S) -> None:
        """Close this end and end every wait in it; may be repeated.

        A writer's readers still read what was written, and then get QueueClosedError. Local ones need no
        waiting for. Remote ones that have not read all when the time is over may get QueueWriterLostError
        instead, and before the end of what was written.

        Args:
            timeout: seconds for which a writer waits for remote readers to have read what was written, and up
                to one more where their connections take nothing. Those that have read it are not waited for.
        """
        self._finalizer.detach()
        self._end.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        geometry = self._handle.geometry
        end = "writer" if self._rank is None else f"reader {self._rank}"
        others = f"{len(self._handle.local_ranks)} local + {self._handle.n_remote} remote readers"
        return f"<MessageQueue {end} | {others} | {geometry.slots} x {geometry.slot_bytes} bytes>"

    def _writer(self) -> Writer:
        if isinstance(self._end, Writer):
            return self._end
        raise NotSupportedError("this is a reader's end of the queue: only the writer knows its readers")


def _local_ranks(n_readers: int, n_local: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    if not 0 <= n_local <= n_readers <= READERS_MAX:
        raise ValueError(f"{n_local} of {n_readers} readers cannot be local, of {READERS_MAX} at most")
    found = tuple(range(n_local)) if ranks is None else tuple(ranks)
    if len(found) != n_local or len(set(found)) != n_local or not all(map(is_rank, found)):
        raise ValueError(f"local_reader_ranks={list(found)} are not {n_local} distinct ranks")
    return found


def _geometry(max_chunk_bytes: int, max_chunks: int) -> Geometry:
    if not (isinstance(max_chunk_bytes, int) and isinstance(max_chunks, int)):
        raise ValueError(f"max_chunk_bytes={max_chunk_bytes!r} and max_chunks={max_chunks!r} must be ints")
    if not (SLOT_BYTES_MIN <= max_chunk_bytes <= SLOT_BYTES_MAX and 1 <= max_chunks <= SLOTS_MAX):
        raise ValueError(
            f"max_chunk_bytes={max_chunk_bytes} must be within [{SLOT_BYTES_MIN}, {SLOT_BYTES_MAX}], "
            f"and max_chunks={max_chunks} within [1, {SLOTS_MAX}]"
        )
    return Geometry(max_chunks, -(-max_chunk_bytes // _LINE_BYTES) * _LINE_BYTES)


def _limit(timeout: float | None) -> Limit:
    if timeout is None:
        return math.inf, math.inf
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout} must be 0 or more seconds, or None")
    return time.monotonic() + timeout, timeout


_ends: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _forget_all() -> None:
    """Release, in a fork, what was inherited: a copy of a connection would hide the parent's death."""
    for end in list(_ends):
        with contextlib.suppress(OSError):  # even if one fails, the others are forgotten
            end.forget()
    _ends.clear()


in_each_fork(Turn.OBJECTS, _forget_all)
