"""The handshake by which a local reader gets the shared memory: it connects to the writer, which sends
descriptors.

The writer listens in the abstract namespace of Unix sockets, where names are no files and go away with their
process. A caller is let in once: if the kernel says that it is the same user, it knows the token of the
handle, and its rank is expected and has not joined yet. No caller can hold the writer up: it never waits for
one, and callers that say nothing are limited in number and time.

The connection stays: its end tells each side of the other's death.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchft_like.errors import QueueError, QueueTimeoutError, QueueWriterLostError
from torchft_like.message_queue.handle import TOKEN_BYTES, QueueHandle
from torchft_like.message_queue.memory import is_for_want_of_descriptors
from torchft_like.runtime.descriptors import receive_descriptors, send_descriptors

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


class Arrival(NamedTuple):
    """A reader that was let in."""

    rank: int
    connection: socket.socket


class JoinListener:
    """The writer's listening socket and the callers that have not joined yet. No method waits.

    Attributes:
        shortage: the error for which the last `admit` could not accept a caller: no descriptor is left.
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

    def admit(self) -> Iterator[Arrival]:
        """Yield the readers that are let in now."""
        self.shortage = None
        for descriptor, _ in self._events.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
        self._drop_silent()
        for descriptor, _ in self._events.poll(0):
            if descriptor in self._callers:
                yield from self._hear(descriptor)

    def close(self) -> None:
        """Let no reader in any more."""
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

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for descriptor, (caller, deadline) in list(self._callers.items()):
            if now > deadline:
                del self._callers[descriptor]
                caller.close()

    def _hear(self, descriptor: int) -> Iterator[Arrival]:
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
        problem = self._problem(magic, token, rank)
        if problem is None:
            self.expected.discard(rank)
            yield Arrival(rank, caller)
            return
        with contextlib.suppress(OSError):
            caller.send(_REFUSED + problem.encode())
        caller.close()

    def _problem(self, magic: bytes, token: bytes, rank: int) -> str | None:
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            return "the token is not that of this queue"
        if rank in self.expected:
            return None
        if rank in self._ranks:
            return f"reader {rank} has joined already"
        return f"rank {rank} is no local reader; they are {sorted(self._ranks)}"


def welcome(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send the descriptors of the shared memory to a reader that was let in."""
    send_descriptors(connection, _WELCOME, descriptors, socket.MSG_DONTWAIT)


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
