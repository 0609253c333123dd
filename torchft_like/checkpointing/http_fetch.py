"""A receiver's fetch of a state over HTTP, from one source or several.

`http_transport` describes what is asked and answered.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from operator import itemgetter
from typing import Any, NamedTuple, Self

from lighthouse.address import Address
from lighthouse.events import printable
from lighthouse.tls import TLS_ENV
from lighthouse.trust import authorization
from torchft_like.checkpointing.state_stream import (
    CHUNK_BYTES,
    CORRUPT,
    HEADER_BYTES,
    IncomingState,
    read_exactly,
    read_header,
    sums_nbytes,
)
from torchft_like.checkpointing.transport import Destination
from torchft_like.errors import AddressError, CheckpointError, CheckpointFormatError, CheckpointTimeoutError
from torchft_like.futures import context_timeout
from torchft_like.plain_data import Limits
from torchft_like.runtime.connecting import connect_tcp, shut
from torchft_like.runtime.hosts import local_host_towards

_logger = logging.getLogger(__name__)

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
        lines: the number of connections to each source at a time, beside one for header and sums.
        timeout_s: the limit of the whole fetch, the wait until the first source offers the step included.
        stall_s: how long a source may send nothing before it counts as dead.
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
                kind, cause = self._ended or self._cause_of(error)
                what = f"state of step {self.step} could not be fetched from {self._first.address.url}"
                raise kind(f"{what}: {cause}") from error
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
            self._destination.check(incoming.outline)
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
