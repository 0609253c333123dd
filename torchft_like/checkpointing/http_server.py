"""A source's server: whom it gives its state over HTTP, and for how long it waits for receivers.

`http_transport` describes what is asked and answered.

A client holds one of a limited number of threads, and each of its actions has a time limit: to send a
request, to wait, to take each piece, and the whole. When all threads are taken, the client that has been
silent for longest makes room: a client with a request sends it at once. A connection keeps its snapshot in
memory until it ends; the last snapshot and the one before may be in transfer, older ones are cut off.
"""

from __future__ import annotations

import hmac
import logging
import re
import select
import socket
import ssl
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from isal.isal_zlib import crc32

from lighthouse.address import Address
from lighthouse.core.trust import Role, Trust
from lighthouse.events import printable
from lighthouse.listening import listen_guarded
from lighthouse.tls import accepted
from lighthouse.trust import process_trust
from torchft_like.checkpointing.state_stream import CHUNK_BYTES, PIECE_BYTES, Snapshot, sums_nbytes
from torchft_like.errors import CheckpointError
from torchft_like.futures import context_timeout
from torchft_like.runtime.connecting import shut

_logger = logging.getLogger(__name__)

WAIT_S_MAX = 5.0
SILENT_S = 0.25  # seconds after which a client without a request may lose its place
REASON_LENGTH_MAX = 400
HEAD_BYTES_MAX = 8 * 1024
_REQUEST = re.compile(
    rb"GET /checkpoint/(\d{1,18})/(header|sums|done|payload(?=\?from))"
    rb"(?:\?from=(\d{1,13})&to=(\d{1,13}))?(?:\?wait_ms=(\d{1,9}))? HTTP/1\.[01]\r\n"
)
_AUTHORIZATION = re.compile(rb"\r\nauthorization: *([^\r\n]*)", re.IGNORECASE)
_FETCH = re.compile(rb"\r\ncheckpoint-fetch: *([0-9a-f]{1,32}) (\d{1,15})\r", re.IGNORECASE)
_FETCHES_MAX = 64
_KEY = re.compile(rb"\r\nquorum-key: *([^\r\n]*)", re.IGNORECASE)
_ACCEPT_RETRY_S = 0.1

GRACE_S = 0.1
PROGRESS_S = 1.0  # in which a receiver takes something, or is waited for no more
COPY_BYTES_PER_S = 1e9  # until it was measured
COPY_BYTES_PER_S_MIN = 0.5e9  # where it was measured while others had the processor


def wait_s(elapsed_s: float, nbytes: int, left: int, copied: int, copy_bytes_per_s: float) -> float:
    """Return for how long a source may wait for its receivers before it copies the next piece; 0 for not.

    It waits as long as at least as many bytes were taken and copied as could have been copied since it began.
    Receivers that come late are given a tenth of a second, but no longer than the whole copy takes. So the
    source goes on after twice the time of a copy at the latest, and this grace; if receivers are slow from
    the beginning, after the time of a copy and the grace. For a receiver that has taken nothing for
    PROGRESS_S it does not wait in any case.

    Args:
        elapsed_s: seconds since the state was offered.
        nbytes: the bytes of it that are to be copied if receivers do not take them.
        left: the bytes of it that the slowest receiver has yet to fetch.
    """
    grace_s = min(GRACE_S, nbytes / copy_bytes_per_s)
    done = max(nbytes - left, 0) + copied
    return max(grace_s + done / copy_bytes_per_s - elapsed_s, 0.0)


@dataclass(frozen=True)
class ServerLimits:
    """The limits of what a client may use up.

    Attributes:
        request_s: seconds to send its first request; less if another client needs the thread.
        chunk_s: seconds to take 1 MiB, or to send the next request; a client that is slower, or stopped, is
          cut off.
        transfer_s: seconds for the whole connection.
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
    state: Snapshot | None
    refusal: str = ""
    receivers: int = 0
    key: str = field(default="", repr=False)  # a client that shows another key is refused
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class CheckpointServer:
    """A server of the current offer, until `close`.

    An offer has the key of the quorum in which it is made, and is given to clients that show that: for as
    long as it is offered, which may be in later quorums, and after that to clients that have begun to fetch
    it. A key that is neither an offer's nor that of the present quorum, in which an offer may come, is
    refused.

    Args:
        key: that of the present quorum, "" for none; may be set anew.

    Raises:
        BindError: the address is in use or not of this host.
    """

    def __init__(self, bind: Address, limits: ServerLimits, key: str = "") -> None:
        self.limits: ServerLimits = limits
        self.key: str = key
        self._listener = listen_guarded(bind)
        self.port: int = self._listener.getsockname()[1]
        self.changed: threading.Condition = threading.Condition()
        self._offer: Offer | None = None
        # The bytes of the current offer that each receiver has yet to fetch, by the id of its fetch.
        self._left: dict[bytes, int] = {}
        self._told_at = 0.0  # when one of them told last
        self._copy_bytes_per_s = COPY_BYTES_PER_S
        self._recent_ids: deque[str] = deque(maxlen=2)
        self._connections: dict[socket.socket, _Connection] = {}
        self.closing: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="torchft-checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread
            self._listener.close()
            raise

    def offer(self, step: int, state: Snapshot | None, receivers: int = 0, refusal: str = "") -> None:
        """Offer a state to all clients, also those that wait for it, of which so many are expected; or tell
        them why there is none of that step.
        """
        with self.changed:
            self._offer, self._left = Offer(step, state, refusal, receivers, self.key), {}
            self._recent_ids.append(self._offer.id)
            connections = list(self._connections.values())
            outdated = [c for c in connections if c.offer and c.offer.id not in self._recent_ids]
            self.changed.notify_all()
        for connection in outdated:
            connection.end()

    def deliver(self, step: int, state: Snapshot, receivers: int) -> None:
        """Offer a state that does not change before this returns: when as many receivers have it as are
        expected, and there is no offer any more, or there is a copy of it.
        """
        self.offer(step, state, receivers)
        copied, copying_s = 0, 0.0
        try:
            state.copy_first()
            began = time.monotonic()
            while not self._await_receivers(state, time.monotonic() - began, copied):
                since = time.monotonic()
                if not (nbytes := state.copy_next()):
                    break
                copied, copying_s = copied + nbytes, copying_s + time.monotonic() - since
                self._copy_bytes_per_s = max(copied / max(copying_s, 1e-6), COPY_BYTES_PER_S_MIN)
        finally:
            state.settle()

    def _await_receivers(self, state: Snapshot, elapsed_s: float, copied: int) -> bool:
        """Wait while it is worth it, and return whether no receiver needs the state any more."""
        began = time.monotonic() - elapsed_s
        with self.changed:
            while not self.closing.is_set():
                offer, left = self._offer, state.nbytes
                if offer is not None and offer.state is state and 0 < offer.receivers <= len(self._left):
                    left = sorted(self._left.values())[offer.receivers - 1]
                    if not left:
                        refusal = "all for whom the state was offered have it"
                        self._offer = Offer(offer.step, None, refusal, key=offer.key)
                        return True
                elapsed_s = time.monotonic() - began
                limit_s = wait_s(elapsed_s, state.live_nbytes, left, copied, self._copy_bytes_per_s)
                limit_s = min(limit_s, max(began, self._told_at) + PROGRESS_S - time.monotonic())
                if limit_s <= 0:
                    return False
                self.changed.wait(limit_s)
        return True

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

    def knows(self, key: str, offer: Offer | None) -> bool:
        """Return whether this key is that of the present quorum, of its offer, or of the one being sent.

        How long that takes does not depend on the key.
        """
        offers = [one.key for one in (offer, self._offer) if one is not None]
        return True in [_is_same(key, known) for known in (self.key, *offers)]

    def wait_for_offer(self, step: int, wait_s: float, key: str = "") -> Offer | None:
        """Wait for the offer of `step` or a later one, and return it; return None after `wait_s` seconds."""

        def offered() -> Offer | None:
            offer = self._offer
            return offer if offer and offer.step >= step and _is_same(key, offer.key) else None

        with self.changed:
            self.changed.wait_for(lambda: self.closing.is_set() or offered(), wait_s)
            return offered()

    def offer_of(self, fetch: bytes) -> Offer | None:
        """Return the offer, withdrawn or not, that a receiver has begun to fetch over other connections."""
        with self.changed:
            return next((c.offer for c in self._connections.values() if c.fetch == fetch and c.offer), None)

    def note_left(self, offer: Offer, fetch: bytes, left: int) -> None:
        """Note how many bytes of an offer a receiver has yet to fetch."""
        with self.changed:
            if offer is self._offer and (fetch in self._left or len(self._left) < _FETCHES_MAX):
                self._left[fetch] = min(left, self._left.get(fetch, left))
                self._told_at = time.monotonic()
                self.changed.notify_all()

    def wait_fetched(self, idle_s: float) -> None:
        """Wait until all expected receivers have the offer, or none has asked for it for `idle_s` seconds."""
        deadline = time.monotonic() + idle_s
        with self.changed:
            while (offer := self._offer) is not None:
                if any(connection.offer is offer for connection in self._connections.values()):
                    self.changed.wait()  # a connection has a limit of its own
                    deadline = time.monotonic() + idle_s
                    continue
                left_s = deadline - time.monotonic()
                if list(self._left.values()).count(0) >= offer.receivers or left_s <= 0:
                    return
                self.changed.wait(left_s)

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
                # Most likely out of file descriptors, of which some may be closed.
                if not self.closing.is_set():
                    _logger.warning("the checkpoint server cannot accept a connection: %s", error)
                    self.closing.wait(_ACCEPT_RETRY_S)
                continue
            try:
                self._admit(accepted(peer))
            except OSError as error:  # it has hung up
                _logger.debug("a checkpoint client has gone: %s", error)
                peer.close()
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
        if full:
            _refuse(peer)
            return
        try:
            connection.thread.start()
        except RuntimeError as error:
            _logger.warning("no thread for a checkpoint client: %s", error)
            self.forget(peer)
            _refuse(peer)

    def forget(self, peer: socket.socket) -> None:
        with self.changed:
            del self._connections[peer]
            self.changed.notify_all()


class _Connection:
    """One client: its socket, its thread, and the offer that it is being sent.

    Attributes:
        fetch: the id of the fetch of which it is a part, if its client tells.
        has_asked: whether its first request has come. `is_given_up`: whether it had not when another client
          needed the thread.
    """

    def __init__(self, owner: CheckpointServer, peer: socket.socket) -> None:
        self.offer: Offer | None = None
        self.fetch = b""
        self.has_asked = False
        self.is_given_up = False
        self._owner = owner
        self._peer = peer
        self._since = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="torchft-checkpoint-client", daemon=True)

    def is_silent(self) -> bool:
        """Return whether the client's request should have come by now, and has not."""
        return not self.has_asked and time.monotonic() - self._since > SILENT_S

    def end(self) -> None:
        """Make the thread's present operation on the socket fail now."""
        shut(self._peer)

    def join(self) -> None:
        """Wait for the thread, if it ever started."""
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        limits = self._owner.limits
        try:
            with context_timeout(self.end, timedelta(seconds=limits.transfer_s)):
                # Else the last bytes of an answer would wait for the client's delayed acknowledgement.
                self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                head = _read_head(self._peer, limits.request_s)
                with self._owner.changed:
                    if self.is_given_up:
                        raise ConnectionError("it was silent while others needed the connection")
                    self.has_asked = True
                while head and self._answer(head):
                    head = _read_head(self._peer, limits.chunk_s)
        except (OSError, CheckpointError) as error:
            _logger.info("a checkpoint client was lost: %s", error)
        finally:
            self._owner.forget(self._peer)
            self._peer.close()

    def _answer(self, head: bytes) -> bool:
        """Answer a request; return whether another one may follow."""
        self._peer.settimeout(self._owner.limits.chunk_s)
        match = _REQUEST.match(head)
        if match is None:
            return self._refuse(
                400, "expected GET /checkpoint/STEP/header, sums, done or payload?from=A&to=B"
            )
        key = shown[1].decode("latin-1") if (shown := _KEY.search(head)) else ""
        if (told := _FETCH.search(head)) is not None:
            self.fetch = told[1]
            self.offer = self.offer or self._owner.offer_of(self.fetch)
        if (refusal := self._about_credentials(head, key)) is not None:
            return self._refuse(*refusal)
        step, what = int(match[1]), match[2].decode()
        offer = self._find_offer(step, int(match[5] or 0), key)
        if (refusal := self._about_offer(offer, step, what)) is not None:
            return self._refuse(*refusal)
        if offer is None or offer.state is None:
            self._say(202, "nothing is offered yet", 0)
        else:
            if told is not None and what != "header":
                self._owner.note_left(offer, told[1], 0 if what == "done" else max(int(told[2]), 1))
            self._send(offer, offer.state, what, int(match[3] or 0), int(match[4] or 0))
        return what != "done"

    def _about_offer(self, offer: Offer | None, step: int, what: str) -> tuple[int, str] | None:
        if offer is None and self._owner.closing.is_set():
            return 503, "the server is shutting down"
        if offer is None:  # a client that asks for more than the header has had that
            return None if what == "header" else (410, "it is not offered any more")
        if offer.step > step:
            return 410, f"step {offer.step} is offered by now"
        return (424, printable(offer.refusal[:REASON_LENGTH_MAX])) if offer.state is None else None

    def _about_credentials(self, head: bytes, key: str) -> tuple[int, str] | None:
        if (trust := process_trust()) is not None and _role(trust, head) < Role.PARTICIPATE:
            return 401, "this replica asks for a token of the job (TORCHFT_TOKEN_FILE)"
        if not self._owner.knows(key, self.offer):
            return 403, "this is for members of the quorum, who show its key"
        return None

    def _find_offer(self, step: int, wait_ms: int, key: str) -> Offer | None:
        """Return the offer that this client has begun to fetch, or the one of the step."""
        if self.offer is None or self.offer.step != step or not _is_same(key, self.offer.key):
            offer = self._owner.wait_for_offer(step, min(wait_ms / 1000, WAIT_S_MAX), key)
            if offer is None or offer.state is None or offer.step != step:
                return offer
            with self._owner.changed:
                self.offer = offer
                self._owner.changed.notify_all()
        return self.offer

    def _send(self, offer: Offer, state: Snapshot, what: str, start: int, stop: int) -> None:
        if what == "payload" and not start < stop <= state.nbytes:
            self._refuse(400, f"there are {state.nbytes} bytes, and not {start} to {stop}")
        elif what == "payload":
            self._say(200, "", stop - start, offer)
            self._send_payload(state, start, stop)
        elif what == "header":
            self._say(200, "", len(state.header), offer)
            for at in range(0, len(state.header), PIECE_BYTES):
                self._peer.sendall(memoryview(state.header)[at : at + PIECE_BYTES])
        elif what == "sums":
            self._say(200, "", sums_nbytes(state.nbytes), offer)
            for sums in state.sums():
                self._peer.sendall(sums)

    def _send_payload(self, state: Snapshot, start: int, stop: int) -> None:
        """Send bytes of the payload, and wait for the client only where nothing of the state is read.

        The checksum of a whole chunk is taken as it is sent: then the processor has the bytes in its cache.
        """
        crc: int | None = None
        limit_s = self._owner.limits.chunk_s
        deadline, due = time.monotonic() + limit_s, start + PIECE_BYTES
        room = select.poll()
        room.register(self._peer, select.POLLOUT)
        self._peer.settimeout(0)
        while start < stop:
            chunk, before = divmod(start, CHUNK_BYTES)
            if not before:
                crc = 0 if state.chunk_sums[chunk] is None else None
            is_full = False
            with state.reading(start, min(stop, (chunk + 1) * CHUNK_BYTES)) as pieces:
                for piece in pieces:
                    sent = _send_some(self._peer, piece)
                    crc = None if crc is None else crc32(piece[:sent], crc)
                    start += sent
                    if is_full := sent < len(piece):
                        break
            if crc is not None and (start == state.nbytes or start == (chunk + 1) * CHUNK_BYTES):
                state.chunk_sums[chunk] = crc
            if start >= due:
                deadline, due = time.monotonic() + limit_s, start + PIECE_BYTES
            if is_full and not room.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TimeoutError(f"it took no MiB within {limit_s:g} s")
        self._peer.settimeout(limit_s)

    def _say(self, status: int, reason: str, length: int, offer: Offer | None = None) -> None:
        of = f"Checkpoint-Step: {offer.step}\r\nCheckpoint-Id: {offer.id}\r\n" if offer else ""
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {length}\r\n{of}\r\n"
        self._peer.sendall(head.encode(errors="replace"))
        _logger.debug("a checkpoint client was answered %s %s", status, reason)

    def _refuse(self, status: int, reason: str) -> bool:
        self._say(status, reason, 0)
        return False


def _send_some(peer: socket.socket, piece: memoryview) -> int:
    """Send what can be sent without a wait, and return how much that was."""
    sent = 0
    with suppress(BlockingIOError, ssl.SSLWantWriteError):
        while sent < len(piece):
            sent += peer.send(piece[sent:])
    return sent


def _read_head(peer: socket.socket, limit_s: float) -> bytes:
    """Return the head of a request; nothing where the client has no more of them."""
    deadline = time.monotonic() + limit_s
    head = b""
    while b"\r\n\r\n" not in head:
        remaining_s = deadline - time.monotonic()
        if len(head) > HEAD_BYTES_MAX or remaining_s <= 0:
            raise ConnectionError(f"no request within {limit_s:g} s and {HEAD_BYTES_MAX} bytes")
        peer.settimeout(remaining_s)
        received = peer.recv(HEAD_BYTES_MAX)
        if not received and head:
            raise ConnectionError("the connection ended before the request did")
        if not received:
            return b""
        head += received
    return head


def _is_same(key: str, known: str) -> bool:
    return hmac.compare_digest(key.encode(), known.encode())


def _role(trust: Trust, head: bytes) -> Role:
    match = _AUTHORIZATION.search(head)
    return trust.role_of_header(match[1].decode("latin-1")) if match else Role.STRANGER


def _refuse(peer: socket.socket) -> None:
    with peer:
        if isinstance(peer, ssl.SSLSocket):
            return  # a handshake takes time; its end at once says the same (`_NoPlaceError`)
        peer.setblocking(False)
        try:
            peer.send(b"HTTP/1.1 503 all connections are taken\r\nContent-Length: 0\r\n\r\n")
        except OSError as error:
            _logger.debug("a refused checkpoint client did not hear of it: %s", error)
