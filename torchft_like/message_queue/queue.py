"""MessageQueue: one writer, any number of readers, each of which gets every message. Here are both ends on
one machine; `remote` has those over a socket.

The writer writes one message at a time: it waits until every reader has room for the message, and only then
touches the ring, so that a call that times out has written nothing. A waiting thread sleeps in one place,
where a reader's message, a reader's death, a newcomer and `shutdown` all end the sleep.

The writer knows how far each reader has read, which of them sleep, and which are gone. Each reader has a page
of shared memory for its words and a connection, whose end tells each side of the other's death: the writer
notices when it next looks or waits, and no longer waits for that reader. One eventfd wakes all sleeping
readers with one call: woken one by one, the first would take the writer's core before the others are woken.
After that the writer yields once: the system likes to wake a process on the core of the one that woke it, and
there the reader would wait until the writer has nothing more to do. A reader reads the memory that the writer
wrote, and frees the slots when it has its own copy.

INVARIANT: what a reader writes into its page can only harm the reader itself. A number that makes no sense
gets it evicted, and the page is a file of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import math
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from lighthouse.forks import Turn, left_to_parent
from torchft_like.errors import (
    NotSupportedError,
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueDescriptorsError,
    QueueError,
    QueueReadersLostError,
    QueueTimeoutError,
    QueueWriterLostError,
)
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
    nothing_written,
)
from torchft_like.message_queue.leaves import (
    FILE_RECORD,
    assembled,
    file_of,
    reading_file,
    reading_ring,
)
from torchft_like.message_queue.memory import (
    descriptors_for,
    is_for_want_of_descriptors,
    map_received,
    reserve,
    seal,
    seal_size,
)
from torchft_like.message_queue.ring import (
    CLOSED,
    CONSUMED,
    IN_FILE,
    INLINE,
    PAGE_BYTES,
    PUBLISHED,
    SLEEPING,
    SLOT_BYTES_MIN,
    Bytes,
    Geometry,
    RingReader,
    RingWriter,
    before_publishing,
    full_fence,
)
from torchft_like.plain_data import bytes_of, dissect
from torchft_like.runtime import resources
from torchft_like.runtime.descriptors import despite_reset, receive_descriptors, send_descriptors
from torchft_like.runtime.durations import seconds_of
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
            self.name: str = self._local.listener.name  # to which local readers connect
            self._readers: list[LocalReaders | RemoteReaders] = [self._local, *([remote] if remote else [])]
            super().__init__("this queue was shut down")
            undo.callback(os.close, self._stop)
            self._undo = undo.pop_all()

    def ranks(self, choose: Callable[[LocalReaders | RemoteReaders], list[int]], late: bool) -> list[int]:
        """Return the ranks that `choose` returns of the readers on this machine, and of the others; `late`:
        even after the end of the queue.
        """
        with self._lock:
            if not late:
                self._require_open()
            if not self.is_closing:  # nor did an exception interrupt it while it wrote
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
            self.is_closing = self._is_broken = True
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
        n_local_reader: how many of the readers run on this machine and read shared memory; the others connect
            to a port of this machine.
        local_reader_ranks: the ranks of the local readers; 0 to n_local_reader - 1 unless given. Every
            other rank is a remote reader.
        max_chunk_bytes, max_chunks: size and number of the ring's slots, and so the shared memory that
            the queue takes. A message takes as many slots as it needs; one that is longer than the whole
            ring travels as a file in memory of its own. A remote reader may be `max_chunks` messages
            behind.
        connect_ip: the address of this machine at which remote readers reach it; that of this host's name
            unless given, or where that is loopback the one of the default route.

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

                host = connect_ip or own_host(others_ask=True)
                remote = RemoteReaders(host, n_remote, max_chunks, token, ranks)
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
        resources.track(self)

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

    def wait_until_ready(self, timeout: timedelta | float | None = None) -> None:
        """Wait until every reader has joined; at a reader, until this reader has.

        Args:
            timeout: seconds or timedelta, 0 for one look; None waits for ever.

        Raises:
            QueueTimeoutError: a reader has not joined; the text names it.
            QueueWriterLostError, QueueClosedError: the writer is gone.
            QueueError: the writer refuses this reader; says why.
            QueueDescriptorsError, QueueMemoryError: too many files are open, or there is no room to map the
                ring. A reader has left the queue; a writer can call again, and the readers that have joined
                stay.
        """
        self._end.wait_until_ready(_limit(timeout))

    def enqueue(self, obj: object, timeout: timedelta | float | None = None) -> None:
        """Write a message. Local readers can read it when this returns, even if this process then dies.

        Args:
            obj: plain data; the caller may change it as soon as the call returns.
            timeout: how long to wait for room, seconds or timedelta; None waits for ever.

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

    def dequeue(self, timeout: timedelta | float | None = None, indefinite: bool = False) -> object:
        """Read the next message; the object shares no memory with the queue.

        Args:
            timeout: how long to wait for it, seconds or timedelta; None waits for ever.
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

    def broadcast_object(self, obj: object = None, timeout: timedelta | float | None = None) -> object:
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

    def shutdown(self, timeout: timedelta | float = LINGER_S) -> None:
        """Close this end and end every wait in it; may be repeated.

        A writer's readers still read what was written, and then get QueueClosedError. Local ones need no
        waiting for. Remote ones that have not read all when the time is over may get QueueWriterLostError
        instead, and before the end of what was written.

        Args:
            timeout: seconds for which a writer waits for remote readers to have read what was written, and up
                to one more where their connections take nothing. Those that have read it are not waited for.
        """
        linger_s = seconds_of(timeout, may_be_0=True)
        self._finalizer.detach()
        self._end.shutdown(linger_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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


def _limit(timeout: timedelta | float | None) -> Limit:
    if timeout is None:
        return math.inf, math.inf
    timeout_s = seconds_of(timeout, may_be_0=True)
    return time.monotonic() + timeout_s, timeout_s


_ends = left_to_parent(Turn.OBJECTS, Endpoint.forget)  # a copy of a connection would hide the parent's death


# -- local readers, as the writer sees them, and how they get in

CALLERS_MAX = 64
HELLO_S_MAX = 5.0
CONNECT_S_MAX = 5.0
SHARED = 3  # the descriptors that a reader gets: the ring, its page, the eventfd that wakes it

_HELLO = struct.Struct(f"<4s{TOKEN_BYTES}sI")
_MAGIC = b"tfq1"
_WELCOME, _REFUSED = b"+", b"-"
_CREDENTIALS = struct.Struct("iII")
_TIME = struct.Struct("@ll")  # seconds, microseconds
_REFUSAL_BYTES_MAX = 512
FILES_UNREAD_MAX = 8
WAKE = b"!"
_LEAVE = b"."
_FILE = struct.Struct("<cQ")  # the bytes that go with the descriptor of a message's own file
_FILE_TAG = b"f"

_logger = logging.getLogger(__name__)


class JoinListener:
    """The writer's listening socket and the callers that have not joined yet. No method waits.

    A reader gets the shared memory by connecting to the writer, which listens in the abstract namespace of
    Unix sockets, where names are no files and go away with their process, and sends descriptors. A caller is
    let in once: if the kernel says that it is the same user, it knows the token of the handle, and its rank
    is expected and has not joined yet. No caller can hold the writer up: it never waits for one, and callers
    that say nothing are limited in number and time.

    Attributes:
        shortage: the error for which the last `admit` could not accept a caller: no descriptor is left.
    """

    def __init__(self, ranks: Sequence[int], token: bytes) -> None:
        self.name: str = f"torchft-queue-{secrets.token_hex(16)}"
        self.expected: set[int] = set(ranks)
        self.shortage: OSError | None = None
        self._token = token
        self._ranks = frozenset(ranks)
        self._callers: dict[int, tuple[socket.socket, float]] = {}
        with contextlib.ExitStack() as undo:
            self._events = undo.enter_context(select.epoll())
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._listener = undo.enter_context(listener)
            self._listener.bind(f"\0{self.name}")
            # All readers may connect before the writer looks.
            self._listener.listen(max(CALLERS_MAX, len(ranks)))
            self._events.register(self._listener, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `admit` has something to do."""
        return self._events.fileno()

    def admit(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield the rank and the connection of each reader that is let in now."""
        self.shortage = None
        for descriptor, _ in self._events.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
        now = time.monotonic()
        for descriptor, (caller, deadline) in list(self._callers.items()):
            if now > deadline:  # it has said nothing
                del self._callers[descriptor]
                caller.close()
        for descriptor, _ in self._events.poll(0):
            if descriptor in self._callers:
                yield from self._hear(descriptor)

    def close(self) -> None:
        for caller, _ in self._callers.values():
            caller.close()
        self._callers.clear()
        self._listener.close()
        self._events.close()

    def _accept(self) -> None:
        while len(self._callers) < CALLERS_MAX:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                if is_for_want_of_descriptors(error):
                    self.shortage = error
                return  # no more callers, or the caller is gone again already
            if _user_of(caller) != os.getuid():
                caller.close()
                continue
            caller.setblocking(False)
            self._callers[caller.fileno()] = caller, time.monotonic() + HELLO_S_MAX
            self._events.register(caller, select.EPOLLIN)

    def _hear(self, descriptor: int) -> Iterator[tuple[int, socket.socket]]:
        caller, _ = self._callers.pop(descriptor)
        self._events.unregister(caller)
        try:
            hello = caller.recv(_HELLO.size + 1)
        except OSError:
            hello = b""
        if len(hello) != _HELLO.size:
            caller.close()
            return
        magic, token, rank = _HELLO.unpack(hello)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            problem = "the token is not that of this queue"
        elif rank in self.expected:
            self.expected.discard(rank)
            yield rank, caller
            return
        elif rank in self._ranks:
            problem = f"reader {rank} has joined already"
        else:
            problem = f"rank {rank} is no local reader; they are {sorted(self._ranks)}"
        with contextlib.suppress(OSError):
            caller.send(_REFUSED + problem.encode())
        caller.close()


class _Reader:
    """One reader, from before it joins until it is gone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: socket.socket | None = None
        self.woken = 0
        self.descriptor = reserve(PAGE_BYTES, f"the page of reader {rank}")
        try:
            self._memory = mmap.mmap(self.descriptor, PAGE_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        seal_size(self.descriptor)
        self.words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.words.release()
        self._memory.close()
        os.close(self.descriptor)


class LocalReaders:
    """All local readers, with the ranks of those that were `lost`, and of those that have `left` in good
    order; only the thread that holds the writer's lock uses this.
    """

    def __init__(self, geometry: Geometry, ring_descriptor: int, ranks: Sequence[int], token: bytes) -> None:
        self.lost: list[int] = []
        self.left: list[int] = []
        self.listener: JoinListener = JoinListener(ranks, token)
        self._geometry = geometry
        self._ring_descriptor = ring_descriptor
        self._readers: dict[int, _Reader] = {}
        self._wake_up = -1
        try:
            self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            for rank in ranks:
                self._readers[rank] = _Reader(rank)
        except BaseException:
            self.close()
            raise
        # Slots before this number are free, and some reader will read them.
        self.free_until: int = geometry.slots
        # For each message of its own file that may be unread, the slot after it.
        self._files: deque[int] = deque()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the readers that are there, by the writer's last look."""
        return [reader.rank for reader in self._readers.values() if reader.connection is not None]

    @property
    def missing(self) -> list[int]:
        """The ranks of the readers that have not joined yet."""
        return [reader.rank for reader in self._readers.values() if reader.connection is None]

    @property
    def is_empty(self) -> bool:
        """Whether no reader is there, nor will come."""
        return not self._readers

    def describe_missing(self) -> str:
        """Name the readers that have not joined yet; return an empty text if all have."""
        return f"local readers {missing}" if (missing := self.missing) else ""

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when `attend` may have something to do."""
        connections = [reader.connection for reader in self._readers.values()]
        return [self.listener.fileno(), *(end.fileno() for end in connections if end is not None)]

    def has_room(self, until: int, published: int) -> bool:
        """Return whether every reader is done with the messages in the places of the slots before `until`."""
        if until <= self.free_until:
            return True
        free_until = self._slowest(published) + self._geometry.slots
        self.free_until = free_until if self._readers else 0
        return until <= free_until

    def may_send_file(self, published: int) -> bool:
        """Return whether every reader can be sent another file; few files are unread at any time."""
        if self.missing:
            return False
        slowest = self._slowest(published)
        while self._files and self._files[0] <= slowest:
            self._files.popleft()
        return len(self._files) < FILES_UNREAD_MAX

    def laggards(self, until: int) -> list[int]:
        """Return the ranks of the readers that still need the slots before number `until`."""
        return [
            reader.rank
            for reader in self._readers.values()
            if until > reader.words[CONSUMED] + self._geometry.slots
        ]

    def send_file(self, descriptor: int, number: int, end: int) -> None:
        """Send a message's file to every reader; `end` is the slot after the message."""
        self._files.append(end)
        for reader in list(self._readers.values()):
            if reader.connection is None:
                continue
            try:
                note = _FILE.pack(_FILE_TAG, number)
                send_descriptors(reader.connection, note, [descriptor], socket.MSG_DONTWAIT)
            except OSError as error:
                self._evict(reader, f"it takes no file ({error.strerror})")

    def wake(self) -> None:
        """Wake the sleeping readers, all at once, and each once per sleep."""
        full_fence()
        is_needed = False
        for reader in self._readers.values():
            sleep = reader.words[SLEEPING]
            if sleep != reader.woken and sleep:
                reader.woken = sleep
                is_needed = True
        if is_needed:
            try:
                os.eventfd_write(self._wake_up, 1)
            # A hostile reader has filled the counter: no honest reader writes to it, or reads it.
            except BlockingIOError:
                # The hostile reader may go on; the others look again by themselves.
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_up)
                    os.eventfd_write(self._wake_up, 1)
            os.sched_yield()

    def attend(self) -> None:
        """Let readers in, hear what they say, and find those that are gone. This waits for nothing."""
        for rank, connection in self.listener.admit():
            reader = self._readers[rank]
            reader.connection = connection
            shared = [self._ring_descriptor, reader.descriptor, self._wake_up]
            try:
                send_descriptors(connection, _WELCOME, shared, socket.MSG_DONTWAIT)
            except OSError as error:
                self._evict(reader, f"it is gone ({error.strerror})")
        for reader in list(self._readers.values()):
            if reader.connection is not None:
                self._listen(reader, reader.connection)

    def close(self) -> None:
        self.listener.close()
        while self._readers:
            self._readers.popitem()[1].close()
        wake_up, self._wake_up = self._wake_up, -1
        if wake_up >= 0:
            os.close(wake_up)

    def _slowest(self, published: int) -> int:
        while True:
            slowest, culprit = published, None
            for reader in self._readers.values():
                number = reader.words[CONSUMED]
                slowest = min(slowest, number)
                if not published - self._geometry.slots <= number <= published:
                    culprit = reader
            if culprit is None:
                return slowest
            self._evict(culprit, "its memory holds an impossible number")

    def _listen(self, reader: _Reader, connection: socket.socket) -> None:
        try:
            while data := despite_reset(lambda: connection.recv(16, socket.MSG_DONTWAIT)):
                if data == _LEAVE:
                    self._remove(reader)
                    self.left.append(reader.rank)
                    return
            self._evict(reader, "its connection ended")
        except BlockingIOError:
            return
        except OSError as error:
            self._evict(reader, f"its connection failed ({error.strerror})")

    def _evict(self, reader: _Reader, reason: str) -> None:
        self._remove(reader)
        self.lost.append(reader.rank)
        _logger.warning("the message queue goes on without reader %d: %s", reader.rank, reason)

    def _remove(self, reader: _Reader) -> None:
        del self._readers[reader.rank]
        if not self._readers:
            self.free_until = 0
        reader.close()


# -- a local reader's end


def call(handle: QueueHandle, rank: int) -> socket.socket:
    """Connect to the writer and say hello."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(CONNECT_S_MAX), 0))
        try:
            connection.connect(f"\0{handle.name}")
            if _user_of(connection) != os.getuid():
                raise QueueError("another user's process has the writer's name")
            connection.send(_HELLO.pack(_MAGIC, handle.token, rank))
        except BlockingIOError:
            raise QueueTimeoutError(
                CONNECT_S_MAX, "too many readers wait to be let in: the writer has to call wait_until_ready"
            ) from None
        except OSError as error:
            raise QueueWriterLostError(
                f"reader {rank} finds no writer ({error.strerror}): is it alive, and on this machine?"
            ) from error
        undo.pop_all()
    return connection


def hear_welcome(connection: socket.socket) -> list[int]:
    """Return the descriptors of the shared memory, once the connection is readable."""
    try:
        data, descriptors = receive_descriptors(connection, _REFUSAL_BYTES_MAX, SHARED)
    except OSError as error:
        raise QueueWriterLostError("the writer went away before it let this reader in") from error
    if not data:
        raise QueueWriterLostError("the writer went away, or was shut down, before it let this reader in")
    if data[:1] == _REFUSED:
        raise QueueError(f"the writer refuses this reader: {data[1:].decode(errors='replace')}")
    if len(descriptors) != SHARED:
        for descriptor in descriptors:
            os.close(descriptor)
        # The kernel drops a descriptor for which there is no room.
        raise OSError(errno.EMFILE, "the shared memory did not arrive")
    return descriptors


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


class LocalReader(Endpoint):
    """The reader's end of a `MessageQueue`, over shared memory."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        self._handle = handle
        self._rank = rank
        self._writer_is_gone = False
        self._sleeps = 0
        self._woken = 0
        self._files: dict[int, int] = {}  # the descriptors of messages longer than the ring, by number
        self._file_read = 0  # the number of the last of them
        self._lacked_descriptors = False  # for a file, whose descriptor the kernel has dropped
        self._ring: RingReader | None = None
        with contextlib.ExitStack() as undo:
            self._events = undo.enter_context(select.epoll())
            self._connection = undo.enter_context(call(handle, rank))
            super().__init__(f"reader {rank} has left the queue")
            undo.callback(os.close, self._stop)
            undo.callback(self._close_files)
            self._undo = undo.pop_all()
        self._events.register(self._stop, select.EPOLLIN)
        self._events.register(self._connection, select.EPOLLIN)

    def wait_until_ready(self, limit: Limit) -> None:
        with self._lock:
            self._require_open()
            self._joined(limit)

    def dequeue(self, limit: Limit, is_expected: bool = False) -> object:
        with self._lock:
            self._require_open()
            ring = self._ring or self._joined(limit)
            words, consumed = ring.words, ring.consumed
            if words[PUBLISHED] <= consumed:
                self._wait(lambda: words[PUBLISHED] > consumed, limit, nothing_written, True, is_expected)
            try:
                value, slots = self._read(ring)
            except (PlainDataError, QueueCorruptError, QueueDescriptorsError) as error:
                self._leave()
                self._close_files()
                if isinstance(error, QueueDescriptorsError):
                    raise
                raise QueueCorruptError(f"{error}; reader {self._rank} has left the queue") from error
            self._free(ring, slots)
            if self._files:
                self._close_files(self._file_read + 1)
            return value

    def _say_goodbye(self) -> None:
        with contextlib.suppress(OSError):  # the writer is gone already
            self._connection.send(_LEAVE, socket.MSG_DONTWAIT)
            self._connection.shutdown(socket.SHUT_RDWR)

    def _release(self, linger_s: float = 0.0) -> None:
        self._undo.close()

    # ------------------------------------------------------------------------------- joining

    def _joined(self, limit: Limit) -> RingReader:
        if self._ring is not None:
            return self._ring
        what = "the writer did not let this reader in: it has to call wait_until_ready"
        own = self._connection.fileno()
        self._wait(lambda: own in dict(self._events.poll(0)), limit, lambda: (what, ()), spins=False)
        try:
            with descriptors_for(f"reader {self._rank}, which has left the message queue,"):
                self._ring = self._take_memory()
        except QueueWriterLostError:
            raise
        except OSError as error:
            self._leave()
            raise QueueError(
                f"reader {self._rank} could not join, and has left the queue: {error}"
            ) from error
        except BaseException:  # also for Ctrl-C: the writer sends the memory only once
            self._leave()
            raise
        return self._ring

    def _take_memory(self) -> RingReader:
        ring_descriptor, page_descriptor, self._wake_up = hear_welcome(self._connection)
        self._undo.callback(os.close, self._wake_up)
        geometry = self._handle.geometry
        try:
            # No reader ever reads the eventfd's counter, which would take the wake-up from the other readers:
            # every wake-up is an edge.
            self._events.register(self._wake_up, select.EPOLLIN | select.EPOLLET)
            page = self._undo.enter_context(map_received(page_descriptor, PAGE_BYTES, writable=True))
            self._words = self._undo.enter_context(memoryview(page).cast("Q"))
            memory = map_received(ring_descriptor, geometry.memory_bytes, writable=False)
            ring = RingReader(memoryview(self._undo.enter_context(memory)), geometry)
            self._undo.callback(ring.release)
        finally:
            os.close(ring_descriptor)
            os.close(page_descriptor)
        return ring

    # ------------------------------------------------------------------------------- reading

    def _read(self, ring: RingReader) -> tuple[object, int]:
        """Return the next message, and how many slots it takes."""
        place, nbytes, structure_bytes, slots, kind = ring.next_record()
        structure = ring.read(place, structure_bytes)
        if kind == IN_FILE:
            return self._read_file(structure), slots
        if structure_bytes == nbytes:
            return assembled(structure), slots
        fill = reading_ring(ring, place + structure_bytes)
        return assembled(structure, nbytes - structure_bytes, fill), slots

    def _read_file(self, note: bytes) -> object:
        if len(note) != FILE_RECORD.size:
            raise QueueCorruptError("a message in a file has no record of it")
        self._file_read, structure_bytes, nbytes = FILE_RECORD.unpack(note)
        fill = reading_file(self._file(self._file_read), nbytes)
        if structure_bytes > nbytes:
            raise QueueCorruptError("the structure of a message is longer than the message")
        structure = bytearray(structure_bytes)
        fill(memoryview(structure))
        return assembled(bytes(structure), nbytes - structure_bytes, fill)

    def _file(self, number: int) -> int:
        """Return the descriptor of a message's file, which was sent before the message was published.

        It is kept until the slot is free: a caller that is interrupted before that reads the message once
        more.
        """
        while number not in self._files and self._hear():
            pass
        if number in self._files:
            return self._files[number]
        if self._lacked_descriptors:
            raise QueueDescriptorsError(
                f"a message needs a file descriptor, and none was left: reader {self._rank} has left "
                "the queue; close files, or raise the limit of open files (ulimit -n)"
            )
        raise QueueCorruptError("the file of a message did not arrive")

    def _close_files(self, until: float = math.inf) -> None:
        for older in [number for number in self._files if number < until]:
            os.close(self._files.pop(older))

    def _free(self, ring: RingReader, slots: int) -> None:
        ring.consumed += slots
        if before_publishing:
            before_publishing()
        self._words[CONSUMED] = ring.consumed
        full_fence()
        sleep = ring.words[SLEEPING]
        if sleep and sleep != self._woken:
            self._woken = sleep
            # Full: there are wake-ups enough; ended: the next wait sees it.
            with contextlib.suppress(OSError):
                self._connection.send(WAKE, socket.MSG_DONTWAIT)

    # ------------------------------------------------------------------------------- waiting

    def _require_possible(self, reached: Callable[[], bool]) -> None:
        if (ring := self._ring) is None:  # while it joins, the connection's end is an answer
            return
        while self._hear():  # wake-ups of earlier sleeps, or the writer's end
            pass
        is_closed = ring.words[CLOSED]
        if not (is_closed or self._writer_is_gone):
            return
        full_fence()
        if reached():  # the message was the last
            return
        if is_closed:
            raise QueueClosedError("the writer has shut the queue down, and everything was read")
        raise QueueWriterLostError("the writer is gone, and everything that it wrote was read")

    def _sleep(self, reached: Callable[[], bool], seconds: float) -> None:
        if self._ring is None:
            self._events.poll(seconds)
            return
        self._sleeps += 1
        self._words[SLEEPING] = self._sleeps
        full_fence()
        try:
            if not reached():
                self._events.poll(min(seconds, RECHECK_S))
        finally:
            self._words[SLEEPING] = 0

    def _hear(self) -> bool:
        """Handle one message from the writer; return whether there was one."""
        try:
            data, descriptors = despite_reset(
                lambda: receive_descriptors(self._connection, _FILE.size + 1, 1, socket.MSG_DONTWAIT)
            )
        except BlockingIOError:
            return False
        except OSError:
            data, descriptors = b"", []
        if len(data) == _FILE.size and data[:1] == _FILE_TAG and len(descriptors) == 1:
            _, number = _FILE.unpack(data)
            if number in self._files:
                os.close(self._files[number])
            self._files[number] = descriptors[0]
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self._lacked_descriptors |= data[:1] == _FILE_TAG
        self._writer_is_gone |= not data
        return bool(data)
