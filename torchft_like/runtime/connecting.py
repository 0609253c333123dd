"""TCP connections to peers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from lighthouse.address import Address
from lighthouse.forks import disown
from lighthouse.tls import connecting


def connect_tcp(
    address: Address,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda _: None,
    *,
    is_plain: bool = False,
) -> socket.socket:
    """Connect a TCP socket, with TLS if this process has a certificate and it is not to be plain; the
    connection, and each later operation on it, takes `timeout_s` seconds at most.

    `on_socket` sees a socket before it connects, so that another thread can end even that with
    `shutdown`.

    Raises:
        OSError: the name does not resolve or no address answers; the error of the last address tried. An
          ssl.SSLError is one, too: the other end is not of this job.
        ConfigError: this process's certificate cannot be read.
    """
    failure: OSError | None = None
    disown(address)
    for family, kind, proto, _, target in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, proto)
        if not is_plain:
            connection = connecting(connection)
        try:
            connection.settimeout(timeout_s)
            on_socket(connection)
            connection.connect(target)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
    raise failure or OSError(f"{address} has no address")


def shut(connection: socket.socket) -> None:
    """End every operation on a socket that another thread may be in, which has to close it."""
    with contextlib.suppress(OSError):  # it is not connected yet, or has ended by itself
        # Not SSLSocket's own, after which the other thread would go on without TLS.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
