"""The HTTP server of the page, uvicorn, in the lighthouse's own event loop and at a port of its own.

gRPC for Python hands no connection out that speaks HTTP/1.1, so one port for both would need a proxy in front
of every session, whose PINGs then say nothing of the replica behind it. docs/lighthouse-page.md has more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lighthouse.address import Address
from lighthouse.errors import ConfigError
from lighthouse.listening import listen_tcp
from lighthouse.net import DESCRIPTORS_KEPT
from lighthouse.page.app import Page
from lighthouse.tls import page_context, scheme
from lighthouse.trust import process_trust, warn_if_open

if TYPE_CHECKING:
    from lighthouse.server import Lighthouse

# Together they are fewer than the descriptors that are kept from sessions: asyncio takes all that the kernel
# has for it before it closes one.
CONNECTIONS_MAX = DESCRIPTORS_KEPT * 3 // 8
HANDSHAKES_MAX = BACKLOG = DESCRIPTORS_KEPT // 4
SILENT_S = 10.0  # seconds in which a connection has to bring a whole request, again and again
_KEEP_ALIVE_S = 10
_STOP_GRACE_S = 1


class PageServer:
    """The page of a lighthouse, until `stop`."""

    def __init__(self, server: uvicorn.Server, address: Address, task: asyncio.Task[None]) -> None:
        self.address = address
        self.url = f"{scheme()}://{address}"
        self._server = server
        self._task = task

    @classmethod
    async def start(
        cls, lighthouse: Lighthouse, bind: Address, *, everybody_operates: bool = False
    ) -> PageServer:
        """Serve at `bind`; port 0 takes a free one.

        Raises:
            BindError: the address is in use or not of this host.
            ConfigError: everybody is to operate a lighthouse that asks for tokens.
        """
        if everybody_operates and process_trust() is not None:
            raise ConfigError("--page_operators=everybody and a token (TORCHFT_TOKEN_FILE): leave one out")
        warn_if_open(bind)
        listener = _Listener(listen_tcp(bind))
        config = uvicorn.Config(
            Page(lighthouse, everybody_operates=everybody_operates),
            http=functools.partial(_BoundedProtocol, listener),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = page_context(asks=process_trust() is None)
        server = _Server(config)
        task = asyncio.get_running_loop().create_task(server.serve([listener]))
        return cls(server, Address(bind.host, listener.getsockname()[1]), task)

    async def stop(self) -> None:
        """Close the port, and every connection once its request is answered."""
        self._server.should_exit = True
        await asyncio.wait([self._task])


class _Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Listener(socket.socket):
    """A listening socket that ends handshakes which take too long; the oldest, if there are too many.

    asyncio tells a protocol of a connection with TLS only after the handshake, for which it gives a stranger
    a minute.
    """

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=listener.detach())
        self._new: dict[int, socket.socket] = {}  # by descriptor, the oldest first

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, which is new until `is_made`."""
        peer, address = super().accept()
        self._new = {number: known for number, known in self._new.items() if known.fileno() == number}
        self._new[peer.fileno()] = peer
        if len(self._new) > HANDSHAKES_MAX:
            self._end_if_new(next(iter(self._new.values())))
        asyncio.get_running_loop().call_later(SILENT_S, self._end_if_new, peer)
        return peer, address

    def is_made(self, descriptor: int) -> None:
        """Note that the protocol has a connection, and limits it from now on."""
        self._new.pop(descriptor, None)

    def _end_if_new(self, peer: socket.socket) -> None:
        if self._new.get(peer.fileno()) is peer:
            del self._new[peer.fileno()]
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


class _BoundedProtocol(H11Protocol):
    """A connection that is closed if it brings no request for too long; the longest silent one, if there are
    too many.

    uvicorn itself lets a client open as many as it likes and say nothing in them; each takes one of the
    descriptors that the lighthouse needs for replicas.
    """

    def __init__(self, listener: _Listener, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.is_made(transport.get_extra_info("socket").fileno())
        self._answered: object = None
        self._heard_at = self.loop.time()
        self._watch = self.loop.call_later(SILENT_S, self._close_if_silent)
        if len(self.connections) > CONNECTIONS_MAX:
            longest: Any = min(self.connections, key=attrgetter("_heard_at"))
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        last: Any = self.cycle  # of request and response; none before the first request
        if last is self._answered:
            self.transport.abort()
            return
        self._answered = last
        self._watch = self.loop.call_later(SILENT_S, self._close_if_silent)
