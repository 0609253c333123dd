"""Ports for those who have to be told one before they listen."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

from lighthouse.address import LOOPBACK


def free_ports(count: int = 1) -> list[int]:
    """Return ports of loopback in a row, at which nobody listens.

    For a minute the kernel gives them only to who names them: the end of a connection to each waits there
    (TIME_WAIT). Else another process on this machine may get one before it is used.
    """
    while True:
        with ExitStack() as stack, suppress(OSError):
            first = stack.enter_context(socket.create_server((LOOPBACK, 0)))
            port = first.getsockname()[1]
            more = [socket.create_server((LOOPBACK, port + number)) for number in range(1, count)]
            for listener in (first, *map(stack.enter_context, more)):
                with socket.create_connection(listener.getsockname()) as client:
                    listener.accept()[0].close()  # the one that closes first waits
                    client.recv(1)
            return [port + number for number in range(count)]
