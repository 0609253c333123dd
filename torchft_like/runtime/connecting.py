"""TCP connections to peers."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable

from lighthouse.address import Address
from lighthouse.forks import disown
from lighthouse.listening import refuse_itself
from lighthouse.tls import connecting

RECONNECT_S = 0.02
# The server does not listen yet, or this host has no such addresses: another address, or a later attempt, may
# work.
REFUSED = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


def connect_tcp(
    address: Address,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda _: None,
    *,
    is_plain: bool = False,
    refused_s: float = 0.0,
    disowns: bool = True,
) -> socket.socket:
    """Connect a TCP socket, with TLS if this process has a certificate and it is not to be plain; the
    connection, and each later operation on it, takes `timeout_s` seconds at most.

    Args:
        on_socket: sees a socket before it connects, so that another thread can end even that with `shut`.
        refused_s: for how many seconds this tries again where no address accepts: its server may begin soon.
        disowns: whether forks lose all connections to the address.

    Raises:
        OSError: the name does not resolve or no address answers; the error of the last address tried. An
          ssl.SSLError is one, too: the other end is not of this job.
        ConfigError: this process's certificate cannot be read.
    """
    failure, until = OSError(f"{address} has no address"), time.monotonic() + refused_s
    if disowns:
        disown(address)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    while True:
        for family, kind, proto, _, target in found:
            connection = socket.socket(family, kind, proto)
            if not is_plain:
                connection = connecting(connection)
            try:
                connection.settimeout(timeout_s)
                on_socket(connection)
                connection.connect(target)
                refuse_itself(connection)
                return connection
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        if failure.errno not in REFUSED or time.monotonic() + RECONNECT_S > until:
            raise failure
        time.sleep(RECONNECT_S)


def shut(connection: socket.socket) -> None:
    """End every operation on a socket that another thread may be in, which has to close it."""
    with contextlib.suppress(OSError):  # it is not connected yet, or has ended by itself
        # Not SSLSocket's own, after which the other thread would go on without TLS.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
