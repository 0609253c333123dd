"""Both ends of a queue on one machine: its local readers as the writer sees them, and a local reader's end.

The writer knows how far each reader has read, which of them sleep, and which are gone. Each reader has a page
of shared memory for its words and a connection, whose end tells each side of the other's death: the writer
notices when it next looks or waits, and no longer waits for that reader. One eventfd wakes all sleeping
readers with one call: woken one by one, the first would take the writer's core before the others are woken.
After that the writer yields once: the system likes to wake a process on the core of the one that woke it, and
there the reader would wait until the writer has nothing more to do. A reader reads the memory that the writer
wrote, and frees the slots when it has its own copy.

A reader gets the shared memory by connecting to the writer, which listens in the abstract namespace of Unix
sockets, where names are no files and go away with their process, and sends descriptors. A caller is let in
once: if the kernel says that it is the same user, it knows the token of the handle, and its rank is expected
and has not joined yet. No caller can hold the writer up: it never waits for one, and callers that say nothing
are limited in number and time.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torchft_like.errors import (
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueDescriptorsError,
    QueueError,
    QueueTimeoutError,
    QueueWriterLostError,
)
from torchft_like.message_queue.endpoint import (
    RECHECK_S,
    TOKEN_BYTES,
    Endpoint,
    Limit,
    QueueHandle,
    nothing_written,
)
from torchft_like.message_queue.leaves import (
    FILE_RECORD,
    NO_LEAVES,
    Source,
    assembled,
    reading_file,
    reading_ring,
)
from torchft_like.message_queue.memory import (
    descriptors_for,
    is_for_want_of_descriptors,
    map_received,
    reserve,
    seal_size,
)
from torchft_like.message_queue.ring import (
    CLOSED,
    CONSUMED,
    IN_FILE,
    PAGE_BYTES,
    PUBLISHED,
    SLEEPING,
    Geometry,
    RingReader,
    before_publishing,
    full_fence,
)
from torchft_like.runtime.descriptors import despite_reset, receive_descriptors, send_descriptors

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
    """The writer's listening socket and the callers that have not joined yet. No method waits. `shortage` is
    the error for which the last `admit` could not accept a caller: no descriptor is left.
    """

    def __init__(self, ranks: Sequence[int], token: bytes) -> None:
        self.name = f"torchft-queue-{secrets.token_hex(16)}"
        self.expected = set(ranks)
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


def welcome(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send the descriptors of the shared memory to a reader that was let in."""
    send_descriptors(connection, _WELCOME, descriptors, socket.MSG_DONTWAIT)


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
        self.listener = JoinListener(ranks, token)
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
        self.free_until = geometry.slots  # slots before this number are free, and some reader will read them
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
            try:
                welcome(connection, [self._ring_descriptor, reader.descriptor, self._wake_up])
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


# ---------------------------------------------------------------------------- a reader's end


def call(handle: QueueHandle, rank: int) -> socket.socket:
    """Connect to the writer and say hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(CONNECT_S_MAX), 0))
    try:
        connection.connect(f"\0{handle.name}")
        if _user_of(connection) != os.getuid():
            raise QueueError("another user's process has the writer's name")
        connection.send(_HELLO.pack(_MAGIC, handle.token, rank))
    except BlockingIOError:
        connection.close()
        raise QueueTimeoutError(
            CONNECT_S_MAX, "too many readers wait to be let in: the writer has to call wait_until_ready"
        ) from None
    except OSError as error:
        connection.close()
        raise QueueWriterLostError(
            f"reader {rank} finds no writer ({error.strerror}): is it alive, and on this machine?"
        ) from error
    except QueueError:
        connection.close()
        raise
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
            return assembled(structure, NO_LEAVES), slots
        leaves = Source(nbytes - structure_bytes, reading_ring(ring, place + structure_bytes))
        return assembled(structure, leaves), slots

    def _read_file(self, note: bytes) -> object:
        if len(note) != FILE_RECORD.size:
            raise QueueCorruptError("a message in a file has no record of it")
        self._file_read, structure_bytes, nbytes = FILE_RECORD.unpack(note)
        fill = reading_file(self._file(self._file_read), nbytes)
        if structure_bytes > nbytes:
            raise QueueCorruptError("the structure of a message is longer than the message")
        structure = bytearray(structure_bytes)
        fill(memoryview(structure))
        return assembled(bytes(structure), Source(nbytes - structure_bytes, fill))

    def _file(self, number: int) -> int:
        """Return the descriptor of a message's file, which was sent before the message was published.

        It is kept until the slot is free: a caller that is interrupted before that reads the message once
        more.
        """
        while number not in self._files and self._hear():
            pass
        self._close_files(number)
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
