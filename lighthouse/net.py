"""The one module that makes channels, servers and listeners.

Every other module that uses the network asks this one, so that credentials can be added in one place
and the liveness settings are the same everywhere.

Liveness is HTTP/2 keepalive: PINGs sent and answered by gRPC's native threads. No Python runs on
either side, so a trainer that holds the GIL for seconds is not taken for dead, and a stopped process
or a host that is gone is found within `Keepalive.time_ms + Keepalive.timeout_ms`.

All asyncio work of this process runs on one thread (`coordination_loop`): gRPC's asyncio stack
shares a single completion queue per process and is not at ease with several event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from lighthouse.address import Address
from lighthouse.config import MESSAGE_BYTES_MAX
from lighthouse.errors import BindError, ForkError
from lighthouse.forks import Turn, disown, in_each_fork, keep_for_ever, lock_of_each_process
from lighthouse.grpc_forks import prepare_for_forks

T = TypeVar("T")
prepare_for_forks()
_DESCRIPTORS_KEPT = 128  # descriptors for everything but clients' connections


@dataclass(frozen=True)
class Keepalive:
    """How long a connection may be silent before it is probed, and a probe unanswered, both in
    milliseconds.
    """

    time_ms: int = 500
    timeout_ms: int = 500

    def options(self) -> list[tuple[str, int]]:
        """Return gRPC channel arguments; gRPC obeys `ping_timeout_ms`, of which the default is 60 s."""
        return [
            ("grpc.keepalive_time_ms", self.time_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


DEFAULT_KEEPALIVE = Keepalive()


@dataclass(frozen=True)
class ServerLimits:
    """What clients may use up of a server. More is refused, without a disturbance of other clients.

    Attributes:
        connections: open at a time; fewer where the process may not open as many files.
        calls: open at a time, on all connections together.
        streams: open at a time on one connection; others wait on the client's side.
        request_bytes: the longest message that is taken.
        handshake_s: seconds after which a connection that has not begun to speak HTTP/2 is closed.
        idle_s: seconds after which a connection without a call is closed.
    """

    connections: int = 2000
    calls: int = 2000
    streams: int = 250
    request_bytes: int = 1024 * 1024
    handshake_s: float = 5.0
    idle_s: float = 300.0

    def options(self) -> list[tuple[str, int]]:
        """Return gRPC channel arguments."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Some descriptors are kept back: without any this process could not even open a file.
        connections = max(1, min(self.connections, files - _DESCRIPTORS_KEPT))
        return [
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_receive_message_length", self.request_bytes),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
        ]


_MESSAGE_LIMITS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]

_NO_WAY_THERE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)

_SERVER_OPTIONS = [
    # With this option two servers would share a port in silence, each with half of the clients.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    # A probe of the bandwidth costs a PING for each small request, and all requests are small.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]

_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    *_MESSAGE_LIMITS,
]


def make_channel(address: Address, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> grpc.Channel:
    """Make a blocking channel, which connects lazily and reconnects by itself."""
    disown(address)
    return grpc.insecure_channel(str(address), options=[*_CHANNEL_OPTIONS, *keepalive.options()])


def make_aio_channel(address: Address, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> grpc.aio.Channel:
    """Make an asyncio channel; call this on the loop that will use the channel."""
    disown(address)
    return grpc.aio.insecure_channel(str(address), options=[*_CHANNEL_OPTIONS, *keepalive.options()])


def make_aio_server(
    bind: Address,
    handlers: Sequence[grpc.GenericRpcHandler[Any, Any]],
    limits: ServerLimits,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
) -> tuple[grpc.aio.Server, Address]:
    """Make an asyncio server, bound but not started; return it and the address with the port that it got.

    Raises:
        BindError: the address is in use or not of this host.
    """
    if _why_unbindable(bind) is not None:  # checked first, because a failing gRPC logs lines of its own
        raise bind_error(bind, None)
    options = [*_SERVER_OPTIONS, *limits.options(), *keepalive.options()]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.calls)
    server.add_generic_rpc_handlers(tuple(handlers))
    try:
        port = server.add_insecure_port(str(bind))
    except RuntimeError as error:
        raise bind_error(bind, error) from error
    if port == 0:
        raise bind_error(bind, None)
    disown(bound := Address(bind.host, port))
    return server, bound


def listen_tcp(bind: Address) -> socket.socket:
    """Make a listening TCP socket for an HTTP server; port 0 takes a free one.

    Raises:
        BindError: the address is in use or not of this host.
    """
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    try:
        listener = socket.create_server((bind.host, bind.port), family=family)
    except OSError as error:
        raise bind_error(bind, error) from error
    disown(Address(bind.host, listener.getsockname()[1]))
    return listener


def connect_tcp(
    address: Address, timeout_s: float, on_socket: Callable[[socket.socket], None] = lambda _: None
) -> socket.socket:
    """Connect a TCP socket; the connection, and each later operation on it, takes `timeout_s` seconds at
    most.

    `on_socket` sees a socket before it connects, so that another thread can end even that with
    `shutdown`.

    Raises:
        OSError: the name does not resolve or no address answers; the error of the last address tried.
    """
    failure: OSError | None = None
    disown(address)
    for family, kind, proto, _, target in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, proto)
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


async def resolve(address: Address, timeout_s: float) -> tuple[Address, ...]:
    """Return all addresses of the name; none if the name server gives none within `timeout_s` seconds."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.host)
        return (address,)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:  # of which a TimeoutError is one
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


def bind_error(bind: Address, cause: Exception | None) -> BindError:
    """Make the error for a server that cannot listen at `bind`, with the system's reason if there is one."""
    reason = cause.strerror if isinstance(cause, OSError) else _why_unbindable(bind)
    reason = reason or "the system gave no reason"
    return BindError(
        f"cannot listen on {bind}: {reason}; choose another address, or port 0 for any free port"
    )


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as the system allows: each client needs one.

    Returns:
        The new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _why_unbindable(bind: Address) -> str | None:
    """Return the system's reason against listening there; None if it has none."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            # The probe does as gRPC does: a port on which only old connections linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        return error.strerror or str(error)
    return None


class LoopThread:
    """An asyncio loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run the coroutine on the loop and wait for its result; never call this from the loop's own thread.

        Raises:
            ForkError: this process is a fork of the one that has the thread.
        """
        if self._process != os.getpid():
            coroutine.close()
            raise ForkError(
                f"process {self._process} made this before it forked process {os.getpid()}, which has none "
                "of its threads: make a Manager, a server or a client in the process that uses it"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def is_current(self) -> bool:
        """Return whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_loop_thread: LoopThread | None = None
_loop_thread_lock = lock_of_each_process()


def coordination_loop() -> LoopThread:
    """Return the loop thread that every asyncio server and client of this process shares."""
    global _loop_thread  # noqa: PLW0603 - one per process
    with _loop_thread_lock:
        if _loop_thread is None:
            _loop_thread = LoopThread("torchft-coordination")
        return _loop_thread


def _leave_loop_to_parent() -> None:
    global _loop_thread  # noqa: PLW0603 - one per process
    if _loop_thread is not None:
        keep_for_ever(_loop_thread)  # its tasks would act as they are destroyed
        _loop_thread = None


in_each_fork(Turn.OBJECTS, _leave_loop_to_parent)
