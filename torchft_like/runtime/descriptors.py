"""File descriptors over a Unix socket. The socket module's own functions for this ignore their flags."""

from __future__ import annotations

import array
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_BYTES = array.array("i").itemsize

Ancillary = Iterable[tuple[int, int, bytes]]


def send_descriptors(end: socket.socket, data: bytes, descriptors: Sequence[int], flags: int = 0) -> None:
    """Send a message; its receiver gets duplicates of the descriptors."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    end.sendmsg([data], [rights], flags)


def receive_descriptors(
    end: socket.socket, bytes_max: int, descriptors_max: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Receive a message, and descriptors that belong to the caller and to no program that it starts."""
    room = ancillary_bytes(descriptors_max)
    data, ancillary, _, _ = end.recvmsg(bytes_max, room, flags | socket.MSG_CMSG_CLOEXEC)
    return data, descriptors_in(ancillary)


def despite_reset(receive: Callable[[], T]) -> T:
    """Return `receive()`, even if the peer is gone and had left something unread.

    The system then reports a reset once, before the data that the peer had sent.
    """
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def ancillary_bytes(descriptors_max: int) -> int:
    """Return the room that this many descriptors need beside a message."""
    return socket.CMSG_SPACE(descriptors_max * _BYTES)


def descriptors_in(ancillary: Ancillary) -> list[int]:
    """Return the descriptors that came beside a message."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % _BYTES])
    return list(found)
