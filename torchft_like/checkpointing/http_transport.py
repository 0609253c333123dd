"""State over HTTP: a transport that needs only a network.

The source sends from its tensors while receivers are fast, or else copies its state once, and goes on
training (`http_server`); receivers fetch it when they come, over several connections and from several
sources, and read straight into the tensors that they keep (`http_fetch`). Another thread can end a fetch at
any moment. No bytes from the network are ever unpickled.

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
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch

from lighthouse.address import Address, parse_address
from lighthouse.tls import scheme
from torchft_like.checkpointing.copy_ahead import CopyAhead
from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.http_fetch import Fetch, connect
from torchft_like.checkpointing.http_server import CheckpointServer, ServerLimits
from torchft_like.checkpointing.state_stream import Expectation, Snapshot
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.errors import AddressError, CheckpointError, ShutdownError
from torchft_like.runtime import resources
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.hosts import own_host
from torchft_like.runtime.numbers import whole_number

T = TypeVar("T")
_logger = logging.getLogger(__name__)
CHUNKS_MAX = 64
_PATH = "/checkpoint/"
LINES = 2  # connections to each source, by default
LIVE_FROM = 16 * 1024 * 1024  # bytes of tensors whose copy is worth a wait; fewer are copied at once


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
