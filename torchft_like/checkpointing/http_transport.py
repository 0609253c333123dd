"""State over HTTP from a snapshot in memory: a transport that needs only a network.

The source copies its state once and goes on training; receivers fetch the copy when they come, and
read straight into the tensors that they keep. Another thread can end a fetch at any moment. No bytes from the
network are ever unpickled. The source serves one snapshot at a time:

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

import http.client
import io
import logging
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TypeVar, cast

from lighthouse.address import Address, parse_address
from lighthouse.events import printable
from lighthouse.listening import listen_tcp
from torchft_like.checkpointing.state_stream import EncodedState, Expectation, IncomingState, read_header
from torchft_like.checkpointing.transport import CheckpointTransport
from torchft_like.errors import (
    AddressError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointTimeoutError,
    ShutdownError,
)
from torchft_like.futures import context_timeout
from torchft_like.plain_data import Limits
from torchft_like.runtime.connecting import connect_tcp
from torchft_like.runtime.hosts import own_host

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
        self.changed = threading.Condition()
        self._offer: Offer | None = None
        self._fetched = 0.0  # how many times the current offer was sent, by its parts
        self._recent_ids: deque[str] = deque(maxlen=2)
        self._connections: dict[socket.socket, _Connection] = {}
        self.closing = threading.Event()
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
        with self.changed:
            self._offer, self._fetched = offer, 0.0
            self._recent_ids.append(self._offer.id)
            outdated = [
                c for c in self._connections.values() if c.offer and c.offer.id not in self._recent_ids
            ]
            self.changed.notify_all()
        for connection in outdated:
            connection.end()

    def offer_as(self, step: int) -> bool:
        """Offer the current snapshot as the state of `step`; return False if there is none."""
        with self.changed:
            state = self._offer.state if self._offer is not None else None
        if state is not None:
            self.offer(step, state)
        return state is not None

    def withdraw(self) -> None:
        """Offer nothing; transfers in progress go on."""
        with self.changed:
            self._offer = None
            self.changed.notify_all()

    def wait_for_offer(self, step: int, wait_s: float) -> Offer | None:
        """Wait for the offer of `step` or a later one, and return it; return None after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self.changed:
            while not self.closing.is_set():
                if self._offer is not None and self._offer.step >= step:
                    return self._offer
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                self.changed.wait(remaining_s)
        return None

    def note_fetched(self, offer: Offer, share: float) -> None:
        """Note that a receiver was sent this share of the offer; 1 is all of it."""
        with self.changed:
            if offer is self._offer:
                self._fetched += share
                self.changed.notify_all()

    def wait_fetched(self, idle_s: float) -> None:
        """Wait until all expected receivers have the offer, or none was sent it for `idle_s` seconds."""
        deadline = time.monotonic() + idle_s
        with self.changed:
            while (offer := self._offer) is not None and self._fetched < offer.receivers - 0.5 / PARTS_MAX:
                if any(connection.offer is offer for connection in self._connections.values()):
                    self.changed.wait()  # a transfer has a limit of its own
                    deadline = time.monotonic() + idle_s
                elif (left_s := deadline - time.monotonic()) > 0:
                    self.changed.wait(left_s)
                else:
                    return

    def close(self, wait: bool) -> None:
        """End every connection and the threads; with `wait`, return when they have ended."""
        self.closing.set()
        with self.changed:
            self._offer = None
            self.changed.notify_all()
            connections = list(self._connections.values())
        shut(self._listener)  # wakes `accept`, which `close` would not
        for connection in connections:
            connection.end()
        if wait:
            self._thread.join()
            for connection in connections:
                connection.join()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if (
                    not self.closing.is_set()
                ):  # most likely out of file descriptors, of which some may be closed
                    _logger.warning("the checkpoint server cannot accept a connection: %s", error)
                    self.closing.wait(_ACCEPT_RETRY_S)
                continue
            self._admit(peer)
        self._listener.close()

    def _admit(self, peer: socket.socket) -> None:
        with self.changed:
            full = len(self._connections) >= self.limits.connections
            silent = next(filter(_Connection.is_silent, self._connections.values()), None) if full else None
            if silent is not None:
                silent.is_given_up = True
        if silent is not None:
            silent.end()
            silent.join()  # the client waits only for its socket
        with self.changed:
            full = len(self._connections) >= self.limits.connections or self.closing.is_set()
            if not full:
                connection = self._connections[peer] = _Connection(self, peer)
        if full or not connection.start():
            _refuse(peer)

    def forget(self, peer: socket.socket) -> None:
        """Drop a connection that has ended."""
        with self.changed:
            del self._connections[peer]
            self.changed.notify_all()


class _Connection(BaseHTTPRequestHandler):
    """One client: its socket, its thread, and the offer that it is being sent. It sends one request.

    Attributes:
        has_asked: whether its request has come. `is_given_up`: whether it had not when another client needed
          the thread.
    """

    server_version = "torchft_like"
    sys_version = ""
    disable_nagle_algorithm = True  # else a checksum after a chunk would wait for an acknowledgement

    def __init__(self, owner: CheckpointServer, peer: socket.socket) -> None:
        # The constructor of the base class, which reads the request and answers it, is called on the thread.
        self.offer: Offer | None = None
        self.has_asked = False
        self.is_given_up = False
        self._owner = owner
        self._peer = peer
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
            self._owner.forget(self._peer)
            return False
        return True

    def end(self) -> None:
        """Make the thread's present operation on the socket fail now."""
        shut(self._peer)

    def join(self) -> None:
        """Wait for the thread, if it ever started."""
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            with context_timeout(self.end, timedelta(seconds=self._owner.limits.transfer_s)):
                super().__init__(self._peer, self._peer.getpeername(), self._owner)  # type: ignore[arg-type] # it is only stored
        except (OSError, ValueError) as error:  # the base class raises ValueError for a malformed head
            _logger.info("a checkpoint client was lost: %s", error)
        finally:
            self._owner.forget(self._peer)
            self._peer.close()

    def setup(self) -> None:
        """Read the head under one deadline, which a trickle of bytes does not extend."""
        super().setup()
        self.rfile = io.BytesIO(_read_head(self._peer, self._owner.limits.request_s))
        with self._owner.changed:
            if self.is_given_up:
                raise ConnectionError("it was silent while others needed the connection")
            self.has_asked = True
        self._peer.settimeout(self._owner.limits.chunk_s)

    def do_GET(self) -> None:
        match = _REQUEST.fullmatch(self.path)
        if match is None:
            self.send_error(HTTPStatus.BAD_REQUEST, "expected /checkpoint/STEP?part=I&parts=N&wait_ms=T")
            return
        step, part, parts, wait_ms = map(int, match.groups())
        if part >= parts:
            self.send_error(HTTPStatus.BAD_REQUEST, f"part {part} of {parts} does not exist")
            return
        offer = self._owner.wait_for_offer(step, min(wait_ms / 1000, WAIT_S_MAX))
        if offer is None and self._owner.closing.is_set():
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
        with self._owner.changed:
            self.offer = offer
            self._owner.changed.notify_all()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(state.part_nbytes(part, parts)))
        self.send_header("Checkpoint-Step", str(offer.step))
        self.send_header("Checkpoint-Id", offer.id)
        self.end_headers()
        for piece in state.part(part, parts):
            self._peer.sendall(piece)
        self._owner.note_fetched(offer, 1 / parts)

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


T = TypeVar("T")
CHUNKS_MAX = 64
ASK_AGAIN_S = 0.05

_ASK_AGAIN: dict[int, str] = {
    HTTPStatus.ACCEPTED: "it had not offered that step",
    HTTPStatus.SERVICE_UNAVAILABLE: "all its connections were taken",
}


class HTTPTransport(CheckpointTransport[T]):
    """A transport that offers this rank's state over HTTP, and fetches that of others.

    It takes memory for one copy of the state on the CPU from `send_checkpoint` until `disallow_checkpoint`; a
    transfer in progress keeps its copy until it ends, and at most two different copies are kept.

    Args:
        timeout: the longest that sending the state to one receiver may take.
        num_chunks: the number of connections of one fetch; 0 means one.
        hostname: the name under which other hosts reach this one. By default the Manager sets it: as for its
          own server, to the interface that leads to the lighthouse. Without a Manager it is the address of
          this host's name, and the server starts when the address is asked for, or a state is offered.
        bind_host: the address to listen on; `hostname` by default.
        stall_timeout: how long the peer may send nothing before it counts as dead.
        state_bytes_max: the limit of the bytes of tensors to fetch. By default it is 16 times those of this
          rank's own state plus 256 MiB; there is no limit until the Manager has read that state.

    Raises:
        BindError: the address is not of this host.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        timeout: timedelta,
        num_chunks: int = 0,
        *,
        hostname: str | None = None,
        bind_host: str | None = None,
        stall_timeout: timedelta = timedelta(seconds=10),
        state_bytes_max: int | None = None,
    ) -> None:
        if not 0 <= num_chunks <= CHUNKS_MAX:
            raise ValueError(f"num_chunks is {num_chunks}, must be in [0, {CHUNKS_MAX}]")
        if timeout <= timedelta(0) or stall_timeout <= timedelta(0):
            raise ValueError(f"timeout {timeout} and stall_timeout {stall_timeout} must be above 0")
        self._parts = max(1, num_chunks)
        self._stall_s = stall_timeout.total_seconds()
        self._limits = ServerLimits(chunk_s=self._stall_s, transfer_s=timeout.total_seconds())
        self._bind_host = bind_host
        self._has_hostname = hostname is not None
        self._serving: tuple[CheckpointServer, Address] | None = self._serve(hostname) if hostname else None
        self._expected = Expectation(state_bytes_max)
        self._lock = threading.Lock()
        self._fetches: set[Fetch] = set()
        self._closed = False

    def use_host(self, host: str) -> None:
        """Serve under `host` from now on, unless a `hostname` was given; earlier offers end.

        Raises:
            BindError: the address is not of this host.
        """
        with self._lock:
            before = self._serving
            if self._has_hostname or (before is not None and before[1].host == host):
                return
            self._serving = self._serve(host)
        if before is not None:
            before[0].close(wait=True)

    def metadata(self) -> str:
        """Return the address of this rank's server, http://host:port."""
        return self._served()[1].url

    def address(self) -> str:
        """Return the URL of the server, http://host:port/checkpoint/, which the step follows."""
        return f"{self.metadata()}/checkpoint/"

    def allow_checkpoint(self, step: int) -> None:
        """Offer the current snapshot as the state of `step`; `send_checkpoint` offers by itself.

        Raises:
            CheckpointError: nothing is offered; `disallow_checkpoint` has dropped the copy.
        """
        self._check_open()
        if not self._served()[0].offer_as(step):
            raise CheckpointError(f"there is no state to offer as step {step}: call send_checkpoint")

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copy the state and offer the copy; receivers fetch it when they come.

        It replaces the earlier offer. Every client that asks for the step is served, not only `dst_ranks`.
        Copying waits for no receiver, so `timeout` has no effect.
        """
        self._check_open()
        self._served()[0].offer(step, EncodedState(state_dict), len(dst_ranks))

    def check_state(self, state_dict: T) -> None:
        """Describe the state without copying a tensor, and expect a peer's state to be like it."""
        self._expected.learn(state_dict)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Answer requests for the step with `reason`, and nothing else, until the next offer."""
        self._served()[0].refuse(step, reason)

    def disallow_checkpoint(self) -> None:
        """Offer nothing to new requests. Transfers in progress finish with the copy."""
        if self._serving is not None:
            self._serving[0].withdraw()

    def wait_fetched(self, idle: timedelta) -> None:
        """Wait until all receivers of `send_checkpoint` have the state, or none has fetched for `idle`."""
        if self._serving is not None:
            self._serving[0].wait_fetched(idle.total_seconds())

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of `step`; wait until it is offered.

        The tensors are on the CPU, contiguous and without gradient: `load_state_dict` has to copy them into
        the model.
        """
        try:
            address = parse_address(metadata, "the metadata of a checkpoint")
        except AddressError as error:
            raise CheckpointError(f"replica {src_rank} does not send over this transport: {error}") from error
        limits = self._expected.limits
        fetch = Fetch(address, step, self._parts, timeout.total_seconds(), self._stall_s, limits)
        with self._lock:
            self._check_open()
            self._fetches.add(fetch)
        try:
            return cast(T, fetch.run())
        finally:
            with self._lock:
                self._fetches.discard(fetch)

    def abort_recv(self, reason: str = "aborted") -> None:
        """End all fetches in progress with a CheckpointError that has `reason`; any thread may call this."""
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.end(reason)

    def shutdown(self, wait: bool = True) -> None:
        """Close every socket, transfers in progress included; with `wait`, join the threads."""
        with self._lock:
            self._closed = True
        self.abort_recv("the transport is shut down")
        if self._serving is not None:
            self._serving[0].close(wait)

    def _served(self) -> tuple[CheckpointServer, Address]:
        with self._lock:
            if self._serving is None:
                self._check_open()
                self._serving = self._serve(own_host())
            return self._serving

    def _serve(self, host: str) -> tuple[CheckpointServer, Address]:
        server = CheckpointServer(Address(self._bind_host or host, 0), self._limits)
        return server, Address(host, server.port)

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the checkpoint transport was used after shutdown")


class Fetch:
    """A single fetch. `end` makes a blocked `run` raise at once, and a later `run` too.

    Args:
        address: the address of the peer's server.
        step: the step whose state is fetched.
        parts: the number of connections at a time.
        timeout_s: the limit of the whole fetch, the wait until the peer offers the step included.
        stall_s: how long the peer may send nothing before it counts as dead.
        limits: the limits of the state.
    """

    def __init__(
        self, address: Address, step: int, parts: int, timeout_s: float, stall_s: float, limits: Limits
    ) -> None:
        self._address = address
        self._step = step
        self._parts = parts
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._limits = limits
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._ended: tuple[type[CheckpointError], str] | None = None
        self._offer_id: str | None = None
        self._progress = "it had not answered"

    def run(self) -> object:
        """Fetch the state.

        Raises:
            CheckpointTimeoutError: the state did not come in time, or the peer fell silent.
            CheckpointError: the state could not be fetched; the text names the peer and the reason.
        """
        with context_timeout(self._expire, timedelta(seconds=self._timeout_s)):
            try:
                return self._fetch()
            except (OSError, http.client.HTTPException, CheckpointError) as error:
                raise self._explain(error) from error
            finally:
                self.end("it is over")

    def end(self, reason: str, kind: type[CheckpointError] = CheckpointError) -> None:
        """Close every connection of this fetch; its error has the first kind and reason."""
        with self._lock:
            if self._ended is None:
                self._ended = kind, reason
            for connection in self._sockets:
                shut(connection)
            self._sockets.clear()

    def _expire(self) -> None:
        self.end(f"after {self._timeout_s:g} s {self._progress}", CheckpointTimeoutError)

    def _fetch(self) -> object:
        with self._response(0) as response:
            incoming = IncomingState(read_header(response, self._limits), self._limits)
            incoming.check_length(response.length or 0, 0, self._parts)
            if self._parts == 1:
                incoming.read_part(response)
            else:
                self._read_all_parts(incoming, response)
        return incoming.state()

    def _read_all_parts(self, incoming: IncomingState, first: http.client.HTTPResponse) -> None:
        parts = self._parts
        with ThreadPoolExecutor(parts - 1, thread_name_prefix="torchft-checkpoint-fetch") as pool:
            try:
                others = []
                for index in range(1, parts):
                    try:
                        others.append(pool.submit(self._read_part, incoming, index))
                    except RuntimeError as error:  # threading raises it if the system has no thread
                        raise CheckpointError(
                            f"there is no thread for part {index} of it: {error}"
                        ) from error
                incoming.read_part(first, 0, parts)
                for other in others:
                    other.result()
            except BaseException as error:
                kind, cause = self._cause_of(error)
                self.end(cause, kind)  # so that the other parts fail now and not later
                raise

    def _read_part(self, incoming: IncomingState, index: int) -> None:
        with self._response(index) as response:
            if read_header(response, self._limits) != incoming.header:
                raise CheckpointFormatError("its parts have different headers")
            incoming.check_length(response.length or 0, index, self._parts)
            incoming.read_part(response, index, self._parts)

    @contextmanager
    def _response(self, part: int) -> Iterator[http.client.HTTPResponse]:
        """Yield an open response that brings the part; ask again for as long as the step is not offered."""
        while True:
            connection = http.client.HTTPConnection(self._address.host, self._address.port)
            connection.sock = connect_tcp(self._address, self._stall_s, self._register)
            try:
                connection.request("GET", self._path(part))
                with connection.getresponse() as response:
                    if response.status not in _ASK_AGAIN:
                        self._check(response)
                        yield response
                        return
            finally:
                connection.close()
            self._progress = _ASK_AGAIN[response.status]
            time.sleep(ASK_AGAIN_S)  # a pause for peers that do not wait themselves

    def _register(self, connection: socket.socket) -> None:
        with self._lock:
            if self._ended is not None:
                raise CheckpointError(self._ended[1])
            self._sockets = [other for other in self._sockets if other.fileno() >= 0]
            self._sockets.append(connection)

    def _path(self, part: int) -> str:
        """Return the request's path, by which the peer may wait for half of its limit of silence."""
        wait_ms = int(self._stall_s / 2 * 1000)
        return f"/checkpoint/{self._step}?part={part}&parts={self._parts}&wait_ms={wait_ms}"

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != HTTPStatus.OK:
            raise CheckpointError(f"it answered {response.status} {printable(response.reason[:400])}")
        step = response.getheader("Checkpoint-Step")
        if step != str(self._step):
            raise CheckpointFormatError(f"it sent step {printable(str(step)[:100])}")
        self._progress = "it had not sent everything"
        with self._lock:
            offer_id = response.getheader("Checkpoint-Id")
            self._offer_id = self._offer_id or offer_id
            if offer_id != self._offer_id:
                raise CheckpointError("its snapshot was replaced between two parts")

    def _explain(self, error: Exception) -> CheckpointError:
        kind, cause = self._ended or self._cause_of(error)
        return kind(f"state of step {self._step} could not be fetched from {self._address.url}: {cause}")

    def _cause_of(self, error: BaseException) -> tuple[type[CheckpointError], str]:
        if isinstance(error, TimeoutError):
            return CheckpointTimeoutError, f"no byte came for {self._stall_s:g} s"
        kind = type(error) if isinstance(error, CheckpointFormatError) else CheckpointError
        return kind, str(error) or type(error).__name__
