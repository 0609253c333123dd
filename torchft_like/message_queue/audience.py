"""The local readers as the writer sees them: how far each has read, which of them sleep, which are gone.

Each reader has a page of shared memory for its words and a connection, whose end tells of the reader's death:
the writer notices when it next looks or waits, and no longer waits for that reader. One eventfd, the bell,
wakes all sleeping readers with one call: woken one by one, the first would take the writer's core before the
others are woken. After that the writer yields once: the system likes to wake a process on the core of the one
that woke it, and there the reader would wait until the writer has nothing more to do.

INVARIANT: what a reader writes into its page can only harm the reader itself. A number that makes no sense
gets it evicted, and the page is a file of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

from torchft_like.message_queue.fence import full_fence
from torchft_like.message_queue.handshake import Arrival, Lobby, welcome
from torchft_like.message_queue.memory import map_to_write, reserve, seal_size
from torchft_like.message_queue.ring import CONSUMED, PAGE_BYTES, SLEEPING, Geometry
from torchft_like.runtime.descriptors import despite_reset, send_descriptors

FILES_UNREAD_MAX = 8
WAKE = b"!"
LEAVE = b"."
FILE = struct.Struct("<cQQ")  # the bytes that go with the descriptor of a message's own file
FILE_TAG = b"f"

_logger = logging.getLogger(__name__)


class _Member:
    """One reader, from before it joins until it is gone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: socket.socket | None = None
        self.rung = 0
        self.descriptor = reserve(PAGE_BYTES, f"the page of reader {rank}")
        try:
            self._memory = map_to_write(self.descriptor, PAGE_BYTES)
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


class Audience:
    """All local readers; only the thread that holds the writer's lock uses this."""

    def __init__(self, geometry: Geometry, ring_descriptor: int, ranks: Sequence[int], token: bytes) -> None:
        self.lobby = Lobby(ranks, token)
        self.lost: list[int] = []
        self.left: list[int] = []
        self._geometry = geometry
        self._ring_descriptor = ring_descriptor
        self._members: dict[int, _Member] = {}
        self._bell = -1
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            for rank in ranks:
                self._members[rank] = _Member(rank)
        except BaseException:
            self.close()
            raise
        self.free_until = geometry.slots  # slots before this number are free, and some reader will read them
        # For each message of its own file that may be unread, the slot after it.
        self._files: deque[int] = deque()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the readers that are there, by the writer's last look."""
        return [member.rank for member in self._members.values() if member.connection is not None]

    @property
    def missing(self) -> list[int]:
        """The ranks of the readers that have not joined yet."""
        return [member.rank for member in self._members.values() if member.connection is None]

    @property
    def is_empty(self) -> bool:
        """Whether no reader is there, nor will come."""
        return not self._members

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when `attend` has something to do."""
        connections = [member.connection for member in self._members.values()]
        return [self.lobby.fileno(), *(end.fileno() for end in connections if end is not None)]

    def has_room(self, until: int, published: int) -> bool:
        """Return whether the slots before number `until` are free: every reader is done with the messages in
        their places.
        """
        if until <= self.free_until:
            return True
        free_until = self._slowest(published) + self._geometry.slots
        self.free_until = free_until if self._members else 0
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
        """Return the ranks of the readers for which `has_room` is False."""
        return [
            member.rank
            for member in self._members.values()
            if until > member.words[CONSUMED] + self._geometry.slots
        ]

    def send_file(self, descriptor: int, number: int, attempt: int, end: int) -> None:
        """Send the file of message `number` to every reader; there may have been an earlier attempt."""
        self._files.append(end)
        for member in list(self._members.values()):
            if member.connection is None:
                continue
            try:
                note = FILE.pack(FILE_TAG, number, attempt)
                send_descriptors(member.connection, note, [descriptor], socket.MSG_DONTWAIT)
            except OSError as error:
                self._evict(member, f"it takes no file ({error.strerror})")

    def wake(self) -> None:
        """Wake the sleeping readers, all at once, and each once per sleep."""
        full_fence()
        is_needed = False
        for member in self._members.values():
            sleep = member.words[SLEEPING]
            if sleep != member.rung and sleep:
                member.rung = sleep
                is_needed = True
        if is_needed:
            _ring(self._bell)
            os.sched_yield()

    def attend(self) -> None:
        """Let readers in, and note those that left. This waits for nothing."""
        for arrival in self.lobby.admit():
            self._join(arrival)
        for member in list(self._members.values()):
            if member.connection is not None:
                self._listen(member)

    def close(self) -> None:
        """Release everything of all readers."""
        self.lobby.close()
        while self._members:
            self._members.popitem()[1].close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def _slowest(self, published: int) -> int:
        while True:
            slowest, culprit = published, None
            for member in self._members.values():
                number = member.words[CONSUMED]
                slowest = min(slowest, number)
                if not published - self._geometry.slots <= number <= published:
                    culprit = member
            if culprit is None:
                return slowest
            self._evict(culprit, "its memory holds an impossible number")

    def _join(self, arrival: Arrival) -> None:
        member = self._members[arrival.rank]
        member.connection = arrival.connection
        try:
            welcome(arrival.connection, [self._ring_descriptor, member.descriptor, self._bell])
        except OSError as error:
            self._evict(member, f"it is gone ({error.strerror})")

    def _listen(self, member: _Member) -> None:
        if (connection := member.connection) is None:
            return
        try:
            while data := despite_reset(lambda: connection.recv(16, socket.MSG_DONTWAIT)):
                if data == LEAVE:
                    self._remove(member)
                    self.left.append(member.rank)
                    return
            self._evict(member, "its connection ended")
        except BlockingIOError:
            return
        except OSError as error:
            self._evict(member, f"its connection failed ({error.strerror})")

    def _evict(self, member: _Member, reason: str) -> None:
        self._remove(member)
        self.lost.append(member.rank)
        _logger.warning("the message queue goes on without reader %d: %s", member.rank, reason)

    def _remove(self, member: _Member) -> None:
        del self._members[member.rank]
        if not self._members:
            self.free_until = 0
        member.close()


def _ring(bell: int) -> None:
    try:
        os.eventfd_write(bell, 1)
    # A hostile reader has filled the counter: no honest reader writes to it, or reads it.
    except BlockingIOError:
        # The hostile reader may go on; the others look again by themselves.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(bell)
            os.eventfd_write(bell, 1)
