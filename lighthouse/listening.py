"""Listening TCP sockets, why there can be none, and whether a peer has one."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from typing import cast

from lighthouse.address import Address, is_loopback
from lighthouse.errors import BindError
from lighthouse.forks import disown
from lighthouse.trust import refuse_if_open, warn_if_open

_EVERY_ADDRESS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
# Addresses for documentation, which are nobody's: the route there is the default one.
ANYWHERE = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
DESCRIPTORS_KEPT = 256  # for everything but clients' connections, the lighthouse's page among it
CALLERS_MAX = 64  # that find out at one time whether a process exists; who is refused knows it, too
CALL_BYTES_MAX = 64 * 1024  # of one of them, many times the longest greeting
_ANSWER_S, _ASK_EVERY_S = 1.0, 0.1


def listen_tcp(bind: Address) -> socket.socket:
    """Make a listening TCP socket for an HTTP server; port 0 takes a free one.

    Raises:
        BindError: the address is in use or not of this host.
    """
    try:
        family, host = _where(bind)
        # As gRPC does, every address of this host is taken to mean those of IPv4, too.
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, bind.port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise bind_error(bind, error) from error
    disown(Address(bind.host, listener.getsockname()[1]))
    return listener


def place_of(bind: Address) -> Address:
    """Return where a server listens that others find under the host of `bind`.

    A name of this host may be loopback here and nowhere else, as Debian has it (127.0.1.1): that is every
    address of this host.

    Raises:
        OSError: the name does not resolve.
    """
    _, host = _where(bind)
    return Address(host, bind.port) if host in _EVERY_ADDRESS.values() else bind


def _where(bind: Address) -> tuple[socket.AddressFamily, str]:
    found = socket.getaddrinfo(bind.host or None, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    host = str(target[0])
    if not is_loopback(host) or is_loopback(bind.host):
        return family, host
    # On a host from which only IPv6 leads away others find the name there. It takes those of IPv4, too.
    if not _leads_away(socket.AF_INET) and _leads_away(socket.AF_INET6):
        family = socket.AF_INET6
    return family, _EVERY_ADDRESS[family]


def _leads_away(family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex((ANYWHERE[family], 9)) == 0
    except OSError:  # this host does without the family
        return False


def listen_guarded(bind: Address) -> socket.socket:
    """Make a listening TCP socket, as `listen_tcp` does, for a server that asks for the job's tokens or
    certificate; warn where there are none and other hosts may reach it.

    Raises:
        BindError: the address is in use or not of this host.
        ConfigError: as from `refuse_if_open`.
    """
    refuse_if_open(bind)
    listener = listen_tcp(bind)
    warn_if_open(Address(bind.host, listener.getsockname()[1]))
    return listener


def bind_error(bind: Address, cause: Exception | None) -> BindError:
    """Make the error for a server that cannot listen at `bind`, with the system's reason if there is one."""
    reason = cause.strerror if isinstance(cause, OSError) else why_unbindable(bind)
    other = "or port 0 for any free port"
    if bind.port == 0:
        other = "or if no port is free more of them (net.ipv4.ip_local_port_range)"
    return BindError(
        f"cannot listen on {bind}: {reason or 'the system gave no reason'}; choose another address, {other}"
    )


def why_unbindable(bind: Address) -> str | None:
    """Return the system's reason against listening there; None if it has none."""
    try:
        family, host = _where(bind)
        with socket.socket(family) as probe:
            # The probe does as gRPC does: a port on which only old connections linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, bind.port))
    except OSError as error:
        return error.strerror or str(error)
    return None


async def why_unreachable(address: Address, timeout_s: float, greeting: bytes = b"") -> OSError | None:
    """Return why a connection fails, a TimeoutError after so many seconds; None where a process listens.

    Args:
        greeting: what is sent, and must arrive at the host, if a few kilobytes are to show that large packets
            do: then its kernel has confirmed it, whatever the process does.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
            refuse_itself(writer.get_extra_info("socket"))
            if greeting:
                # The least that a kernel takes is less than the greeting: one byte more has to wait until
                # that is confirmed.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                writer.transport.set_write_buffer_limits(0)
                writer.write(greeting)
                writer.write(b"\0")
                await writer.drain()
    except (ConnectionResetError, BrokenPipeError):
        return None  # that ends a connection which a process has accepted: it takes no more, or no greeting
    except OSError as error:  # a TimeoutError is one, too
        return error
    finally:
        if writer is not None:
            writer.transport.abort()
    return None


def refuse_itself(connection: socket.socket) -> None:
    """Raise a ConnectionRefusedError where the system has chosen the port, at which nobody listens, as this
    end's own. The port is free at once when that is closed: somebody may wait to listen there.
    """
    try:
        is_own = connection.getsockname() == connection.getpeername()
    except OSError:  # the other end has reset it by now
        return
    if is_own:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the connection is to itself")


class SignOfLife:
    """A listening TCP socket at which others find out whether this process exists, and whether they reach
    this host. What they send is read, and nothing is said.

    The kernel takes connections where the process is busy or stopped, too, and none once it has ended.

    Raises:
        BindError: the address is in use or not of this host.
    """

    def __init__(self, bind: Address) -> None:
        self._socket = listen_tcp(bind)
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Transport] = set()
        self.address = Address(bind.host, self._socket.getsockname()[1])

    async def take_calls(self) -> None:
        """Read what comes from now on, on the running loop: else a full queue would take nothing more."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Call(self._callers), sock=self._socket)

    def close(self) -> None:
        """Refuse connections from now on; safe to call again. On the loop, if it takes calls."""
        (self._server or self._socket).close()
        for caller in list(self._callers):
            caller.abort()


class _Call(asyncio.Protocol):
    def __init__(self, callers: set[asyncio.Transport]) -> None:
        self._callers = callers
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._callers.add(self._transport)
        if len(self._callers) > CALLERS_MAX:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > CALL_BYTES_MAX:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._callers.discard(self._transport)


async def until_refused(address: Address) -> None:
    """Return once the host answers that no process listens at this address; never, as long as one does.

    Between two questions a connection stays open: the kernel ends it together with the process, even one that
    is stopped and accepts nothing.
    """
    disown(address)
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except ConnectionRefusedError:
            return
        except OSError:  # no answer says nothing; a TimeoutError is one, too
            pass
        else:
            try:
                await reader.read()
            except OSError:
                pass
            finally:
                writer.close()
        await asyncio.sleep(_ASK_EVERY_S)
