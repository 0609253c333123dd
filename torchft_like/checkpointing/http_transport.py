"""State over HTTP: a transport that needs only a network.

The source sends from its tensors while receivers are fast, or else copies its state once, and goes on
training (`CheckpointServer`); receivers fetch it when they come, over several connections and from several
sources, and read straight into the tensors that they keep (`Fetch`). Another thread can end a fetch at any
moment. No bytes from the network are ever unpickled.

A source serves one snapshot at a time, over HTTP/1.1:

    GET /checkpoint/{step}/header?wait_ms=5000     the structure of the state (`state_stream.py`)
    GET /checkpoint/{step}/payload?from=0&to=9     so many bytes of the payload
    GET /checkpoint/{step}/sums                    the checksums of all chunks
    GET /checkpoint/{step}/done                    no answer, and the end of the connection

    200  with Checkpoint-Step and Checkpoint-Id, which tells one snapshot from another
    202  nothing is offered yet, after a wait of `wait_ms`: ask again; only where the header is asked for
    400  not such a request
    401  the request shows no token of the job (`Authorization: Bearer`), where this process has some; where
         it has a certificate, it speaks only TLS, and only with clients that show one
    403  the request does not show the key of the quorum (`Quorum-Key`), where there is one
    410  a later step is offered, or this one not any more: it will not come again
    424  this replica cannot give its state of that step: the reason phrase says why
    503  all connections are taken, ask again (with TLS the connection ends instead); or the server ends

A receiver names its fetch in each request, and how much of it is still to come, from any source:
`Checkpoint-Fetch: ID BYTES`; and says in the end that it has everything, and has checked it.

A connection carries any number of requests, one after another, all about the snapshot with which it began,
or with which another connection of the same receiver has, if that is still there.
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
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from isal.isal_zlib import crc32

from lighthouse.address import Address, parse_address
from lighthouse.core.trust import Role, Trust
from lighthouse.events import printable
from lighthouse.listening import listen_guarded
from lighthouse.tls import TLS_ENV, accepted, scheme
from lighthouse.trust import authorization, process_trust
from torchft_like.checkpointing.copy_ahead import CopyAhead
from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.state_stream import (
    CHUNK_BYTES,
    CORRUPT,
    HEADER_BYTES,
    PIECE_BYTES,
    Expectation,
    IncomingState,
    Snapshot,
    read_exactly,
    read_header,
    sums_nbytes,
)
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.errors import (
    AddressError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointTimeoutError,
    ShutdownError,
)
from torchft_like.futures import context_timeout
from torchft_like.plain_data import Limits
from torchft_like.runtime import resources
from torchft_like.runtime.connecting import connect_tcp, shut
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.hosts import local_host_towards, own_host
from torchft_like.runtime.numbers import whole_number

T = TypeVar("T")
_logger = logging.getLogger(__name__)
CHUNKS_MAX = 64
_PATH = "/checkpoint/"
LINES = 2  # connections to each source, by default


class HTTPTransport(CheckpointTransport[T]):
    """A transport that offers this rank's state over HTTP, and fetches that of others.

    It takes memory for one copy of the state on the CPU, unless receivers take it faster than it could be
    copied, from `send_checkpoint` until `disallow_checkpoint`; a transfer in progress keeps its copy until it
    ends, and at most two different copies are kept. Afterwards the kernel may take that memory back whenever
    it needs some; until then it counts as the process's (LazyFree in /proc/PID/smaps_rollup), and the next
    copy is made in it.

    Args:
        timeout: the longest that sending the state to one receiver may take, seconds or timedelta; and that a
          fetch may take to which no other limit is given.
        num_chunks: the number of connections to each source of a fetch, at a time; 0 means two.
        hostname: the name under which other hosts reach this one. By default the Manager sets it: as for its
          own server, to the interface that leads to the lighthouse. Without a Manager it is the address of
          this host's name, and the server starts when the address is asked for, or a state is offered.
        bind_host: the address to listen on; `hostname` by default.
        stall_timeout: how long the peer may send nothing before it counts as dead.
        state_bytes_max: the limit of the bytes of tensors to fetch. By default it is 16 times those of this
          rank's own state plus 256 MiB; there is no limit until the Manager has read that state.

    Raises:
        BindError: the address is not of this host.
        ConfigError: a number is out of range.
    """

    takes_helpers = keeps_offers = True

    def __init__(
        self,
        timeout: timedelta | float,
        num_chunks: int = 0,
        *,
        hostname: str | None = None,
        bind_host: str | None = None,
        stall_timeout: timedelta | float = timedelta(seconds=10),
        state_bytes_max: int | None = None,
    ) -> None:
        self._lines = whole_number(num_chunks, "num_chunks", most=CHUNKS_MAX) or LINES
        self._timeout_s = seconds_of(timeout, "timeout")
        self._stall_s = seconds_of(stall_timeout, "stall_timeout")
        self._key = ""
        self._limits = ServerLimits(chunk_s=self._stall_s, transfer_s=self._timeout_s)
        self._bind_host = bind_host
        self._has_hostname = hostname is not None
        self._serving: tuple[CheckpointServer, Address] | None = self._serve(hostname) if hostname else None
        self._expected = Expectation(state_bytes_max)
        self._memory, self._memory_ahead = KeptMemory(), KeptMemory()
        self._lock = threading.Lock()
        self._fetches: set[Fetch] = set()
        self._closed = False
        resources.track(self)

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

    def use_key(self, key: str) -> None:
        """Ask clients for this key in the header `Quorum-Key`, "" for none, from the next offer on."""
        with self._lock:
            self._key = key
            if self._serving is not None:
                self._serving[0].key = key

    def metadata(self) -> str:
        """Return the address of this rank's server, http://host:port, or https:// with a certificate."""
        return self.address().removesuffix(_PATH)

    def address(self) -> str:
        """Return the URL of the server, http://host:port/checkpoint/, which the step follows."""
        return f"{scheme()}://{self._served()[1]}{_PATH}"

    def allow_checkpoint(self, step: int) -> None:
        """Offer the current snapshot as the state of `step`; `send_checkpoint` offers by itself.

        Raises:
            CheckpointError: nothing is offered; `disallow_checkpoint` has dropped the copy.
        """
        self._check_open()
        if not self._served()[0].offer_as(step):
            raise CheckpointError(f"there is no state to offer as step {step}: call send_checkpoint")

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | float | None = None
    ) -> None:
        """Offer the state, and return when all of `dst_ranks` have it, or there is a copy of it.

        It replaces the earlier offer. Where there is a copy, every client that asks for the step is served
        until `disallow_checkpoint`, not only `dst_ranks`; without one, none is any more. A receiver is waited
        for only while the state is fetched at least as fast as it could be copied, and 0.1 seconds until it
        comes, so `timeout` has no effect. A state without large tensors on the CPU, and one for which
        `dst_ranks` is empty, is copied at once.
        """
        HTTPTransport.send_checkpoint_with(self, None, dst_ranks, step, state_dict, timeout)

    def begin_copy(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> CopyAhead | None:
        """Begin to copy tensors on a thread of their own, if the system has one."""
        try:
            return CopyAhead(tensors, self._memory_ahead)
        except RuntimeError as error:
            _logger.warning("the state is copied at the end of the step: %s", error)
            return None

    def send_checkpoint_with(
        self,
        ahead: CopyAhead | None,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta | float | None,
    ) -> None:
        """Do as `send_checkpoint`; of what was copied ahead no other copy is made."""
        self._check_open()
        server, snapshot = self._served()[0], Snapshot(state_dict, self._memory, ahead)
        if ahead is None and dst_ranks and snapshot.live_nbytes >= LIVE_FROM:
            server.deliver(step, snapshot, len(dst_ranks))
        else:
            server.offer(step, snapshot, len(dst_ranks))
            snapshot.fill()

    def check_state(self, state_dict: T) -> None:
        """Describe the state without copying a tensor, and expect a peer's state to be like it."""
        self._expected.learn(state_dict)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Answer requests for the step with `reason`, and nothing else, until the next offer."""
        self._served()[0].offer(step, None, refusal=reason)

    def disallow_checkpoint(self) -> None:
        """Offer nothing to new requests. Transfers in progress finish with the copy."""
        if self._serving is not None:
            self._serving[0].withdraw()

    def wait_fetched(self, idle: timedelta) -> None:
        """Wait until all receivers of `send_checkpoint` have the state, or none has fetched for `idle`."""
        if self._serving is not None:
            self._serving[0].wait_fetched(idle.total_seconds())

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta | float | None = None
    ) -> T:
        """Fetch the state of `step`; wait until it is offered.

        `timeout` is this transport's own unless given. The tensors are on the CPU, without gaps and without
        gradient: `load_state_dict` has to copy them into the model. A DTensor arrives as this rank's
        `plain_data.Shard`: `shards.place` puts it on a mesh.
        """
        source, here = Source(src_rank, metadata), Destination[T](key=self._key)
        return HTTPTransport.recv_checkpoint_from(self, [source], step, timeout, here)

    def recv_checkpoint_from(
        self,
        sources: Sequence[Source],
        step: int,
        timeout: timedelta | float | None,
        destination: Destination[T],
    ) -> T:
        """Fetch the first source's state of `step` from all sources, into the receiver's own tensors."""
        timeout_s = self._timeout_s if timeout is None else seconds_of(timeout)
        addresses = {source.rank: _address_of(source) for source in sources}
        limits = self._expected.limits
        fetch = Fetch(addresses, step, self._lines, timeout_s, self._stall_s, limits, destination)
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
        for fetch in self._fetches.copy():
            fetch.end(reason)

    def check_source(self, source: Source, timeout: timedelta) -> None:
        """Connect to the source's server once."""
        connect(_address_of(source), timeout.total_seconds(), is_plain=True).close()

    def lose_source(self, rank: int, reason: str) -> None:
        """Go on without a source that is lost, where there are others and it is not the one to be copied."""
        for fetch in self._fetches.copy():
            fetch.lose(rank, reason)

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
        server = CheckpointServer(Address(self._bind_host or host, 0), self._limits, self._key)
        return server, Address(host, server.port)

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the checkpoint transport was used after shutdown")


def _address_of(source: Source) -> Address:
    try:
        return parse_address(source.metadata, "the metadata of a checkpoint")
    except AddressError as error:
        raise CheckpointError(f"replica {source.rank} does not send over this transport: {error}") from error


# -- a source's server

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

LIVE_FROM = 16 * 1024 * 1024  # bytes of tensors whose copy is worth a wait; fewer are copied at once
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
        copied: how many were copied.
        copy_bytes_per_s: how fast they are copied.
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
        if full or not connection.start():
            _refuse(peer)

    def forget(self, peer: socket.socket) -> None:
        """Drop a connection that has ended."""
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


# -- a receiver's fetch

ASK_AGAIN_S = 0.05
CONNECT_S = 5.0
ASK_AGAIN = {
    202: "it had not offered that step",
    503: f"all its connections were taken, or only one of both has {TLS_ENV}",
}
STRIPE_CHUNKS_MAX = 4
STRIPES_PER_LINE = 8  # at the least, of a large state, so that none is waited for for long at the end
PATIENCE = 3.0  # how many times as long as the last stripe of another connection one may take at the end
PATIENCE_S = 0.1
SHOWN_S = 1.0  # after which progress is shown, and no more often than each SHOWN_AGAIN_S
SHOWN_AGAIN_S = 0.1
KEPT_OPEN_S = 2.0  # for which a connection without a request is kept, which its source ends some time later


class Stripe(NamedTuple):
    """A range of the payload, of whole chunks."""

    start: int
    stop: int


@dataclass(eq=False)
class _Source:
    """A source, and what is known of it."""

    rank: int
    address: Address
    is_first: bool
    offer_id: str = ""
    nbytes: int = 0  # of the payload, that came from it
    failure: BaseException | None = None


class Fetch:
    """A fetch of a peer's state, from one source or from several that have the same.

    `end` makes a blocked `run` raise at once, and a later `run` too.

    The first source is the one whose state it is: from it come the header and the sums. The payload is cut
    into stripes, and each connection to any source takes the next stripe when it has fetched the last: so a
    slow source is given less, and the stripes of a source that fails go to the others. A stripe of another
    source whose checksum is not the first one's is fetched again from the first, so what is received is the
    first one's state, bit for bit. At the end, when all stripes are under way, a connection that takes much
    longer for its last one loses it to one that has nothing to do.

    What the receiver has kept of the state is compared with the sums first, and only the rest is fetched.

    The sums are asked for at once where there are several sources, so that the first one is needed no longer
    than for these; a single source is asked at the end, when it has summed what it has sent. Each request
    says how much is left to be fetched, and in the end the sources are told that nothing is: a source may
    wait with its tensors for that.

    On a terminal it shows how much has come, where that takes more than a second.

    INVARIANT: a stripe is open, or one thread fetches it, or it has been read; so no two threads write to the
    same memory, and none writes after `run`.

    Args:
        addresses: the servers of the sources by their ranks; the state is that of the first.
        step: the step whose state is fetched.
        lines: the number of connections to each source at a time, beside one for header and sums.
        timeout_s: the limit of the whole fetch, the wait until the first source offers the step included.
        stall_s: how long a source may send nothing before it counts as dead.
        destination: what the receiver has, and expects.
    """

    def __init__(
        self,
        addresses: Mapping[int, Address],
        step: int,
        lines: int,
        timeout_s: float,
        stall_s: float,
        limits: Limits,
        destination: Destination[Any],
    ) -> None:
        self._sources = [
            _Source(rank, address, is_first=number == 0)
            for number, (rank, address) in enumerate(addresses.items())
        ]
        self._first = self._sources[0]
        self.step = step
        self._lines = lines
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._kept_open_s = min(KEPT_OPEN_S, stall_s / 4)
        self._limits = limits
        self._destination = destination
        self._changed = threading.Condition()
        self._connected: set[_Line] = set()
        self._ended: tuple[type[CheckpointError], str] | None = None
        self._progress = "it had not answered"
        self._open: deque[Stripe] = deque()
        self._again: deque[Stripe] = deque()  # of these only the first source's bytes will do
        self._under_way: dict[_Line, tuple[Stripe, float]] = {}
        self._unchecked: list[tuple[Stripe, _Source]] = []
        self._sums: bytes | None = None
        self._left_nbytes = 1  # of the payload, to be read and checked
        self._unread_nbytes = 1  # of it, to be read
        self._began = self._shown = 0.0
        self._id = uuid.uuid4().hex

    def run(self) -> object:
        """Fetch the state.

        Raises:
            CheckpointTimeoutError: the state did not come in time, or the source fell silent.
            CheckpointError: the state could not be fetched; the text names the source and the reason.
        """
        with context_timeout(self._expire, timedelta(seconds=self._timeout_s)):
            try:
                return self._fetch()
            except (OSError, CheckpointError) as error:
                raise self._explain(error) from error
            finally:
                self.end("it is over")

    def end(self, reason: str, kind: type[CheckpointError] = CheckpointError) -> None:
        """Close every connection of this fetch; its error has the first kind and reason."""
        with self._changed:
            if self._ended is None:
                self._ended = kind, reason
            for line in self._connected:
                line.shut()
            self._changed.notify_all()

    def lose(self, rank: int, reason: str) -> None:
        """Go on without a source that is lost, or end if that cannot be."""
        for source in self._sources:
            if source.rank == rank:
                self._lose(source, CheckpointError(reason))

    def _expire(self) -> None:
        self.end(f"after {self._timeout_s:g} s {self._progress}", CheckpointTimeoutError)

    def _fetch(self) -> object:
        with _Line(self, self._first) as line:
            incoming = self._read_header(line)
            self._destination.check(incoming.outline())
            if self._destination.own is not None and incoming.land_in(self._destination.own):
                self._destination.is_written = True
            self._left_nbytes = self._unread_nbytes = incoming.nbytes
            self._began = self._shown = time.monotonic()
            self._open.extend(_cut(incoming.nbytes, self._lines * len(self._sources)))
            self._take_kept(incoming, line)
            lines = min(self._lines, len(self._open))
            with ThreadPoolExecutor(lines * len(self._sources) or 1, "torchft-checkpoint-fetch") as pool:
                try:
                    self._start(pool, incoming, lines)
                    if self._sums is None and len(self._sources) == 1:
                        # No longer: on another connection the source may offer something else by then.
                        self._wait(lambda: self._unread_nbytes == 0, self._kept_open_s)
                    if self._sums is None:
                        self._read_sums(incoming, line)
                    self._wait(lambda: self._left_nbytes == 0)
                except BaseException as error:
                    kind, cause = self._cause_of(error)
                    self.end(cause, kind)
                    raise
                finally:
                    self.end("it is over")  # so that no thread waits for more
                    self._show(incoming, is_over=True)
        self._destination.received = {s.address.url: s.nbytes for s in self._sources if s.nbytes}
        return incoming.state()

    def _read_header(self, line: _Line) -> IncomingState:
        length = line.ask(f"header?wait_ms={int(self._stall_s / 2 * 1000)}")
        incoming = IncomingState(header := read_header(line, self._limits), self._limits)
        if length != HEADER_BYTES + len(header):
            raise CheckpointFormatError(f"it sent {length} bytes for a header of {len(header)}")
        self._progress = "it had not sent everything"
        return incoming

    def _take_kept(self, incoming: IncomingState, line: _Line) -> None:
        """Take what the receiver has kept, as far as the first source has the same; the rest stays open."""
        kept = self._destination.kept
        if kept is None or not incoming.is_laid_out_as(kept):
            return
        sums = self._read_sums(incoming, line)
        incoming.take(kept)
        self._open = deque(stripe for stripe in self._open if not incoming.matches(sums, *stripe))
        with self._changed:
            self._left_nbytes = self._unread_nbytes = sum(stop - start for start, stop in self._open)
            self._destination.kept_nbytes = incoming.nbytes - self._left_nbytes
            self._check(incoming)

    def _start(self, pool: ThreadPoolExecutor, incoming: IncomingState, lines: int) -> None:
        """Start a thread for each connection that fetches stripes, as many as the system has."""
        try:
            for _ in range(lines):
                for source in self._sources:
                    pool.submit(self._work, source, incoming)
        except RuntimeError as error:  # threading raises it if the system has no thread
            if not pool._threads:
                raise CheckpointError(f"there is no thread to fetch it: {error}") from error
            _logger.warning("a state is fetched over fewer connections: %s", error)

    def _read_sums(self, incoming: IncomingState, line: _Line) -> bytes:
        length = line.ask("sums", sums_nbytes(incoming.nbytes))
        sums = read_exactly(line, length)
        with self._changed:
            self._sums = sums
            line.is_idle = True
            self._check(incoming)
        return sums

    def _wait(self, has_come: Callable[[], bool], limit_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or has_come(), limit_s)
            if self._ended is not None and not has_come():
                raise CheckpointError("it has ended")  # `_ended` says why

    # -- on the thread of a connection

    def _work(self, source: _Source, incoming: IncomingState) -> None:
        """Fetch stripes from a source, until there are none, or it fails."""
        try:
            with _Line(self, source) as line:
                if not source.is_first:
                    line.ask("header")
                    incoming.check_layout(read_header(line, self._limits))
                took_s = 0.0
                while (stripe := self._next(line, took_s)) is not None:
                    began = time.monotonic()
                    self._read(line, stripe, incoming)
                    took_s = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 - whatever it is, the fetch goes on with other sources or ends
            self._lose(source, error)

    def _read(self, line: _Line, stripe: Stripe, incoming: IncomingState) -> None:
        has_come = False
        try:
            line.ask(f"payload?from={stripe.start}&to={stripe.stop}", stripe.stop - stripe.start)
            incoming.read(line, *stripe)
            has_come = True
        except (OSError, CheckpointError):
            if not line.has_lost_stripe:
                raise
            line.close()
        finally:
            with self._changed:
                del self._under_way[line]
                line.is_idle = True
                if has_come:
                    self._unread_nbytes -= stripe.stop - stripe.start
                    line.source.nbytes += stripe.stop - stripe.start
                    self._unchecked.append((stripe, line.source))
                    self._check(incoming)
                    self._show(incoming)
                else:
                    self._open.appendleft(stripe)
                self._changed.notify_all()

    def _show(self, incoming: IncomingState, *, is_over: bool = False) -> None:
        """Show on a terminal how much has come; a line is ended if it was begun."""
        now, is_begun = time.monotonic(), self._shown > self._began
        is_due = now - self._shown > (SHOWN_AGAIN_S if is_begun else SHOWN_S)
        if not (is_begun if is_over else is_due) or not getattr(sys.stderr, "isatty", bool)():
            return
        self._shown, nbytes = now, incoming.nbytes
        come = nbytes - self._unread_nbytes
        text = f"state of step {self.step}: {come / nbytes:4.0%} of {nbytes / 1e9:.2f} GB, "
        rate = f"{come / 1e9 / (now - self._began):.2f} GB/s"
        with suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"\r{text}{rate}" + "\n" * is_over)

    def _next(self, line: _Line, took_s: float) -> Stripe | None:
        """Return the next stripe for a connection, when there is one; None when there will be none."""
        source, since = line.source, time.monotonic()
        with self._changed:
            line.is_idle = True
            while self._ended is None and self._left_nbytes and source.failure is None:
                is_again = source.is_first and self._again
                if is_again or (self._open and (not line.has_lost_stripe or self._is_alone(source))):
                    line.has_lost_stripe = line.is_idle = False
                    stripe = (self._again if is_again else self._open).popleft()
                    self._under_way[line] = stripe, time.monotonic()
                    return stripe
                limit_s = None if line.has_lost_stripe else self._steal(source, took_s)
                if (kept_s := since + self._kept_open_s - time.monotonic()) <= 0:
                    line.close()
                elif line.socket is not None:
                    limit_s = kept_s if limit_s is None else min(limit_s, kept_s)
                self._changed.wait(limit_s)
        return None

    def _is_alone(self, source: _Source) -> bool:
        return all(other.failure is not None for other in self._sources if other is not source)

    def _steal(self, thief: _Source, took_s: float) -> float | None:
        """Take a stripe from another source's slow connection; return after how long one will be slow."""
        others = [
            (since, line)
            for line, (_, since) in self._under_way.items()
            if line.source is not thief and not line.has_lost_stripe
        ]
        if not others or not took_s:
            return None
        since, slowest = min(others, key=itemgetter(0))
        patience_s = since + max(PATIENCE * took_s, PATIENCE_S) - time.monotonic()
        if patience_s > 0:
            return patience_s
        _logger.info("%s is slow: another source sends the rest", slowest.source.address.url)
        slowest.has_lost_stripe = True
        slowest.shut()
        return None

    def _check(self, incoming: IncomingState) -> None:
        """Compare what has come with the first source's sums, once these are there; with the lock held."""
        if self._sums is None or self._ended is not None:
            return
        for stripe, source in self._unchecked:
            if incoming.matches(self._sums, *stripe):
                self._left_nbytes -= stripe.stop - stripe.start
            elif not source.is_first and self._first.failure is None:
                self._refuse(source, f"its bytes {stripe.start} to {stripe.stop} differ")
                self._again.append(stripe)
                self._unread_nbytes += stripe.stop - stripe.start
            else:
                error = CheckpointFormatError(f"bytes {stripe.start} to {stripe.stop} {CORRUPT}")
                self._ended = self._cause_of(error)
        self._unchecked.clear()
        if not self._left_nbytes:
            for line in self._connected:
                if line.is_idle:
                    line.say_done()
        self._changed.notify_all()

    def _lose(self, source: _Source, error: BaseException) -> None:
        """Go on without a source, or end if that cannot be."""
        with self._changed:
            if source.failure is not None or self._ended is not None or not self._left_nbytes:
                return
            source.failure = error
            needs_it = source.is_first and (self._sums is None or self._again)
            if needs_it or all(other.failure is not None for other in self._sources):
                self._ended = self._cause_of(error)
            self._refuse(source, self._cause_of(error)[1])
            for line in self._connected:
                if line.source is source or self._ended is not None:
                    line.shut()
            self._changed.notify_all()

    def _refuse(self, source: _Source, reason: str) -> None:
        self._destination.refused[source.address.url] = reason
        _logger.info("%s is no source of the rest of the state: %s", source.address.url, reason)

    # -- connections

    def connect(self, line: _Line) -> socket.socket:
        """Connect a line to its source; `end` and `_lose` can end that, and what is done with the socket."""

        def register(made: socket.socket) -> None:
            with self._changed:
                if self._ended is not None:
                    raise CheckpointError(self._ended[1])
                if line.source.failure is not None:
                    raise CheckpointError(str(line.source.failure))
                line.socket = made
                self._connected.add(line)

        connection = connect(line.source.address, min(self._stall_s, CONNECT_S), register)
        connection.settimeout(self._stall_s)
        return connection

    def request(self, source: _Source, what: str) -> bytes:
        """Return a request, which shows a token, if there is one, and says how much is left to be fetched."""
        fields = f"Host: {source.address}\r\n"
        if token := authorization():
            fields += f"Authorization: {token}\r\n"
        if key := self._destination.key:
            fields += f"Quorum-Key: {key}\r\n"
        fields += f"Checkpoint-Fetch: {self._id} {self._unread_nbytes}\r\n"
        return f"GET /checkpoint/{self.step}/{what} HTTP/1.1\r\n{fields}\r\n".encode()

    def asks_again(self, source: _Source, status: int) -> None:
        """Note why the source has to be asked again, and pause, for peers that do not wait themselves."""
        if source.is_first:
            self._progress = ASK_AGAIN[status]
        time.sleep(ASK_AGAIN_S)

    # -- errors

    def _explain(self, error: Exception) -> CheckpointError:
        kind, cause = self._ended or self._cause_of(error)
        return kind(f"state of step {self.step} could not be fetched from {self._first.address.url}: {cause}")

    def _cause_of(self, error: BaseException) -> tuple[type[CheckpointError], str]:
        if isinstance(error, TimeoutError) and not isinstance(error, CheckpointError):
            return CheckpointTimeoutError, f"no byte came for {self._stall_s:g} s"
        if isinstance(error, ssl.SSLError):  # as a server says only then that it refuses a certificate
            return CheckpointError, _about_certificates(error)
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        return kind, str(error) or type(error).__name__


class _Line:
    """A connection to a source, which is made when something is asked, and carries one answer at a time.

    Attributes:
        has_lost_stripe: whether another source's connection fetches its stripe, as it took too long.
        is_idle: whether it carries no answer, and may say that all has come.
    """

    def __init__(self, fetch: Fetch, source: _Source) -> None:
        self.source = source
        self.has_lost_stripe = self.is_idle = False
        self.socket: socket.socket | None = None
        self._fetch = fetch
        self._answer: HTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()  # which keeps the socket
        if self.socket is not None:
            self.socket.close()
        self._answer = self.socket = None

    def shut(self) -> None:
        """End what another thread does with the connection."""
        if (connection := self.socket) is not None:
            shut(connection)

    def say_done(self) -> None:
        """Tell the source, if it is connected, that all of the state has come; there is no answer."""
        with suppress(OSError):  # it is gone, or does not listen
            if (connection := self.socket) is not None:  # which its own thread may close meanwhile
                connection.sendall(self._fetch.request(self.source, "done"))

    def ask(self, what: str, length: int | None = None) -> int:
        """Ask until there is an answer; return its length, which must be the given one.

        Raises:
            CheckpointError: the source refuses, or it has another snapshot than before.
            CheckpointFormatError: it does not answer as a source does.
        """
        source, step = self.source, ""
        while True:
            was_open = self.socket is not None
            try:
                answer = self._send(
                    self.socket or self._fetch.connect(self), self._fetch.request(source, what)
                )
            except _NoPlaceError:
                self.close()
                self._fetch.asks_again(source, 503)
                continue
            except (ConnectionError, ssl.SSLEOFError) as error:
                if not was_open or self.has_lost_stripe:
                    raise CheckpointError("it ended the connection without an answer") from error
                self.close()  # nothing was asked for too long, as this rank was busy with a long header
                continue
            if answer.status not in ASK_AGAIN:
                break
            if answer.status == 503:
                self.close()
            self._fetch.asks_again(source, answer.status)
        if answer.status != 200:
            reason = answer.reason.encode("latin-1").decode(errors="replace")
            raise CheckpointError(f"it answered {answer.status} {printable(reason[:400])}")
        if (step := answer.headers.get("Checkpoint-Step", "none")) != str(self._fetch.step):
            raise CheckpointFormatError(f"it sent step {printable(step[:200])}")
        if source.offer_id not in ("", offer_id := answer.headers.get("Checkpoint-Id", "")):
            raise CheckpointError("its snapshot was replaced between two requests")
        source.offer_id = offer_id
        if (sent := answer.length) is None:
            raise CheckpointFormatError("its answer does not say how long it is")
        if length not in (None, sent):
            raise CheckpointFormatError(f"it sends {sent} bytes, and by its own account {length}")
        return sent

    def readinto(self, buffer: memoryview, /) -> int:
        """Read some of the answer; return the number of bytes, 0 at its end or that of the connection."""
        return 0 if self._answer is None else self._answer.readinto(buffer)

    def _send(self, connection: socket.socket, request: bytes) -> HTTPResponse:
        """Send a request, and return its answer, of which the head has been read."""
        connection.sendall(request)
        self._answer = answer = HTTPResponse(connection, method="GET")
        try:
            answer.begin()
        except RemoteDisconnected:  # it is an HTTPException, too
            raise
        except HTTPException as error:
            raise CheckpointFormatError(f"its answer is not HTTP: {printable(str(error)[:80])}") from error
        return answer


class _NoPlaceError(CheckpointError):
    """A source has no place for another connection, and does not even shake hands to say so."""


def connect(
    address: Address,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda _: None,
    *,
    is_plain: bool = False,
) -> socket.socket:
    """Connect to a source's server, as `connect_tcp` does.

    Raises:
        CheckpointError: it cannot be reached; the text says what to set where.
    """
    try:
        return connect_tcp(address, timeout_s, on_socket, is_plain=is_plain)
    except (ssl.SSLEOFError, ConnectionResetError) as error:
        raise _NoPlaceError(f"{address.url} ended the connection before it began") from error
    except ssl.SSLError as error:
        raise CheckpointError(f"{address.url}: {_about_certificates(error)}") from error
    except OSError as error:
        is_late = isinstance(error, TimeoutError)
        what = f"no answer within {timeout_s:g} s" if is_late else str(error)
        here = "this host"
        with suppress(AddressError):  # there is no way there
            here = f"this host, which is {local_host_towards(address.host)} towards there,"
        raise (CheckpointTimeoutError if is_late else CheckpointError)(
            f"no connection to {address.url}, which its replica offers ({what}): if that lives, set "
            f"TORCHFT_HOSTNAME on its hosts to a name, an address or an interface that {here} reaches"
        ) from error


def _about_certificates(error: ssl.SSLError) -> str:
    return (
        f"one of both ends is not of this job, as its certificate says, or that it has none "
        f"({error.reason}): all of a job have {TLS_ENV}, or none, and an authority in common"
    )


def _cut(nbytes: int, lines: int) -> Iterator[Stripe]:
    """Cut a payload into stripes for so many connections."""
    chunks = min(max(nbytes // CHUNK_BYTES // (lines * STRIPES_PER_LINE), 1), STRIPE_CHUNKS_MAX)
    size = chunks * CHUNK_BYTES
    for start in range(0, nbytes, size):
        yield Stripe(start, min(start + size, nbytes))
