"""State over HTTP from a snapshot in memory: a transport that needs only a network.

The source copies its state once and goes on training; receivers fetch the copy when they come, and
read straight into the tensors that they keep. Another thread can end a fetch at any moment. No bytes from the
network are ever unpickled.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import TypeVar, cast

from lighthouse.address import Address, parse_address
from lighthouse.events import printable
from torchft_like.checkpointing.http_server import CheckpointServer, ServerLimits, shut
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
        self._end_reason: str | None = None
        self._is_overdue = False
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

    def end(self, reason: str, is_overdue: bool = False) -> None:
        """Close every connection of this fetch; errors show the first reason."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason, self._is_overdue = reason, is_overdue
            for connection in self._sockets:
                shut(connection)
            self._sockets.clear()

    def _expire(self) -> None:
        self.end(f"after {self._timeout_s:g} s {self._progress}", is_overdue=True)

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
                others = [_submit(pool, self._read_part, incoming, index) for index in range(1, parts)]
                incoming.read_part(first, 0, parts)
                for other in others:
                    other.result()
            except BaseException as error:
                self.end(
                    self._describe(error), isinstance(error, TimeoutError)
                )  # so that the other parts fail now and not later
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
            if self._end_reason is not None:
                raise CheckpointError(self._end_reason)
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
        own = self._describe(error)
        cause = self._end_reason or own
        kind = CheckpointError
        if self._is_overdue or (isinstance(error, TimeoutError) and cause == own):
            kind = CheckpointTimeoutError
        elif isinstance(error, CheckpointFormatError) and cause == own:
            kind = CheckpointFormatError
        return kind(f"state of step {self._step} could not be fetched from {self._address.url}: {cause}")

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no byte came for {self._stall_s:g} s"
        return str(error) or type(error).__name__


def _submit(
    pool: ThreadPoolExecutor,
    read_part: Callable[[IncomingState, int], None],
    incoming: IncomingState,
    index: int,
) -> Future[None]:
    try:
        return pool.submit(read_part, incoming, index)
    except RuntimeError as error:  # threading raises it if the system has no thread
        raise CheckpointError(f"there is no thread for part {index} of it: {error}") from error
