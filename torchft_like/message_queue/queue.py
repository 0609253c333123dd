"""MessageQueue: one writer, any number of readers, each of which gets every message."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from lighthouse.forks import Turn, in_each_fork
from torchft_like.errors import NotSupportedError
from torchft_like.message_queue.endpoint import LINGER_S, Endpoint, Limit
from torchft_like.message_queue.handle import (
    RANK_MAX,
    READERS_MAX,
    SLOT_BYTES_MAX,
    SLOTS_MAX,
    TOKEN_BYTES,
    QueueHandle,
    is_rank,
)
from torchft_like.message_queue.local import LocalReader
from torchft_like.message_queue.memory import descriptors_for
from torchft_like.message_queue.ring import SLOT_BYTES_MIN, Geometry
from torchft_like.message_queue.writer import Writer
from torchft_like.runtime.hosts import own_host

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
        with descriptors_for("a message queue"):
            if n_remote:
                from torchft_like.message_queue.remote import RemoteReaders  # noqa: PLC0415 - zmq

                remote = RemoteReaders(connect_ip or own_host(), n_remote, max_chunks, token, ranks)
            try:
                writer = Writer(geometry, ranks, token, remote)
            except BaseException:
                if remote is not None:
                    remote.close()
                raise
        handle = QueueHandle(writer.name, token, geometry, ranks, n_remote, remote.handle if remote else None)
        self._become(writer, handle, None)

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
        return self._writer().readers()

    @property
    def lost_readers(self) -> list[int]:
        """The ranks of the readers that died, and that the writer goes on without; only the writer has it."""
        return self._writer().lost_readers()

    @property
    def left_readers(self) -> list[int]:
        """The ranks of the readers that left by themselves; only the writer has it."""
        return self._writer().left_readers()

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
    """Release, in a fork, everything that was inherited: it is the parent's.

    A copy of a connection would hide the parent's death.
    """
    for end in list(_ends):
        with contextlib.suppress(OSError):  # even if one fails, the others are forgotten
            end.forget()
    _ends.clear()


in_each_fork(Turn.OBJECTS, _forget_all)
