"""Messages with file descriptors between a trainer and the subprocesses that are its own forks.

A message is a tuple of two numbers and of parts: a fixed struct, and the output of the codec (`plain_data`).
Most answers have no parts, and most requests one that is bytes already: these cost no more than the struct.
The socket keeps the boundaries of messages; a message that is too long for it travels as a file in memory.

This module does not know what the messages mean.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchft_like.errors import PlainDataError
from torchft_like.plain_data import CALLS, decode, encode
from torchft_like.runtime.descriptors import ancillary_bytes, descriptors_in, despite_reset, send_descriptors

Message = tuple[Any, ...]  # two numbers, and at most PARTS_MAX parts of the types of `plain_data.CALLS`

MESSAGE_BYTES_MAX = 64 * 1024
DESCRIPTORS_MAX = 8
PARTS_MAX = 254
FOREVER = math.inf

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN})
_POLL_MILLISECONDS_MAX = 2**31 - 1

# Plain integers: every message needs these flags, and arithmetic with socket's enums takes microseconds.
_TRUNCATED = int(socket.MSG_CTRUNC)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
_ANCILLARY_BYTES_MAX = ancillary_bytes(DESCRIPTORS_MAX)


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class DescriptorsLostError(OSError):
    """A message came without its descriptors, for want of room in this process; the next may be whole."""


class ForeignMessageError(Exception):
    """The received bytes are no message: the other end does not speak this protocol."""


class Channel:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)  # each call says whether it waits
        self._buffer = memoryview(bytearray(MESSAGE_BYTES_MAX))
        self._buffers = [self._buffer]
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Make two connected ends, which are not channels yet."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(
        self,
        message: Message,
        descriptors: Sequence[int] = (),
        deadline: float = FOREVER,
        while_full: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; the receiver gets duplicates of the descriptors.

        Args:
            while_full: called repeatedly while the other end takes nothing, so that the caller can read the
              messages that the other end has to send first.

        Raises:
            ChannelClosedError: the other end is gone.
            TimeoutError: the other end has taken nothing until `deadline` (of `time.monotonic`).
            OSError: the system has no room for the message.
            PlainDataError: a part is of a type that does not travel.
        """
        data = _encoded(message)
        if len(data) <= MESSAGE_BYTES_MAX:
            self._send(data, descriptors, deadline, while_full)
            return
        with _file_with(data) as file:
            self._send(_LONG, [*descriptors, file], deadline, while_full)

    def receive(self, deadline: float = FOREVER) -> tuple[Message, list[int]]:
        """Return the next message, with descriptors that now belong to the caller.

        Raises:
            ChannelClosedError: the other end is gone, and everything it sent was received.
            TimeoutError: no message came until `deadline` (of `time.monotonic`).
            DescriptorsLostError: there was no room for the descriptors of this message, which is lost.
            ForeignMessageError: the received bytes are no message.
        """
        if deadline != FOREVER and not self._readable.poll(_milliseconds(deadline)):
            raise TimeoutError("no message until the deadline")
        try:
            size, ancillary, flags, _ = despite_reset(self._receive)
        except OSError as error:
            raise ChannelClosedError("the other end is gone") from error
        if not size:
            raise ChannelClosedError("the other end is gone")
        descriptors = descriptors_in(ancillary) if ancillary else []
        if flags & _TRUNCATED:
            for descriptor in descriptors:
                os.close(descriptor)
            raise DescriptorsLostError(
                errno.EMFILE,
                "Too many open files: none is left for what was received; raise the limit (ulimit -n)",
            )
        try:
            return _decoded(bytes(self._buffer[:size]), descriptors), descriptors
        except ForeignMessageError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_ready(self) -> bool:
        """Do as `has_message`, for the thread that receives: it needs no poller of its own."""
        return bool(self._readable.poll(0))

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise at once; False once this end is closed."""
        return bool(self._poll(select.POLLIN, 0))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _receive(self) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        return self._socket.recvmsg_into(self._buffers, _ANCILLARY_BYTES_MAX, _CLOSE_ON_EXEC)

    def _send(
        self,
        data: bytes,
        descriptors: Sequence[int],
        deadline: float,
        while_full: Callable[[], None] | None,
    ) -> None:
        while True:
            try:
                if descriptors:
                    send_descriptors(self._socket, data, descriptors, socket.MSG_DONTWAIT)
                else:
                    self._socket.send(data, _DO_NOT_WAIT)
                return
            except BlockingIOError:
                if while_full is not None:
                    while_full()
                self._await(select.POLLOUT | (select.POLLIN if while_full else 0), deadline)
            except OSError as error:
                if self._socket.fileno() >= 0 and error.errno not in _GONE:
                    raise
                raise ChannelClosedError("the other end is gone") from error

    def _await(self, events: int, deadline: float) -> None:
        if not self._poll(events, _milliseconds(deadline)) and self._socket.fileno() >= 0:
            raise TimeoutError("the other end takes no messages")

    def _poll(self, events: int, timeout_ms: float | None) -> list[tuple[int, int]]:
        """Poll without the poller in which `receive` may wait; return nothing once this end is closed."""
        if (descriptor := self._socket.fileno()) < 0:
            return []
        traffic = select.poll()
        traffic.register(descriptor, events)
        return traffic.poll(timeout_ms)


_HEAD = struct.Struct("<qqB")  # the two numbers of a message, and how many parts follow
_ONLY_BYTES = 255  # in that place: one part follows, which is bytes
_LONG = b"\x00"  # stands for a message that is in a file
_LONG_BYTES_MAX = _HEAD.size + CALLS.limits.structure_bytes


def _encoded(message: Message) -> bytes:
    if len(message) == 2:
        return _HEAD.pack(*message, 0)
    if len(message) == 3 and type(message[2]) is bytes:
        return _HEAD.pack(message[0], message[1], _ONLY_BYTES) + message[2]
    first, second, *parts = message
    return _HEAD.pack(first, second, len(parts)) + encode(parts)


def _decoded(data: bytes, descriptors: list[int]) -> Message:
    """Decode a message; take the file of a long one off `descriptors`."""
    try:
        if data == _LONG:
            data = _take_file(descriptors.pop())
        first, second, count = _HEAD.unpack_from(data)
        if not count and len(data) == _HEAD.size:
            return first, second
        if count == _ONLY_BYTES:
            return first, second, data[_HEAD.size :]
        return first, second, *decode(data, _HEAD.size, count)
    except (PlainDataError, struct.error, IndexError, ValueError, OSError, MemoryError) as error:
        raise ForeignMessageError(f"{len(data)} bytes that are no message: {error}") from error


def _milliseconds(deadline: float) -> float | None:
    if deadline == FOREVER:
        return None
    return min(max(0.0, deadline - time.monotonic()) * 1000, _POLL_MILLISECONDS_MAX)


@contextlib.contextmanager
def _file_with(data: bytes) -> Any:
    file = os.memfd_create("torchft-message")
    try:
        os.truncate(file, len(data))
        with mmap.mmap(file, len(data)) as content:
            content[:] = data
        yield file
    finally:
        os.close(file)


def _take_file(file: int) -> bytes:
    try:
        if (nbytes := os.fstat(file).st_size) > _LONG_BYTES_MAX:
            raise ValueError(f"a file of {nbytes} bytes")
        with mmap.mmap(file, 0, prot=mmap.PROT_READ) as content:
            return bytes(content)
    finally:
        os.close(file)
