"""A TCP relay that stands between a server and its clients and changes what the server answers.

It can cut an answer short, flip a bit of it or report when a part of it was sent, in any protocol. A filter
changes the answer; one is made for each connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 64 * 1024


class AnswerCutError(Exception):
    """A filter raises this with the bytes that are sent before both connections are closed, if any."""


Filter = Callable[[bytes], bytes]


class Relay:
    """A server on a port of its own, beside the target, until the process ends.

    Args:
        target: the host and the port of the server.
        open_filter: called for every connection; what it returns is called with each piece of the
            answer, on a thread of that connection, and returns what to send instead.
        request: a filter of what the clients send, on all connections.
    """

    def __init__(
        self, target: tuple[str, int], open_filter: Callable[[], Filter], request: Filter = bytes
    ) -> None:
        self._target = target
        self._request = request
        self._open_filter = open_filter
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        self._listener = socket.create_server((target[0], 0), family=family)
        self.port: int = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._target)
            except OSError:  # the client notices that this closes its connection
                client.close()
                continue
            answer = self._open_filter()
            back = threading.Thread(target=self._serve, args=(client, server, answer), daemon=True)
            back.start()

    def _serve(self, client: socket.socket, server: socket.socket, answer: Filter) -> None:
        """Carry both directions; the second thread ends with this one, as both sockets end here."""
        there = threading.Thread(target=_copy, args=(client, server, self._request), daemon=True)
        there.start()
        with client, server:
            _copy(server, client, answer)
            for end in (client, server):
                with contextlib.suppress(OSError):  # it was closed already
                    end.shutdown(socket.SHUT_RDWR)
            there.join()


def at(offset_bytes: int, act: Filter) -> Filter:
    """Make a filter that calls `act` once, with the piece of the answer that begins at this offset.

    The bytes before it, and after that piece, pass unchanged.
    """
    passed = 0

    def find(data: bytes) -> bytes:
        nonlocal passed
        here, passed = offset_bytes - passed, passed + len(data)
        if not 0 <= here < len(data):
            return data
        try:
            return data[:here] + act(data[here:])
        except AnswerCutError:
            raise AnswerCutError(data[:here]) from None

    return find


def cut(_: bytes) -> bytes:
    """Close the connections here."""
    raise AnswerCutError


def flip_bit(data: bytes) -> bytes:
    """Flip one bit of the first byte."""
    return bytes([data[0] ^ 1]) + data[1:]


def _copy(source: socket.socket, target: socket.socket, change: Filter) -> None:
    with contextlib.suppress(OSError):  # either side may close the connection at any time
        try:
            while data := source.recv(CHUNK_BYTES):
                target.sendall(change(data))
        except AnswerCutError as end:
            target.sendall(b"".join(end.args))
        target.shutdown(socket.SHUT_WR)
