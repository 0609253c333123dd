"""The end of a queue for a reader on the writer's machine.

It reads the memory that the writer wrote, and frees the slots when it has its own copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from torchft_like.errors import (
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueDescriptorsError,
    QueueError,
    QueueTimeoutError,
    QueueWriterLostError,
)
from torchft_like.message_queue.audience import FILE, FILE_TAG, LEAVE, WAKE
from torchft_like.message_queue.end import RECHECK_S, ReadingEnd
from torchft_like.message_queue.fence import before_publishing, full_fence
from torchft_like.message_queue.handle import QueueHandle
from torchft_like.message_queue.handshake import call, hear_welcome
from torchft_like.message_queue.leaves import (
    FILE_RECORD,
    NO_LEAVES,
    Source,
    assembled,
    reading_file,
    reading_ring,
)
from torchft_like.message_queue.memory import descriptors_for, map_received
from torchft_like.message_queue.ring import (
    CLOSED,
    CONSUMED,
    IN_FILE,
    PAGE_BYTES,
    PUBLISHED,
    SLEEPING,
    RingReader,
)
from torchft_like.runtime.descriptors import despite_reset, receive_descriptors
from torchft_like.runtime.long_waits import LongWait
from torchft_like.runtime.spin_wait import AdaptiveSpin


class _File(NamedTuple):
    """The file of a message that is longer than the ring."""

    attempt: int
    descriptor: int


class LocalReader(ReadingEnd):
    """The reader's end of a `MessageQueue`, over shared memory."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        self._handle = handle
        self._rank = rank
        self._writer_is_gone = False
        self._spin = AdaptiveSpin()
        self._sleeps = 0
        self._rung = 0
        self._files: dict[int, _File] = {}
        self._lacked_descriptors = False  # for a file, whose descriptor the kernel has dropped
        self._ring: RingReader | None = None
        self._bell = -1
        self._memory: list[mmap.mmap] = []
        with contextlib.ExitStack() as undo:
            self._events = undo.enter_context(select.epoll())
            self._connection = undo.enter_context(call(handle, rank))
            super().__init__(f"reader {rank} has left the queue")
            undo.pop_all()
        self._events.register(self._stop, select.EPOLLIN)
        self._events.register(self._connection, select.EPOLLIN)

    def wait_until_ready(self, deadline: float, seconds: float) -> None:
        """Wait until the writer has let this reader in."""
        with self._lock:
            self._require_open()
            self._joined(deadline, seconds)

    def dequeue(self, deadline: float, seconds: float, is_expected: bool = False) -> object:
        """Return the next message."""
        with self._lock:
            if self._is_closing:
                raise self._too_late()
            ring = self._ring or self._joined(deadline, seconds)
            if ring.words[PUBLISHED] <= ring.consumed:
                self._wait(ring, deadline, seconds, is_expected)
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
                self._close_files(ring.consumed)
            return value

    def _say_goodbye(self) -> None:
        with contextlib.suppress(OSError):  # the writer is gone already
            self._connection.send(LEAVE, socket.MSG_DONTWAIT)
            self._connection.shutdown(socket.SHUT_RDWR)

    def _release(self, patience_s: float = 0.0) -> None:
        self._connection.close()
        self._events.close()
        # `_release` in a fork closes all once more
        stop, bell, self._stop, self._bell = self._stop, self._bell, -1, -1
        for descriptor in (stop, bell):
            if descriptor >= 0:
                os.close(descriptor)
        self._close_files()
        if self._ring is not None:
            self._ring.release()
            self._words.release()
        for memory in self._memory:
            memory.close()

    # ------------------------------------------------------------------------------- joining

    def _joined(self, deadline: float, seconds: float) -> RingReader:
        if self._ring is not None:
            return self._ring
        self._poll(
            deadline, seconds, "the writer did not let this reader in: it has to call wait_until_ready"
        )
        try:
            with descriptors_for(f"reader {self._rank}, which has left the message queue,"):
                self._take_memory()
            self._words = memoryview(self._memory[0]).cast("Q")
            self._ring = RingReader(memoryview(self._memory[1]), self._handle.geometry)
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

    def _take_memory(self) -> None:
        ring_descriptor, page_descriptor, self._bell = hear_welcome(self._connection)
        try:
            # No reader ever reads the bell's counter, which would take the wake-up from the other readers:
            # every ring is an edge.
            self._events.register(self._bell, select.EPOLLIN | select.EPOLLET)
            self._memory.append(map_received(page_descriptor, PAGE_BYTES, writable=True))
            ring_bytes = self._handle.geometry.memory_bytes
            self._memory.append(map_received(ring_descriptor, ring_bytes, writable=False))
        finally:
            os.close(ring_descriptor)
            os.close(page_descriptor)

    def _poll(self, deadline: float, seconds: float, what: str) -> None:
        """Wait until the connection is readable; look once, however little time there is."""
        wait = LongWait()
        while True:
            self._require_open()
            now = time.monotonic()
            wait.look(now, lambda: f"a message queue: {what}")
            sleep_s = max(min(deadline, wait.next_line) - now, 0.0)
            ready = {descriptor for descriptor, _ in self._events.poll(sleep_s)}
            if self._connection.fileno() in ready:
                return
            if now >= deadline:
                raise QueueTimeoutError(seconds, what)

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
        number, attempt, structure_bytes, nbytes = FILE_RECORD.unpack(note)
        fill = reading_file(self._file(number, attempt), nbytes)
        if structure_bytes > nbytes:
            raise QueueCorruptError("the structure of a message is longer than the message")
        structure = bytearray(structure_bytes)
        fill(memoryview(structure))
        return assembled(bytes(structure), Source(nbytes - structure_bytes, fill))

    def _file(self, number: int, attempt: int) -> int:
        """Return the descriptor of a message's file, which was sent before the message was published.

        It is kept until the slot is free: a caller that is interrupted before that reads the message once
        more.
        """
        file = self._files.get(number)
        while (file is None or file.attempt != attempt) and self._hear():
            file = self._files.get(number)
        self._close_files(number)
        if file is not None and file.attempt == attempt:
            return file.descriptor
        if self._lacked_descriptors:
            raise QueueDescriptorsError(
                f"a message needs a file descriptor, and none was left: reader {self._rank} has left "
                "the queue; close files, or raise the limit of open files (ulimit -n)"
            )
        raise QueueCorruptError("the file of a message did not arrive")

    def _close_files(self, until: float = math.inf) -> None:
        """Close the files of the messages before that number."""
        for older in [known for known in self._files if known < until]:
            os.close(self._files.pop(older).descriptor)

    def _free(self, ring: RingReader, slots: int) -> None:
        ring.consumed += slots
        if before_publishing:
            before_publishing()
        self._words[CONSUMED] = ring.consumed
        full_fence()
        sleep = ring.words[SLEEPING]
        if sleep and sleep != self._rung:
            self._rung = sleep
            # Full: there are wake-ups enough; ended: the next wait sees it.
            with contextlib.suppress(OSError):
                self._connection.send(WAKE, socket.MSG_DONTWAIT)

    # ------------------------------------------------------------------------------- waiting

    def _wait(self, ring: RingReader, deadline: float, seconds: float, is_expected: bool) -> None:
        """Wait until there is a message."""
        words, consumed, wait = ring.words, ring.consumed, LongWait(is_expected=is_expected)
        nothing = "the writer wrote nothing"

        def reached() -> bool:
            return words[PUBLISHED] > consumed

        if not self._spin.watch(reached, deadline):
            while words[PUBLISHED] <= consumed:
                self._require_open()
                while self._hear():  # wake-ups of earlier sleeps, or the writer's end
                    pass
                self._require_writer(ring, reached)
                if (now := time.monotonic()) >= deadline:
                    raise QueueTimeoutError(seconds, nothing)
                wait.look(now, lambda: f"a message queue: {nothing}")
                self._sleep(reached, min(deadline - now, RECHECK_S))
        self._spin.learn(wait.seconds)

    def _require_writer(self, ring: RingReader, reached: Callable[[], bool]) -> None:
        """Raise an error if the awaited message will never come."""
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
        self._sleeps += 1
        self._words[SLEEPING] = self._sleeps
        full_fence()
        try:
            if not reached():
                self._events.poll(seconds)
        finally:
            self._words[SLEEPING] = 0

    def _hear(self) -> bool:
        """Handle one message from the writer; return whether there was one."""
        try:
            data, descriptors = despite_reset(
                lambda: receive_descriptors(self._connection, FILE.size + 1, 1, socket.MSG_DONTWAIT)
            )
        except BlockingIOError:
            return False
        except OSError:
            data, descriptors = b"", []
        if len(data) == FILE.size and data[:1] == FILE_TAG and len(descriptors) == 1:
            _, number, attempt = FILE.unpack(data)
            if number in self._files:  # the writer was interrupted and began once more
                os.close(self._files[number].descriptor)
            self._files[number] = _File(attempt, descriptors[0])
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self._lacked_descriptors |= data[:1] == FILE_TAG
        self._writer_is_gone |= not data
        return bool(data)
