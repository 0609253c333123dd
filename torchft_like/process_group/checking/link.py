"""The connections between the ranks of a group and the referee, which lives on rank 0.

While a group is configured, rank 0 listens, publishes its address in the store, and closes the listener once
every rank has connected; a secret that is only in the store keeps strangers out. From then on each rank has
one connection, rank 0 one to itself.

On both sides only the thread that reads a socket closes it. `cut` shuts them down, from any
thread and at any time, which ends every wait here and on the other ranks.

A message is a header of fixed size and JSON of bounded length: a statement, or what is wrong with a call. The
referee may also ask how far a rank is, which says so. No message is trusted: bytes that are none of these
messages raise ValueError, and the rank that sent it is treated as lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from lighthouse.address import Address, parse_address
from lighthouse.core.json_text import read_json
from lighthouse.listening import listen_tcp
from torchft_like.core.agreement.referee import Answer, Call, Missing, Problem, Question, Referee
from torchft_like.core.agreement.rules import Disagreement
from torchft_like.core.agreement.statements import decode
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.store import AbortableStore, GroupMembers, meeting_store
from torchft_like.runtime.connecting import connect_tcp, shut
from torchft_like.runtime.hosts import local_host_towards

if TYPE_CHECKING:
    from torchft_like.process_group.checking.backend import CheckedBackend

CALL, OVERDUE, PASSED, WHY = 1, 2, 3, 4  # kinds of requests
RULING, LAST_RULING, QUESTION = 1, 2, 3  # kinds of answers
BODY_BYTES_MAX = 4 * 1024 * 1024
REQUEST = struct.Struct("<BQQdI")  # kind, ticket, number, timeout (seconds), length of the body
MESSAGE_BYTES_MAX = REQUEST.size + BODY_BYTES_MAX
# Kind, ticket, agreement or the number that is asked about, length of the body; an empty body means that the
# call may run.
ANSWER = struct.Struct("<BQQI")
TOKEN_BYTES = 16
CALLERS_MAX = 64  # beside the ranks, until they have said who they are
JOIN_SECONDS_MAX = 5.0
READ_BYTES = 1 << 16
SILENCE_LOOK_MS = 1000
PATIENCE_S_MAX = 3600.0  # the system call's limit

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI?")  # the secret, the rank, whether it predicts calls
_HINT = "is check_collectives (TORCHFT_CHECK_COLLECTIVES) the same on every rank?"
_logger = logging.getLogger(__name__)


class Sockets:
    """Sockets that any thread can shut down.

    A lock keeps `cut` from a socket that is being closed: the number of a closed descriptor may belong to
    another file.
    """

    def __init__(self, *sockets: socket.socket) -> None:
        self._lock = threading.Lock()
        self._sockets = list(sockets)
        self.is_cut = False

    def add(self, one: socket.socket) -> None:
        """Add a socket; it is shut down at once if the others were."""
        with self._lock:
            self._sockets.append(one)
            if self.is_cut:
                shut(one)

    def drop(self, one: socket.socket) -> None:
        """Close one socket, and forget it."""
        with self._lock:
            self._sockets.remove(one)
            one.close()

    def cut(self) -> None:
        """End every wait for the sockets. Any thread may call this; it never blocks."""
        with self._lock:
            self.is_cut = True
            for one in self._sockets:
                shut(one)

    def close(self) -> None:
        """Close the sockets; for the thread that reads them."""
        with self._lock:
            for one in self._sockets:
                one.close()


class End(Enum):
    """Why no ruling can come any more."""

    CUT = "the connections were given up"
    CLOSED = "rank 0 closed the connection"
    SILENT = "rank 0 does not answer"


class Link:
    """A rank's connection to the referee.

    Args:
        connection: the socket, which the link owns from now on.
        hub: the referee's end; on rank 0 only.
    """

    def __init__(self, connection: socket.socket, hub: Hub | None = None) -> None:
        self._socket = connection
        self._sockets = Sockets(connection)
        self._hub = hub
        self._sending = threading.Lock()
        self._was_cut = False
        self._thread: threading.Thread | None = None

    def start(self, recipient: CheckedBackend) -> None:
        """Start a thread that calls `recipient`."""
        self._thread = threading.Thread(
            target=self._read, args=(recipient,), name="torchft-checking", daemon=True
        )
        self._thread.start()

    def send(self, request: Request) -> None:
        """Send a request to the referee.

        Raises:
            OSError: the connection is closed.
        """
        try:
            with self._sending:
                self._socket.sendall(request.encode())
        except BaseException:
            self.cut()  # a part of a message may have been sent, so nothing can follow it
            raise

    def cut(self) -> None:
        """End the connection, and on rank 0 those of all ranks. This never blocks."""
        self._was_cut = True
        self._sockets.cut()
        if self._hub is not None:
            self._hub.cut()

    def join(self) -> None:
        """Wait until the link's threads have ended after `cut`, at most for JOIN_SECONDS_MAX each."""
        for thread in (self._thread, self._hub.thread if self._hub else None):
            if thread is not None and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS_MAX)

    def is_alive(self) -> bool:
        """Return whether the link can still deliver a ruling."""
        return self._thread is not None and self._thread.is_alive()

    def delivers_here(self) -> bool:
        """Return whether the calling thread is the one that delivers rulings."""
        return threading.current_thread() is self._thread

    def _read(self, recipient: CheckedBackend) -> None:
        why = End.CLOSED
        try:
            while True:
                self._await(recipient)
                kind, ticket, number, length = ANSWER.unpack(_receive(self._socket, ANSWER.size))
                if kind not in (RULING, LAST_RULING, QUESTION) or length > BODY_BYTES_MAX:
                    raise ValueError(f"an answer of kind {kind} and {length} bytes")
                problem = decode_problem(_receive(self._socket, length))
                if kind == QUESTION:
                    recipient.say_when_passed(number)
                else:
                    recipient.deliver(ticket, problem, number, kind == LAST_RULING)
        except TimeoutError:
            why = End.SILENT
        except (OSError, ValueError) as error:
            _logger.debug("no more rulings from rank 0: %s", error)
        finally:
            why = End.CUT if self._was_cut else why
            self.cut()
            self._sockets.close()
            recipient.end(why)

    def _await(self, recipient: CheckedBackend) -> None:
        """Wait until a message comes. Only its silence tells that rank 0 is stopped."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(SILENCE_LOOK_MS):
            if recipient.is_overdue():
                raise TimeoutError("rank 0 does not answer")


class Hub:
    """The referee's end of all connections, and the thread that serves them.

    Args:
        connections: the ranks' connections, in the order of ranks, which the hub owns from now on.
        predicts: whether the ranks predict calls.
    """

    def __init__(self, connections: list[socket.socket], predicts: bool = False) -> None:
        self._connections = connections
        self._sockets = Sockets(*connections)
        self._open = set(range(len(connections)))
        self._buffers = [bytearray() for _ in connections]
        self._referee = Referee(len(connections), predicts)
        self._selector = selectors.DefaultSelector()
        self.thread = threading.Thread(target=self._serve, name="torchft-checking-referee", daemon=True)
        for rank, connection in enumerate(connections):
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self.thread.start()

    def cut(self) -> None:
        """End all connections. This never blocks."""
        self._sockets.cut()

    def _serve(self) -> None:
        try:
            while self._open:
                ready = [key.data for key, _ in self._selector.select(self._patience_s())]
                for rank in ready:  # lost ranks first: the calls of others may wait for them in vain
                    self._take_in(rank)
                for rank in ready:
                    self._judge_all(rank)
                self._announce(self._referee.expire(time.monotonic()))
        finally:
            self._selector.close()
            self._sockets.cut()
            self._sockets.close()

    def _patience_s(self) -> float | None:
        deadline_s = self._referee.next_deadline_s()
        return None if deadline_s is None else min(max(0.0, deadline_s - time.monotonic()), PATIENCE_S_MAX)

    def _take_in(self, rank: int) -> None:
        """Read what has come from a rank; a rank whose connection has ended is lost with what it sent."""
        buffer = self._buffers[rank]
        try:
            while len(buffer) < MESSAGE_BYTES_MAX:
                data = self._connections[rank].recv(READ_BYTES)
                if not data:
                    raise ConnectionError("the connection was closed")
                buffer += data
        except BlockingIOError:
            pass
        except OSError as error:
            _logger.debug("rank %d: %s", rank, error)
            self._announce(self._lose(rank))

    def _judge_all(self, rank: int) -> None:
        """Judge the requests that have come from a rank."""
        try:
            while rank in self._open and (request := take_request(self._buffers[rank])) is not None:
                self._announce(self._judge(rank, request))
        except ValueError as error:
            _logger.debug("rank %d: %s", rank, error)
            self._announce(self._lose(rank))

    def _judge(self, rank: int, request: Request) -> list[Answer]:
        now_s = time.monotonic()
        if request.kind == OVERDUE:
            return self._referee.overdue(rank, request.ticket, now_s)
        if request.kind == PASSED:
            return self._referee.passed(rank, request.number)
        if request.kind == WHY:
            return self._referee.why(rank)
        statement, deadline_s = decode(request.body), now_s + request.timeout_s
        return self._referee.hear(Call(rank, request.ticket, statement, now_s, deadline_s, request.number))

    def _lose(self, rank: int) -> list[Answer]:
        if rank not in self._open:
            return []
        self._open.remove(rank)
        self._selector.unregister(self._connections[rank])
        # Connections that this rank has cut say nothing of the ranks behind them.
        return [] if self._sockets.is_cut else self._referee.lose(rank)

    def _announce(self, answers: Iterable[Answer]) -> None:
        """Send answers; to rank 0 last, because its reaction may end all connections."""
        pending = deque(sorted(answers, key=lambda answer: answer.rank == 0))
        while pending:
            answer = pending.popleft()
            if answer.rank in self._open and not self._send(answer):
                # The rank reads nothing, or is gone: the others must not wait for it.
                pending.extendleft(self._lose(answer.rank))

    def _send(self, answer: Answer) -> bool:
        message = encode_answer(answer)
        try:
            return self._connections[answer.rank].send(message) == len(message)
        except OSError:
            return False


def join(members: GroupMembers, abort: AbortSignal, predicts: bool) -> Link:
    """Connect the ranks of a group that is being configured; block until all are there.

    Args:
        predicts: whether the ranks predict calls, and say only what is not as predicted.

    Raises:
        ProcessGroupAbortedError: the group was aborted during the wait.
        ProcessGroupError: a rank did not come in time, or checks in another way.
    """
    place = replace(members.store, prefix=f"{members.store.prefix}/checking")
    sockets = Sockets()
    with abort.ends(sockets.cut):
        try:
            with meeting_store(replace(members, store=place), abort) as store:
                return (_gather if members.rank == 0 else _reach)(store, members, sockets, predicts)
        except (OSError, ProcessGroupError) as error:
            sockets.close()
            abort.check()
            if isinstance(error, TimeoutError):
                raise ProcessGroupError(f"the ranks did not meet to check collectives: {_HINT}") from error
            raise
        except BaseException:
            sockets.close()
            raise


def _gather(store: AbortableStore, members: GroupMembers, sockets: Sockets, predicts: bool) -> Link:
    """Publish rank 0's address, and accept the connections of all other ranks.

    Where too many connections have not said which rank they are, the oldest makes room. So whoever connects
    and says nothing holds nobody up.
    """
    host = local_host_towards(members.store.server.host, members.store.server.port)
    deadline_s = time.monotonic() + members.timeout.total_seconds()
    token = secrets.token_bytes(TOKEN_BYTES)
    own, theirs = socket.socketpair()
    connections = {0: theirs}
    unknown: dict[socket.socket, bytes] = {}  # what has come of their hello, the oldest first
    with listen_tcp(Address(host, 0)) as listener, selectors.DefaultSelector() as selector:
        for one in (own, theirs, listener):
            sockets.add(one)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        store.set("referee", json.dumps([host, listener.getsockname()[1], token.hex(), predicts]))
        while len(connections) < members.world_size:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                missing = sorted({*range(members.world_size)} - {*connections})
                raise ProcessGroupError(f"ranks {missing} did not come to have collectives checked: {_HINT}")
            ready = [key.fileobj for key, _ in selector.select(min(left_s, PATIENCE_S_MAX))]
            for one in [one for one in unknown if one in ready]:
                unknown[one] += (part := _part_of_hello(one, unknown[one]))
                if part and len(unknown[one]) < _HELLO.size:
                    continue
                selector.unregister(one)
                hello = unknown.pop(one)
                # Zeros stand for the hello of a connection that has ended: they are nobody's secret.
                secret, rank, does_predict = _HELLO.unpack(hello if part else bytes(_HELLO.size))
                if not (secrets.compare_digest(secret, token) and 0 < rank < members.world_size):
                    sockets.drop(one)
                    continue
                if does_predict != predicts:
                    raise ProcessGroupError(f"ranks 0 and {rank} check collectives differently: {_HINT}")
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[rank] = one
            with contextlib.suppress(BlockingIOError):
                if listener in ready:
                    if len(unknown) >= CALLERS_MAX + members.world_size:
                        selector.unregister(oldest := next(iter(unknown)))
                        del unknown[oldest]
                        sockets.drop(oldest)
                    one = listener.accept()[0]
                    sockets.add(one)
                    one.setblocking(False)
                    unknown[one] = b""
                    selector.register(one, selectors.EVENT_READ)
        for one in unknown:
            sockets.drop(one)
    return Link(own, Hub([connections[rank] for rank in range(members.world_size)], predicts))


def _part_of_hello(connection: socket.socket, known: bytes) -> bytes:
    """Return the next part of a hello; nothing once the connection has ended."""
    with contextlib.suppress(OSError):
        return connection.recv(_HELLO.size - len(known))
    return b""


def _reach(store: AbortableStore, members: GroupMembers, sockets: Sockets, predicts: bool) -> Link:
    """Connect any other rank to rank 0."""
    address, token, does_predict = _read_referee(store.get("referee"))
    connection = connect_tcp(address, members.timeout.total_seconds(), sockets.add, is_plain=True)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HELLO.pack(token, members.rank, predicts))
    if does_predict != predicts:  # rank 0, which was told, raises the same error
        raise ProcessGroupError(f"ranks 0 and {members.rank} check collectives differently: {_HINT}")
    return Link(connection)


def _read_referee(data: bytes) -> tuple[Address, bytes, bool]:
    """Decode the address at which rank 0 listens, the secret, and whether rank 0 predicts calls."""
    try:
        match read_json(data):
            case [str(host), int(port), str(token), bool(predicts)]:
                if len(secret := bytes.fromhex(token)) == TOKEN_BYTES:
                    return parse_address(str(Address(host, port))), secret, predicts
    except ValueError as error:
        raise ProcessGroupError(f"the store knows no referee, but {data!r:.100}") from error
    raise ProcessGroupError(f"the store knows no referee, but {data!r:.100}")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


# -- the messages as bytes


@dataclass(frozen=True)
class Request:
    """A rank's message: a call, that it has waited for one longer than its timeout, how far it is, or that it
    wants to know why its backend has failed.
    """

    kind: int
    ticket: int = 0
    number: int = 0
    timeout_s: float = 0.0
    body: bytes = b""

    def encode(self) -> bytes:
        """Encode the message."""
        return REQUEST.pack(self.kind, self.ticket, self.number, self.timeout_s, len(self.body)) + self.body


def take_request(buffer: bytearray) -> Request | None:
    """Cut the first message off what has arrived; None while it is incomplete.

    Raises:
        ValueError: the bytes are no message.
    """
    if len(buffer) < REQUEST.size:
        return None
    kind, ticket, number, timeout_s, length = REQUEST.unpack_from(buffer)
    if kind not in (CALL, OVERDUE, PASSED, WHY) or length > BODY_BYTES_MAX or not 0 <= timeout_s < math.inf:
        raise ValueError(f"no message of kind {kind}, {timeout_s} s and {length} bytes")
    if len(buffer) < REQUEST.size + length:
        return None
    body = bytes(buffer[REQUEST.size : REQUEST.size + length])
    del buffer[: REQUEST.size + length]
    return Request(kind, ticket, number, timeout_s, body)


def encode_answer(answer: Answer) -> bytes:
    """Encode an answer of the referee."""
    if isinstance(answer, Question):
        return ANSWER.pack(QUESTION, 0, answer.number, 0)
    body = encode_problem(answer.problem)
    kind = LAST_RULING if answer.is_final else RULING
    return ANSWER.pack(kind, answer.ticket, answer.agreement, len(body)) + body


def encode_problem(problem: Problem | None) -> bytes:
    """Encode the body of a ruling."""
    if problem is None:
        return b""
    if isinstance(problem, Disagreement):
        return json.dumps(["disagreement", problem.aspect, problem.calls]).encode()
    fields = [problem.ranks, problem.waiting, problem.lost, problem.seconds]
    return json.dumps(["missing", *fields]).encode()


def decode_problem(body: bytes) -> Problem | None:
    """Decode the body of a ruling; None means that the call may run.

    Raises:
        ValueError: the body describes no problem.
    """
    if not body:
        return None
    try:
        match read_json(body):
            case ["disagreement", str(aspect), dict(calls)]:
                return Disagreement(aspect, {int(rank): str(text) for rank, text in calls.items()})
            case ["missing", list(ranks), dict(waiting), bool(lost), float(seconds) | int(seconds)]:
                texts = {int(rank): tuple(map(str, of_rank)) for rank, of_rank in waiting.items()}
                return Missing(tuple(map(int, ranks)), texts, lost, seconds)
    except (TypeError, OverflowError) as error:
        raise ValueError("a field of a problem has another type") from error
    raise ValueError("this is no problem")
