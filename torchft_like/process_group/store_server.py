"""The server of a store of ours, on the coordination loop; `core/store.py` decides what it stores.

torch's own server asks the name server about each client, lets anybody list its keys and fill it, and keeps
the keys of all quorums for as long as it lives. This one speaks the same protocol, so torch's client and
`AbortableStore` use it alike.

A connection has KEY_S seconds to show a key that the store admits. In a store whose quorums are announced it
is held meanwhile: a member may have been told of a quorum before this process was. Those that have shown
none have places of their own; the one that has been silent longest, for SILENT_S at least, makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import weakref
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import cast

from lighthouse.address import Address
from lighthouse.listening import DESCRIPTORS_KEPT, listen_guarded
from lighthouse.tls import process_identity
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.core.store import (
    MESSAGE_BYTES_MAX,
    Client,
    KeyValueStore,
    Request,
    RequestReader,
    StoreRequestError,
)
from torchft_like.process_group.store import StoreAddress
from torchft_like.runtime.connecting import shut
from torchft_like.runtime.event_loop import coordination_loop

_logger = logging.getLogger(__name__)

KEY_S = 5.0
SILENT_S = 0.25
CONNECTIONS_MAX = 10_000
UNKNOWN_MAX = 256
PARTIAL_BYTES_MAX = 256 * 1024 * 1024  # of requests that have not come as a whole
RETRY_S = 1.0  # after an error of the system, such as a lack of descriptors
WRITE_BYTES = 256 * 1024


class StoreServer:
    """A store that is served until the last reference to this is gone, with TLS if this process has a
    certificate.

    Args:
        bind: where it listens; port 0 takes a free one.
        awaits_quorums: whether only the keys of quorums are admitted that were announced.

    Raises:
        BindError: the address is in use or not of this host.
        ConfigError: this process's tokens or certificate cannot be read; or it has none, and is not to listen
            for other hosts then (TORCHFT_INSECURE=0).
    """

    def __init__(self, bind: Address, *, awaits_quorums: bool = False) -> None:
        is_tls = process_identity() is not None
        listener = listen_guarded(bind)
        bound = Address(bind.host, listener.getsockname()[1])
        self.address: StoreAddress = StoreAddress(bound, is_tls=is_tls)
        self._serving = _Serving(listener, KeyValueStore(awaits_quorums=awaits_quorums))
        self._end = weakref.finalize(self, self._serving.stop)
        self._end.atexit = False

    def announce(self, quorum_id: int, secret: QuorumSecret) -> None:
        """Admit the keys of a quorum, those that show its secret if it has one; called on the loop."""
        self._serving.announce(quorum_id, secret)

    def drop_room(self, prefix: str) -> None:
        """Delete the keys under a prefix of two parts, and end the connections that use them."""
        self._serving.drop_room_soon(prefix)

    def close(self) -> None:
        """Free the port, and end all connections. Safe to call again."""
        self._end()


@contextlib.contextmanager
def serving_store(host: str) -> Iterator[StoreAddress]:
    """Serve a store at a free port of `host` for the time of a block.

    Raises:
        BindError: `host` is not of this machine.
    """
    server = StoreServer(Address(host, 0))
    try:
        yield server.address
    finally:
        server.close()


class _Serving:
    """What serves a store, on the coordination loop, which owns all of it."""

    def __init__(self, listener: socket.socket, store: KeyValueStore) -> None:
        self.store = store
        self.partial_bytes = 0
        self._listener = listener
        self._connections: dict[Client, _Connection] = {}
        # Those that have shown no valid key, the oldest first, and the end of their time.
        self._unknown: dict[_Connection, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._process = os.getpid()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections_max = max(1, min(CONNECTIONS_MAX, files - DESCRIPTORS_KEPT))
        self._loop = coordination_loop().loop
        listener.setblocking(False)
        self._loop.call_soon_threadsafe(self._start)

    def stop(self) -> None:
        """Stop, from any thread, and free the port; the listener is of the process that has made it."""
        if self._process == os.getpid():
            self._loop.call_soon_threadsafe(self._stop)
            shut(self._listener)

    def announce(self, quorum_id: int, secret: QuorumSecret) -> None:
        self.store.announce(quorum_id, secret)
        self.tell()
        for connection in list(self._unknown):
            connection.proceed()

    def drop_room_soon(self, prefix: str) -> None:
        def drop() -> None:
            self.store.drop_room(prefix)
            self.tell()

        self._loop.call_soon_threadsafe(drop)

    def tell(self) -> None:
        """Send the answers that the store has."""
        for client, parts in self.store.take_answers():
            if (connection := self._connections.get(client)) is not None:
                connection.send(parts) if parts is not None else connection.end()

    def doubt(self, connection: _Connection) -> None:
        """Note that a connection has shown no valid key."""
        if connection not in self._unknown:
            self._unknown[connection] = self._loop.call_later(KEY_S, connection.end)

    def trust(self, connection: _Connection) -> None:
        """Note that a connection has shown a valid key."""
        if (end := self._unknown.pop(connection, None)) is not None:
            end.cancel()

    def lost(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self.trust(connection)
        self._connections.pop(connection.client, None)
        self.store.forget(connection.client)

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self) -> None:
        self._accepting = self._run(self._accept())
        self._accepting.add_done_callback(lambda _: self._listener.close())

    def _stop(self) -> None:
        self._accepting.cancel()
        for connection in list(self._connections.values()):
            connection.end()

    async def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                # `sock_accept` would accept one as it is cancelled, and keep it: its client would wait.
                has_come = asyncio.Event()
                self._loop.add_reader(self._listener, has_come.set)
                try:
                    await has_come.wait()
                finally:
                    self._loop.remove_reader(self._listener)
            except OSError as error:
                _logger.warning("the store at %s accepts nobody: %s", self._listener.getsockname(), error)
                await asyncio.sleep(RETRY_S)
            else:
                self._take(peer)
                await self._until_there_is_room()

    def _take(self, peer: socket.socket) -> None:
        if len(self._connections) >= self._connections_max:
            peer.close()
            return
        connection = _Connection(self, peer)
        self._connections[connection.client] = connection
        self.doubt(connection)
        self._run(self._open(connection))

    async def _open(self, connection: _Connection) -> None:
        try:
            identity = process_identity()
            await self._loop.connect_accepted_socket(
                lambda: connection,
                connection.peer,
                ssl=None if identity is None else identity.server,
                ssl_handshake_timeout=None if identity is None else KEY_S,
            )
        except OSError as error:  # an ssl.SSLError is one, too
            _logger.debug("a connection to a store has failed: %s", error)
            self.lost(connection)

    async def _until_there_is_room(self) -> None:
        await asyncio.sleep(0)  # so that clients that have come are heard first
        while len(self._unknown) >= UNKNOWN_MAX:
            oldest, end = next(iter(self._unknown.items()))
            if (left_s := end.when() - KEY_S + SILENT_S - self._loop.time()) <= 0:
                self.trust(oldest)
                oldest.end()
            else:
                await asyncio.sleep(left_s)


class _Connection(asyncio.Protocol):
    """A client's connection, read no further while its key is not admitted, or it does not read."""

    def __init__(self, serving: _Serving, peer: socket.socket) -> None:
        self.client = Client()
        self.peer = peer
        self._serving = serving
        self._requests = RequestReader()
        self._request: Request | None = None  # which is to be done next
        self._is_known = False
        self._partial_bytes = 0
        self._unsent: deque[memoryview] = deque()
        self._is_full = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WRITE_BYTES)

    def connection_lost(self, _: Exception | None) -> None:
        self._unsent.clear()
        self._serving.partial_bytes -= self._partial_bytes
        self._partial_bytes = 0
        self._serving.lost(self)

    def data_received(self, data: bytes) -> None:
        self._requests.feed(data)
        self.proceed()
        if self._serving.partial_bytes > PARTIAL_BYTES_MAX:
            self.end()

    def proceed(self) -> None:
        """Do what the client has asked for, as far as its keys are admitted and it takes the answers."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            is_held = self._do_requests()
        except StoreRequestError as error:
            _logger.debug("%s is refused by the store: %s", self._transport.get_extra_info("peername"), error)
            self.end()
            return
        before, self._partial_bytes = self._partial_bytes, len(self._requests)
        self._serving.partial_bytes += self._partial_bytes - before
        if is_held:
            self._serving.doubt(self)
        elif self._is_known:
            self._serving.trust(self)
        if is_held or self._unsent:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def send(self, parts: Sequence[bytes]) -> None:
        for part in parts:  # a client that reads slowly costs a copy of a slice
            view, starts = memoryview(part), range(0, len(part), WRITE_BYTES)
            self._unsent.extend(view[start : start + WRITE_BYTES] for start in starts)
        self._flush()

    def end(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        else:
            with contextlib.suppress(OSError):
                self.peer.shutdown(socket.SHUT_RDWR)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush()
        self.proceed()

    def _do_requests(self) -> bool:
        """Do the requests that have come; return whether the next one has to wait until its key is admitted.

        Raises:
            StoreRequestError: what came is no request, or cannot be done.
        """
        store = self._serving.store
        while not self._unsent:
            if not self._is_known and (key := self._requests.first_key) is not None:
                if not store.admits(self.client, key):
                    return True
                self._is_known, self._requests.bytes_max = True, MESSAGE_BYTES_MAX
            self._request = request = self._request or self._requests.next()
            if request is None:
                if self._is_known or self._requests.first_key is None:
                    return False
            elif not all(store.admits(self.client, key) for key in request.keys):
                return True
            else:
                self._request = None
                store.perform(self.client, request)
                self._serving.tell()
        return False

    def _flush(self) -> None:
        while self._unsent and not self._is_full and self._transport is not None:
            parts, size = [], 0
            while self._unsent and size < WRITE_BYTES:
                parts.append(self._unsent.popleft())
                size += len(parts[-1])
            self._transport.write(b"".join(parts))
