"""The one module that makes channels, servers and listeners.

Every other module that uses the network asks this one, so that tokens and certificates are asked for and
shown in one place and the liveness settings are the same everywhere.

Liveness is HTTP/2 keepalive: PINGs sent and answered by gRPC's native threads. No Python runs on
either side, so a trainer that holds the GIL for seconds is not taken for dead, and a stopped process
or a host that is gone is found within `Keepalive.time_ms + Keepalive.timeout_ms`.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from lighthouse.address import Address
from lighthouse.core.config import MESSAGE_BYTES_MAX
from lighthouse.core.trust import Role, digest_of
from lighthouse.errors import ConfigError
from lighthouse.forks import disown
from lighthouse.grpc_forks import prepare_for_forks
from lighthouse.listening import DESCRIPTORS_KEPT, bind_error, place_of, why_unbindable
from lighthouse.tls import NAME, Identity, process_identity
from lighthouse.trust import ROLES, authorization, process_trust, refuse_if_open, warn_if_open

prepare_for_forks()
_KEEPALIVE_MS_MIN = 10
AUTHORIZATION = "authorization"
DISTRUST = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@dataclass(frozen=True)
class Keepalive:
    """How many milliseconds a connection may be silent before a probe, and a probe unanswered."""

    time_ms: int = 500
    timeout_ms: int = 500

    @property
    def notice_s(self) -> float:
        """How long a connection may be dead before it is noticed, in seconds."""
        return (self.time_ms + self.timeout_ms) / 1000

    def options(self) -> list[tuple[str, int]]:
        """Return gRPC channel arguments; gRPC obeys `ping_timeout_ms`, of which the default is 60 s."""
        return [
            ("grpc.keepalive_time_ms", self.time_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


def default_keepalive() -> Keepalive:
    """Return how this process's clients and its ManagerServer watch their connections; the lighthouse has
    flags.

    Raises:
        ConfigError: a variable, TORCHFT_KEEPALIVE_TIME_MS or TORCHFT_KEEPALIVE_TIMEOUT_MS, is no whole number
            of 10 or more.
    """
    given = {}
    for field in fields(Keepalive):
        variable = f"TORCHFT_KEEPALIVE_{field.name.upper()}"
        if text := os.environ.get(variable):
            if not text.isdecimal() or int(text) < _KEEPALIVE_MS_MIN:
                raise ConfigError(
                    f"the environment variable {variable} is {text!r:.100}: it must be a whole number of "
                    f"milliseconds, {_KEEPALIVE_MS_MIN} or more"
                )
            given[field.name] = int(text)
    return Keepalive(**given)


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
        connections = max(1, min(self.connections, files - DESCRIPTORS_KEPT))
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

_SERVER_OPTIONS = [
    # With this option two servers would share a port in silence, each with half of the clients.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    # A probe of the bandwidth costs a PING for each small request, and all requests are small.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]

_EXPECTED_NAME = ("grpc.ssl_target_name_override", NAME)

_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    *_MESSAGE_LIMITS,
]


# Settings of HTTP/2, whose number is one that everybody ignores; the beginning of a long first record of TLS.
_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x0f\xf0\x04" + bytes(5) + 680 * b"\xfa\xfa\0\0\0\0"
_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(4096)


def long_greeting() -> bytes:
    """Return some 4 kB with which a client may begin: a server waits for more, and logs nothing where the
    connection ends then.
    """
    return _SETTINGS if process_identity() is None else _HELLO


def make_channel(address: Address) -> grpc.Channel:
    """Make a blocking channel, which connects lazily and reconnects by itself."""
    channel: grpc.Channel = _channel(grpc, address, default_keepalive())
    return channel


def make_aio_channel(address: Address, keepalive: Keepalive | None = None) -> grpc.aio.Channel:
    """Make an asyncio channel; call this on the loop that will use the channel."""
    channel: grpc.aio.Channel = _channel(grpc.aio, address, keepalive or default_keepalive())
    return channel


def _channel(kind: Any, address: Address, keepalive: Keepalive) -> Any:
    disown(address)
    options = [*_CHANNEL_OPTIONS, *keepalive.options()]
    if (own := process_identity()) is None:
        return kind.insecure_channel(str(address), options)
    shown = grpc.ssl_channel_credentials(own.authorities, own.key, own.certificate)
    return kind.secure_channel(str(address), shown, [*options, _EXPECTED_NAME])


def _server_credentials(known: Identity) -> grpc.ServerCredentials:
    """Return credentials that follow this process's certificate: gRPC asks for it with each connection."""

    def configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
        pair = identity.key, identity.certificate
        return grpc.ssl_server_certificate_configuration([pair], identity.authorities)

    def fetch() -> Any:
        nonlocal known
        if (identity := process_identity()) is None or identity is known:
            return None
        known = identity
        return configuration(identity)

    return grpc.dynamic_ssl_server_credentials(
        configuration(known), fetch, require_client_authentication=True
    )


def unary(
    channel: grpc.Channel | grpc.aio.Channel,
    method: str,
    request_type: Any,
    response_type: Any,
    token: str | None = None,
) -> Callable[..., Any]:
    """Return a unary method of a channel, which shows a token with each call: this process's, or the one
    given, of which "" is none.
    """
    call: Any = channel.unary_unary(
        method,
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    return functools.partial(call, metadata=credentials(token))


def credentials(token: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a call shows this process's token, or the one given."""
    header = authorization() if token is None else token and f"Bearer {token}"
    return ((AUTHORIZATION, header),) if header else ()


def make_aio_server(
    bind: Address,
    handlers: Sequence[grpc.GenericRpcHandler[Any, Any]],
    limits: ServerLimits,
    keepalive: Keepalive | None = None,
    own_token: str = "",
) -> tuple[grpc.aio.Server, Address]:
    """Make an asyncio server, bound but not started; return it and the address with the port that it got.

    If this process has tokens, every call has to show one. `own_token` gives all roles, too, here only. If it
    has a certificate, every client has to show one.

    Raises:
        BindError: the address is in use or not of this host.
        ConfigError: this process's tokens or certificate cannot be read.
    """
    if why_unbindable(bind) is not None:  # checked first, because a failing gRPC logs lines of its own
        raise bind_error(bind, None)
    options = [*_SERVER_OPTIONS, *limits.options(), *(keepalive or default_keepalive()).options()]
    refuse_if_open(bind)
    guards = [_Guard(own_token)] if process_trust() is not None else []
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.calls, interceptors=guards)
    server.add_generic_rpc_handlers(tuple(handlers))
    identity = process_identity()
    try:
        place = str(place_of(bind))
        port = (
            server.add_insecure_port(place)
            if identity is None
            else server.add_secure_port(place, _server_credentials(identity))
        )
    except (OSError, RuntimeError) as error:
        raise bind_error(bind, error) from error
    if port == 0:
        raise bind_error(bind, None)
    disown(bound := Address(bind.host, port))
    warn_if_open(bound)
    return server, bound


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The check of every call's token, before its handler, or any byte of its messages, is looked at."""

    def __init__(self, own_token: str) -> None:
        self._own = digest_of(own_token) if own_token else b""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call, or one that refuses it."""
        trust, wanted = process_trust(), ROLES.get(call.method, Role.OPERATE)
        header = next((str(value) for key, value in call.invocation_metadata if key == AUTHORIZATION), "")
        role = trust.role_of_header(header, self._own) if trust is not None else Role.STRANGER
        handler = await continuation(call)
        if role >= wanted or handler is None:
            return handler
        return _refusing(handler, role, wanted)


def _refusing(handler: Any, role: Role, wanted: Role) -> Any:
    code, text = (
        grpc.StatusCode.UNAUTHENTICATED,
        "it asks for a token of the job, and none that is valid came",
    )
    if role:
        code = grpc.StatusCode.PERMISSION_DENIED
        text = f"that takes the token of those who {wanted.name.lower()}; this one is to {role.name.lower()}"

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, f"{text} (TORCHFT_TOKEN_FILE)")

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the IP address from which a call comes, "" if it has none."""
    _, _, place = unquote(context.peer()).partition(":")
    return place.rpartition(":")[0].strip("[]")


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as the system allows: each client needs one.

    Returns:
        The new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
