"""State over HTTP: a transport that needs only a network.

The source sends from its tensors while receivers are fast, or else copies its state once, and goes on
training (`http_server.py`); receivers fetch it when they come, over several connections and from several
sources, and read straight into the tensors that they keep (`http_fetch.py`). Another thread can end a fetch
at any moment. No bytes from the network are ever unpickled.
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
from torchft_like.checkpointing.http_fetch import Fetch, connect
from torchft_like.checkpointing.http_server import LIVE_FROM, CheckpointServer, ServerLimits
from torchft_like.checkpointing.kept_memory import KeptMemory
from torchft_like.checkpointing.state_stream import Expectation, Snapshot
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.errors import AddressError, CheckpointError, ShutdownError
from torchft_like.runtime import living
from torchft_like.runtime.hosts import own_host

T = TypeVar("T")
logger = logging.getLogger(__name__)
CHUNKS_MAX = 64
LINES = 2  # connections to each source, by default


class HTTPTransport(CheckpointTransport[T]):
    """A transport that offers this rank's state over HTTP, and fetches that of others.

    It takes memory for one copy of the state on the CPU, unless receivers take it faster than it could be
    copied, from `send_checkpoint` until `disallow_checkpoint`; a transfer in progress keeps its copy until it
    ends, and at most two different copies are kept. Afterwards the kernel may take that memory back whenever
    it needs some; until then it counts as the process's (LazyFree in /proc/PID/smaps_rollup), and the next
    copy is made in it.

    Args:
        timeout: the longest that sending the state to one receiver may take.
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
        ValueError: a number is out of range.
    """

    takes_helpers = keeps_offers = True

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
        self._lines = num_chunks or LINES
        self._stall_s = stall_timeout.total_seconds()
        self._key = ""
        self._limits = ServerLimits(chunk_s=self._stall_s, transfer_s=timeout.total_seconds())
        self._bind_host = bind_host
        self._has_hostname = hostname is not None
        self._serving: tuple[CheckpointServer, Address] | None = self._serve(hostname) if hostname else None
        self._expected = Expectation(state_bytes_max)
        self._memory, self._memory_ahead = KeptMemory(), KeptMemory()
        self._lock = threading.Lock()
        self._fetches: set[Fetch] = set()
        self._closed = False
        living.lives(self)

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
        return f"{scheme()}://{self._served()[1]}"

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
        """Offer the state, and return when all of `dst_ranks` have it, or there is a copy of it.

        It replaces the earlier offer. Where there is a copy, every client that asks for the step is served
        until `disallow_checkpoint`, not only `dst_ranks`; without one nobody is any more. A receiver is
        waited for only while the state is fetched at least as fast as it could be copied, and 0.1 seconds
        until it comes, so `timeout` has no effect. A state without large tensors on the CPU, and one
        that is sent to nobody in particular, is copied at once.
        """
        self.send_checkpoint_with(None, dst_ranks, step, state_dict, timeout)

    def begin_copy(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> CopyAhead | None:
        """Begin to copy tensors on a thread of their own, if the system has one."""
        try:
            return CopyAhead(tensors, self._memory_ahead)
        except RuntimeError as error:
            logger.warning("the state is copied at the end of the step: %s", error)
            return None

    def send_checkpoint_with(
        self, ahead: CopyAhead | None, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
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
        return self.recv_checkpoint_from([Source(src_rank, metadata)], step, timeout, Destination())

    def recv_checkpoint_from(
        self, sources: Sequence[Source], step: int, timeout: timedelta, destination: Destination[T]
    ) -> T:
        """Fetch the first source's state of `step` from all sources, into the receiver's own tensors."""
        addresses = {source.rank: _address_of(source) for source in sources}
        limits, timeout_s = self._expected.limits, timeout.total_seconds()
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
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.end(reason)

    def check_source(self, source: Source, timeout: timedelta) -> None:
        """Connect to the source's server once."""
        connect(_address_of(source), timeout.total_seconds(), is_plain=True).close()

    def lose_source(self, rank: int, reason: str) -> None:
        """Go on without a source that is lost, where there are others and it is not the one to be copied."""
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
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
