"""TCP connections to peers, and whether a peer answers at all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable

from lighthouse.address import Address
from lighthouse.forks import disown
from lighthouse.tls import connecting

_NO_WAY_THERE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


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


async def resolve(address: Address, timeout_s: float) -> tuple[Address, ...]:
    """Return all addresses of the name; none if the name server gives none within `timeout_s` seconds."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.host)
        return (address,)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:  # a TimeoutError is an OSError
        return ()
    return tuple(Address(host, address.port) for host in sorted({str(target[0]) for *_, target in found}))


async def answers_tcp(addresses: Iterable[Address], timeout_s: float) -> bool:
    """Return whether any of these addresses answers a connection attempt within `timeout_s` seconds, be it by
    a refusal.

    A failure on this host, such as a lack of descriptors, says nothing about the peer, and counts as an
    answer.
    """
    attempts = [asyncio.ensure_future(_answers_tcp(address, timeout_s)) for address in addresses]
    try:
        for answer in asyncio.as_completed(attempts):
            if await answer:
                return True
        return False
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _answers_tcp(address: Address, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NO_WAY_THERE
    writer.transport.abort()
    return True
