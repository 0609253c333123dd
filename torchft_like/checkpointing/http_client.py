"""A fetch of a peer's state over HTTP, which another thread can end at any moment."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus

from lighthouse.address import Address
from lighthouse.events import printable
from torchft_like.checkpointing.state_stream import IncomingState, read_header
from torchft_like.errors import CheckpointError, CheckpointFormatError, CheckpointTimeoutError
from torchft_like.futures import context_timeout
from torchft_like.plain_data import Limits
from torchft_like.runtime.connecting import connect_tcp

ASK_AGAIN_S = 0.05

_ASK_AGAIN: dict[int, str] = {
    HTTPStatus.ACCEPTED: "it had not offered that step",
    HTTPStatus.SERVICE_UNAVAILABLE: "all its connections were taken",
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchOptions:
    """The options of a fetch.

    Attributes:
        step: the step whose state is fetched.
        parts: the number of connections at a time.
        timeout_s: the limit of the whole fetch, the wait until the peer offers the step included.
        stall_s: how long the peer may send nothing before it counts as dead.
        limits: the limits of the state.
    """

    step: int
    parts: int
    timeout_s: float
    stall_s: float
    limits: Limits


class Fetch:
    """A single fetch. `end` makes a blocked `run` raise at once, and a later `run` too."""

    def __init__(self, address: Address, options: FetchOptions) -> None:
        self._address = address
        self._options = options
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
        with context_timeout(self._expire, timedelta(seconds=self._options.timeout_s)):
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
                _shut(connection)
            self._sockets.clear()

    def _expire(self) -> None:
        self.end(f"after {self._options.timeout_s:g} s {self._progress}", is_overdue=True)

    def _fetch(self) -> object:
        with self._response(0) as response:
            limits = self._options.limits
            incoming = IncomingState(read_header(response, limits), limits)
            incoming.check_length(response.length or 0, 0, self._options.parts)
            if self._options.parts == 1:
                incoming.read_part(response)
            else:
                self._read_all_parts(incoming, response)
        return incoming.state()

    def _read_all_parts(self, incoming: IncomingState, first: http.client.HTTPResponse) -> None:
        parts = self._options.parts
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
            if read_header(response, self._options.limits) != incoming.header:
                raise CheckpointFormatError("its parts have different headers")
            incoming.check_length(response.length or 0, index, self._options.parts)
            incoming.read_part(response, index, self._options.parts)

    @contextmanager
    def _response(self, part: int) -> Iterator[http.client.HTTPResponse]:
        """Yield an open response that brings the part; ask again for as long as the step is not offered."""
        while True:
            connection = http.client.HTTPConnection(self._address.host, self._address.port)
            connection.sock = connect_tcp(self._address, self._options.stall_s, self._register)
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
        """Return the request's path, by which the peer may wait for half of the time after which it counts as
        dead.
        """
        options = self._options
        wait_ms = int(options.stall_s / 2 * 1000)
        return f"/checkpoint/{options.step}?part={part}&parts={options.parts}&wait_ms={wait_ms}"

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != HTTPStatus.OK:
            raise CheckpointError(f"it answered {response.status} {printable(response.reason[:400])}")
        step = response.getheader("Checkpoint-Step")
        if step != str(self._options.step):
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
        return kind(
            f"state of step {self._options.step} could not be fetched from {self._address.url}: {cause}"
        )

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no byte came for {self._options.stall_s:g} s"
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


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # it is not connected yet, or has ended by itself
        _logger.debug("shutdown of a socket: %s", error)
