"""The HTTP server that offers one snapshot at a time to the replicas that heal.

    GET /checkpoint/{step}?part=0&parts=1&wait_ms=5000

    200  the part, with Checkpoint-Step and Checkpoint-Id (the same for all parts of one snapshot)
    202  nothing is offered yet, after a wait of `wait_ms`: ask again
    400  not such a request
    410  a later step is offered: this one will not come again
    424  this replica cannot give its state of that step: the reason phrase says why
    503  all connections are taken, ask again; or the server ends

A connection carries one request. A client holds one of a limited number of threads, and each of its actions
has a time limit: to send its request, to wait, to take each chunk, and the whole. When all threads are taken,
the client that has been silent for longest makes room: a client with a request sends it at once. A transfer
keeps its snapshot in memory until it ends; the last snapshot and the one before may be in transfer, older
ones are cut off.
"""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from lighthouse.address import Address
from lighthouse.events import printable
from lighthouse.listening import listen_tcp
from torchft_like.checkpointing.state_stream import EncodedState
from torchft_like.futures import context_timeout

_logger = logging.getLogger(__name__)

WAIT_S_MAX = 5.0
SILENT_S = 0.25  # seconds after which a client without a request may lose its place
REASON_LENGTH_MAX = 400
HEAD_BYTES_MAX = 8 * 1024
_REQUEST = re.compile(r"/checkpoint/(\d{1,18})\?part=(\d{1,4})&parts=(\d{1,4})&wait_ms=(\d{1,9})")
_ACCEPT_RETRY_S = 0.1
PARTS_MAX = 10_000  # the request's form allows no more


@dataclass(frozen=True)
class ServerLimits:
    """The limits of what a client may use up.

    Attributes:
        request_s: seconds to send its request; less if another client needs the thread.
        chunk_s: seconds to take 4 MiB; a client that is slower than that, or stopped, is cut off.
        transfer_s: seconds for the whole transfer.
        connections: the number of connections at a time; each has a thread.
    """

    request_s: float = 5.0
    chunk_s: float = 10.0
    transfer_s: float = 60.0
    connections: int = 64


@dataclass(frozen=True)
class Offer:
    """A snapshot that may be fetched, or the reason why there is none of that step."""

    step: int
    state: EncodedState | None
    refusal: str = ""
    receivers: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class CheckpointServer:
    """A server of the current offer, until `close`.

    Raises:
        BindError: the address is in use or not of this host.
    """

    def __init__(self, bind: Address, limits: ServerLimits) -> None:
        self.limits = limits
        self._listener = listen_tcp(bind)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._fetched = 0.0  # how many times the current offer was sent, by its parts
        self._recent_ids: deque[str] = deque(maxlen=2)
        self._connections: dict[socket.socket, _Connection] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="torchft-checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread
            self._listener.close()
            raise

    def refuse(self, step: int, reason: str) -> None:
        """Tell clients that ask for the step, or wait for it, that this server will not offer it."""
        self._announce(Offer(step, None, reason))

    def offer(self, step: int, state: EncodedState, receivers: int = 0) -> None:
        """Offer `state` to all clients, also those that wait for it; `receivers` of them are expected."""
        self._announce(Offer(step, state, receivers=receivers))

    def _announce(self, offer: Offer) -> None:
        with self._changed:
            self._offer, self._fetched = offer, 0.0
            self._recent_ids.append(self._offer.id)
            outdated = [
                c for c in self._connections.values() if c.offer and c.offer.id not in self._recent_ids
            ]
            self._changed.notify_all()
        for connection in outdated:
            connection.end()

    def offer_as(self, step: int) -> bool:
        """Offer the current snapshot as the state of `step`; return False if there is none."""
        with self._changed:
            state = self._offer.state if self._offer is not None else None
        if state is not None:
            self.offer(step, state)
        return state is not None

    def withdraw(self) -> None:
        """Offer nothing; transfers in progress go on."""
        with self._changed:
            self._offer = None
            self._changed.notify_all()

    def wait_for_offer(self, step: int, wait_s: float) -> Offer | None:
        """Wait for the offer of `step` or a later one, and return it; return None after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._closing.is_set():
                if self._offer is not None and self._offer.step >= step:
                    return self._offer
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
        return None

    def note_fetched(self, offer: Offer, share: float) -> None:
        """Note that a receiver was sent this share of the offer; 1 is all of it."""
        with self._changed:
            if offer is self._offer:
                self._fetched += share
                self._changed.notify_all()

    def wait_fetched(self, idle_s: float) -> None:
        """Wait until all expected receivers have the offer, or none was sent it for `idle_s` seconds."""
        deadline = time.monotonic() + idle_s
        with self._changed:
            while (offer := self._offer) is not None and self._fetched < offer.receivers - 0.5 / PARTS_MAX:
                if any(connection.offer is offer for connection in self._connections.values()):
                    self._changed.wait()  # a transfer has a limit of its own
                    deadline = time.monotonic() + idle_s
                elif (left_s := deadline - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return

    def close(self, wait: bool) -> None:
        """End every connection and the threads; with `wait`, return when they have ended."""
        self._closing.set()
        with self._changed:
            self._offer = None
            self._changed.notify_all()
            connections = list(self._connections.values())
        shut(self._listener)  # wakes `accept`, which `close` would not
        for connection in connections:
            connection.end()
        if wait:
            self._thread.join()
            for connection in connections:
                connection.join()

    @property
    def closing(self) -> bool:
        """Whether `close` has been called."""
        return self._closing.is_set()

    def _accept(self) -> None:
        while not self.closing:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if not self.closing:  # most likely out of file descriptors, of which some may be closed
                    _logger.warning("the checkpoint server cannot accept a connection: %s", error)
                    self._closing.wait(_ACCEPT_RETRY_S)
                continue
            self._admit(peer)
        self._listener.close()

    def _admit(self, peer: socket.socket) -> None:
        with self._changed:
            full = len(self._connections) >= self.limits.connections
            silent = next(filter(_Connection.is_silent, self._connections.values()), None) if full else None
            if silent is not None:
                silent.is_given_up = True
        if silent is not None:
            silent.end()
            silent.join()  # the client waits only for its socket
        with self._changed:
            full = len(self._connections) >= self.limits.connections or self.closing
            if not full:
                connection = self._connections[peer] = _Connection(self, peer)
        if full or not connection.start():
            _refuse(peer)

    def note_request(self, connection: _Connection) -> None:
        """Note that a client has sent its request."""
        with self._changed:
            if connection.is_given_up:
                raise ConnectionError("it was silent while others needed the connection")
            connection.has_asked = True

    def note_sending(self, connection: _Connection, offer: Offer) -> None:
        """Note that a client is being sent an offer."""
        with self._changed:
            connection.offer = offer
            self._changed.notify_all()

    def forget(self, peer: socket.socket) -> None:
        """Drop a connection that has ended."""
        with self._changed:
            del self._connections[peer]
            self._changed.notify_all()


class _Connection:
    """One client: its socket, its thread, and the offer that it is being sent.

    Attributes:
        has_asked: whether its request has come. `is_given_up`: whether it had not when another client needed
          the thread.
    """

    def __init__(self, server: CheckpointServer, peer: socket.socket) -> None:
        self.server = server
        self.peer = peer
        self.offer: Offer | None = None
        self.has_asked = False
        self.is_given_up = False
        self._since = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="torchft-checkpoint-client", daemon=True)

    def is_silent(self) -> bool:
        """Return whether the client's request should have come by now, and has not."""
        return not self.has_asked and time.monotonic() - self._since > SILENT_S

    def start(self) -> bool:
        """Start the thread; return False if the system has none."""
        try:
            self.thread.start()
        except RuntimeError as error:
            _logger.warning("no thread for a checkpoint client: %s", error)
            self.server.forget(self.peer)
            return False
        return True

    def end(self) -> None:
        """Make the thread's present operation on the socket fail now."""
        shut(self.peer)

    def join(self) -> None:
        """Wait for the thread, if it ever started."""
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            with context_timeout(self.end, timedelta(seconds=self.server.limits.transfer_s)):
                _Handler(self)
        except (OSError, ValueError) as error:  # the base class raises ValueError for a malformed head
            _logger.info("a checkpoint client was lost: %s", error)
        finally:
            self.server.forget(self.peer)
            self.peer.close()


class _Handler(BaseHTTPRequestHandler):
    """A handler that reads one request and answers it; the constructor does it all, as in the base class."""

    server_version = "torchft_like"
    sys_version = ""
    disable_nagle_algorithm = True  # else a checksum after a chunk would wait for an acknowledgement

    def __init__(self, connection: _Connection) -> None:
        self._owner = connection
        self._limits = connection.server.limits
        client = connection.peer.getpeername()
        super().__init__(connection.peer, client, connection.server)  # type: ignore[arg-type] # the base class only stores it

    def setup(self) -> None:
        """Read the head under one deadline, which a trickle of bytes does not extend."""
        super().setup()
        self.rfile = io.BytesIO(_read_head(self._owner.peer, self._limits.request_s))
        self._owner.server.note_request(self._owner)
        self._owner.peer.settimeout(self._limits.chunk_s)

    def do_GET(self) -> None:
        match = _REQUEST.fullmatch(self.path)
        if match is None:
            self.send_error(HTTPStatus.BAD_REQUEST, "expected /checkpoint/STEP?part=I&parts=N&wait_ms=T")
            return
        step, part, parts, wait_ms = map(int, match.groups())
        if part >= parts:
            self.send_error(HTTPStatus.BAD_REQUEST, f"part {part} of {parts} does not exist")
            return
        offer = self._owner.server.wait_for_offer(step, min(wait_ms / 1000, WAIT_S_MAX))
        if offer is None and self._owner.server.closing:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down")
        elif offer is None:
            self.send_response(HTTPStatus.ACCEPTED)
            self.end_headers()
        elif offer.step > step:
            self.send_error(HTTPStatus.GONE, f"step {offer.step} is offered by now")
        elif offer.state is None:
            self.send_error(HTTPStatus.FAILED_DEPENDENCY, printable(offer.refusal[:REASON_LENGTH_MAX]))
        else:
            self._send(offer, offer.state, part, parts)

    def _send(self, offer: Offer, state: EncodedState, part: int, parts: int) -> None:
        self._owner.server.note_sending(self._owner, offer)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(state.part_nbytes(part, parts)))
        self.send_header("Checkpoint-Step", str(offer.step))
        self.send_header("Checkpoint-Id", offer.id)
        self.end_headers()
        for piece in state.part(part, parts):
            self._owner.peer.sendall(piece)
        self._owner.server.note_fetched(offer, 1 / parts)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        _logger.debug("%s: %s", self.client_address, format % args)


def _read_head(peer: socket.socket, limit_s: float) -> bytes:
    deadline = time.monotonic() + limit_s
    head = b""
    while b"\r\n\r\n" not in head:
        remaining_s = deadline - time.monotonic()
        if len(head) > HEAD_BYTES_MAX or remaining_s <= 0:
            raise ConnectionError(f"no request within {limit_s:g} s and {HEAD_BYTES_MAX} bytes")
        peer.settimeout(remaining_s)
        received = peer.recv(HEAD_BYTES_MAX)
        if not received:
            raise ConnectionError("the connection ended before the request did")
        head += received
    return head


def _refuse(peer: socket.socket) -> None:
    with peer:
        peer.setblocking(False)
        try:
            peer.send(b"HTTP/1.0 503 all connections are taken\r\nContent-Length: 0\r\n\r\n")
        except OSError as error:
            _logger.debug("a refused checkpoint client did not hear of it: %s", error)


def shut(connection: socket.socket) -> None:
    """End every operation on a socket, which another thread may be in."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # it is not connected yet, or has ended by itself
        _logger.debug("shutdown of a socket: %s", error)
