"""A check that every rank means the same collective, before any data moves.

`core.agreement`, which is pure, says what must agree and which rank waits for which. Here a `Link` carries
the ranks' statements to a referee on rank 0, and `CheckedBackend` makes a statement of each call, in front of
any backend. Which rule a collective follows is a field of its row. docs/checking-collectives.md is the user's
view, and says why torch's own check is not enough.

While a group is configured, rank 0 listens, publishes its address in the store, and closes the listener once
every rank has connected; a secret that is only in the store keeps strangers out. From then on each rank has
one connection, rank 0 one to itself. On both sides only the thread that reads a socket closes it.
`Sockets.cut` shuts them down, from any thread and at any time, which ends every wait here and on the other
ranks.

A message is a header of fixed size and JSON of bounded length: a statement, or what is wrong with a call. The
referee may also ask how far a rank is, which says so. No message is trusted: bytes that are none of these
messages raise ValueError, and the rank that sent it is treated as lost.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import AllreduceOptions, DebugLevel, Work, get_debug_level
from torch.futures import Future

from lighthouse.address import Address, parse_address
from lighthouse.core.json_text import read_json
from lighthouse.listening import listen_tcp
from torchft_like.core.agreement import referee
from torchft_like.core.agreement.prediction import Predictor
from torchft_like.core.agreement.referee import (
    COMPARED_MAX,
    ENOUGH,
    Answer,
    Disagreement,
    Missing,
    Problem,
    Question,
    Referee,
)
from torchft_like.core.agreement.statements import EXCHANGED, PAIRED, Statement, decode, encode, specification
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProcessGroupError,
    is_lack_of_memory,
)
from torchft_like.process_group.collectives import (
    ALLREDUCE,
    BY_NAME,
    PEER_NAMES,
    REDUCE_OPS,
    ROOTED,
    Argument,
    Call,
    Collective,
    tensors_of,
)
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import CONFIGURE_GRACE_S, EXPLAIN_S, Backend, Create, Generation
from torchft_like.process_group.store import AbortableStore, GroupMembers, meeting_store
from torchft_like.process_group.work import (
    FOREVER,
    DeferredOperation,
    ExplainedOperation,
    FinishedOperation,
)
from torchft_like.runtime.connecting import connect_tcp, shut
from torchft_like.runtime.hosts import local_host_towards

CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
# Whether to compare all calls, none, or those that are new.
Check = bool | Literal["new"]
REMEMBERED_MAX = 4096  # descriptions
WHY_S_MAX = 1.0
SILENCE_S_MAX = 5.0  # seconds by which the referee may miss a deadline before it counts as gone
_log = logging.getLogger(__name__)


def checked(create: Create, generation: Generation, check: Check) -> Create:
    """Return a `create` whose backend has a referee in front of it. A group of one rank needs none."""

    def create_checked(members: GroupMembers, abort: AbortSignal) -> Backend:
        backend = create(members, abort)
        if members.world_size == 1:
            return backend
        try:
            link = join(members, abort, backend.out_of_reach, predicts=check == "new")
            return CheckedBackend(backend, generation, link, predicts=check == "new")
        except BaseException:
            backend.close()
            raise

    return create_checked if check else create


def check_wanted(check_collectives: Check | None) -> Check:
    """Decide what to check: by the environment variable, the argument, or TORCH_DISTRIBUTED_DEBUG.

    Raises:
        ConfigError: the variable or the argument is none of the choices.
    """
    text = os.environ.get(CHECK_ENV)
    if not text:  # an empty variable counts as unset
        if check_collectives is None:
            return True if get_debug_level() == DebugLevel.DETAIL else "new"
        if check_collectives not in _CHOICES.values():
            raise ConfigError(f'check_collectives is {check_collectives!r}: it must be True, False or "new"')
        return check_collectives
    if text not in _CHOICES:
        raise ConfigError(f"the environment variable {CHECK_ENV} is {text!r}: it must be 0, 1 or new")
    wanted = _CHOICES[text]
    if check_collectives not in (None, wanted):
        told = "check_collectives=%s (%s instead of the argument %s)"
        _log.info(told, wanted, CHECK_ENV, check_collectives)
    return wanted


_CHOICES: Mapping[str, Check] = {"0": False, "1": True, "new": "new"}


class CheckedBackend(Backend):
    """A backend whose collectives run once the ranks have agreed on them, for one configuration of a group.

    The caller's thread describes its call, sends the description and returns. The link's thread receives the
    ruling and starts the call on the real backend, in the order of rulings, which is the same on every rank.
    So calls stay as asynchronous as they were.

    Where ranks predict calls (`core.agreement.prediction`), one that is as predicted starts at once, on the
    caller's thread, and nothing is sent. Sends and receives are not compared there.

    INVARIANTS
    * Every operation is in `_pending` from before its statement is sent until its ruling, or the end of the
      link, settles it: exactly one of the two takes it out.
    * Collectives start in the order of their numbers: none starts at once while another one is in `_pending`,
      and it leaves `_pending` once it has started.
    """

    def __init__(self, backend: Backend, generation: Generation, link: Link, *, predicts: bool) -> None:
        members = generation.members
        self._backend = backend
        self.rest_s_max = backend.rest_s_max
        self._generation = generation
        self._methods = dict(backend.methods())
        self._link = link
        self._rank, self._world_size = members.rank, members.world_size
        self._timeout = members.timeout
        self._lock = threading.Lock()  # calls reach the referee in the order of their tickets and numbers
        self._tickets = itertools.count(1)
        self._number = 0  # of the last collective that was called
        self._predicts = predicts
        self._predictor = Predictor()
        self._agreed: dict[int, Statement] = {}  # this rank's part in each agreement
        self._told_until = 0  # the referee wants to hear of each collective up to this one
        self._is_over = False  # whether nothing is compared any more
        self._was_told = threading.Event()
        self._pending: dict[int, tuple[CheckedOperation, Call]] = {}
        self._ended: End | None = None
        generation.configuration.add(link.cut)
        link.start(self)
        generation.ask_why = self._ask_why

    @property
    def inner(self) -> object:
        """The object that has the real backend's collectives."""
        return self._backend.inner

    def methods(self) -> Mapping[str, Callable[..., Work | None]]:
        """Return the same collectives as the real backend's, checked."""
        return {name: partial(self._run, BY_NAME[name]) for name in self._methods}

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._backend.set_timeout(timeout)

    def break_off(self) -> None:
        self._link.cut()
        self._backend.break_off()

    def out_of_reach(self, store: AbortableStore | None = None) -> str:
        return self._backend.out_of_reach(store)

    def is_still(self) -> bool:
        """Return whether the backend is still and the link's thread, which starts operations, has ended."""
        return not self._link.is_alive() and self._backend.is_still()

    def close(self) -> None:
        self._generation.configuration.remove(self._link.cut)
        self._link.cut()
        self._link.join()
        self._methods.clear()
        self._backend.close()

    # -- for the link, on its thread

    def deliver(self, ticket: int, problem: Problem | None, agreement: int, is_final: bool) -> None:
        """Start a call, or refuse it, as its ruling says."""
        error = None if problem is None else _error_for(problem)
        if error is not None and is_final:
            self._generation.fail(error)
        if (pending := self._pending.get(ticket)) is None:  # no call waits for it
            self._was_told.set()
            return
        operation, call = pending
        started: Work | None = None
        if error is None:
            try:
                started = self._start(operation, call)
            except Exception as failure:  # noqa: BLE001 - the error is raised where the call is waited for
                # It is a refusal, unless it says that the backend is unusable.
                is_typed = isinstance(failure, ProcessGroupError) and type(failure) is not ProcessGroupError
                error = failure.with_traceback(None)
                if is_lack_of_memory(failure):
                    self._generation.not_begun(failure)
                elif isinstance(failure, RuntimeError) and not (
                    is_typed or isinstance(failure, NotImplementedError)
                ):
                    error = CollectiveRefusedError(str(failure))
        with self._lock:
            del self._pending[ticket]
            if problem is None:
                self._learn(agreement, operation.statement)
        if error is not None:
            operation.refuse(error)
        else:
            taken = started
            if started is not None:
                taken = self._generation.take(call.collective, started, call.args, call.kwargs)
            operation.follow(taken)

    def say_when_passed(self, number: int) -> None:
        """Say which collective was the last, and say so again with each one until this number."""
        with self._lock:
            self._told_until = max(self._told_until, number)
            self._say_passed()

    def is_overdue(self) -> bool:
        """Return whether the referee has let a deadline pass."""
        # This must not take the lock: a caller may hold it while it is blocked sending.
        pending = [operation for operation, _ in list(self._pending.values())]
        oldest = next((p for p in pending if p.deadline_s < math.inf), None)
        return oldest is not None and time.monotonic() > oldest.deadline_s + SILENCE_S_MAX

    def end(self, why: End) -> None:
        """Refuse all calls that wait for a ruling, because none can come any more."""
        with self._lock:
            self._ended = why
            pending, self._pending = self._pending, {}
            self._was_told.set()
        for operation, _ in pending.values():
            operation.refuse(self._error_at(why, operation))

    def _run(self, row: Collective, *args: Any, **kwargs: Any) -> Work | None:
        if self._predicts and (row.agreement == PAIRED or (self._is_over and not self._pending)):
            # No variable holds the bound method, because it would keep the backend alive, as in
            # Generation.run.
            return self._method(row)(*args, **kwargs)
        statement = describe(row, args, kwargs, self._world_size)
        if self._predicts and self._is_predicted(statement):
            return self._method(row)(*args, **kwargs)
        operation = self._submit(row.bind(args, kwargs), statement)
        if not row.blocking:
            return operation
        operation.wait()
        return None

    def _method(self, row: Collective) -> Callable[..., Work | None]:
        if (method := self._methods.get(row.name)) is None:
            raise ProcessGroupError(f"{row.name}: the group is being closed")
        return method

    def _is_predicted(self, statement: Statement) -> bool:
        """Return whether a collective is as predicted, and count it if it is."""
        with self._lock:
            expected = self._agreed.get(self._predictor.next)
            if self._pending or (statement is not expected and statement != expected):
                return False
            self._predictor.confirm()
            self._number += 1
            if self._number <= self._told_until:
                self._say_passed()
        return True

    def _submit(self, call: Call, statement: Statement) -> CheckedOperation:
        timeout_s = (call.timeout or self._timeout).total_seconds()
        is_paired = statement.rule == PAIRED
        with self._lock:
            ticket = next(self._tickets)
            overdue = partial(self._send, Request(OVERDUE, ticket)) if is_paired else None
            operation = CheckedOperation(call, statement, timeout_s, overdue)
            if self._ended is not None:
                operation.refuse(self._error_at(self._ended, operation))
                return operation
            self._number += not is_paired
            self._pending[ticket] = operation, call
            self._send(Request(CALL, ticket, 0 if is_paired else self._number, timeout_s, encode(statement)))
        return operation

    def _start(self, operation: CheckedOperation, call: Call) -> Work | None:
        """Run a call on the streams that were its caller's."""
        with contextlib.ExitStack() as current:
            for stream in operation.streams:
                current.enter_context(beside_captures(stream.device))
                current.enter_context(torch.cuda.stream(stream))
            return self._method(call.collective)(*call.args, **call.kwargs)

    def _learn(self, agreement: int, statement: Statement) -> None:
        if agreement == ENOUGH and not self._is_over:
            self._is_over = True
            _log.info("%d collectives were compared: no more are in this configuration", COMPARED_MAX)
        elif agreement != ENOUGH and self._predicts:
            self._agreed.setdefault(agreement, statement)
            self._predictor.learn(agreement)

    def _error_at(self, why: End, operation: CheckedOperation) -> Exception:
        """Make the error for a call that will get no ruling."""
        waiting = {self._rank: (str(operation),)}
        if why is End.CLOSED:
            return PeerLostError((0,), waiting)
        if why is End.SILENT:
            return CollectiveTimeoutError(self._timeout.total_seconds(), (0,), waiting)
        return ProcessGroupError(f"{operation}: {why.value}")

    def _ask_why(self, has_timed_out: bool) -> None:
        """Wait, when the backend has failed, until the referee has said whether it knows the reason.

        Where a collective has timed out the referee asks all ranks how far they are.
        """
        with self._lock:
            if not self._predicts or self._ended is not None or self._link.delivers_here():
                return
            self._was_told.clear()
            number = self._number if has_timed_out else 0
            self._send(Request(WHY, number=number, timeout_s=self._timeout.total_seconds()))
        self._was_told.wait(WHY_S_MAX)

    def _say_passed(self) -> None:
        self._send(Request(PASSED, number=self._number))

    def _send(self, request: Request) -> None:
        with contextlib.suppress(OSError):  # if it fails, the link's thread settles the pending calls
            self._link.send(request)


class CheckedOperation(DeferredOperation, ExplainedOperation):
    """An operation that begins only after its ruling.

    Args:
        call: the call to start, of which this keeps its caller's current streams only.
        timeout_s: how long its ranks may take to come.
        overdue: called when a thread has waited that long for a send or a receive, which have no deadline; a
          ruling follows.
    """

    def __init__(
        self, call: Call, statement: Statement, timeout_s: float, overdue: Callable[[], None] | None
    ) -> None:
        self.deadline_s: float = math.inf if overdue else time.monotonic() + timeout_s
        # The caller's current streams, on which the backend has to find the inputs ready.
        devices = {tensor.device for tensor in tensors_of((call.outputs, call.inputs)) if tensor.is_cuda}
        self.streams: tuple[torch.cuda.Stream, ...] = tuple(
            torch.cuda.current_stream(device) for device in devices
        )
        super().__init__(stream.device for stream in self.streams)
        self.statement = statement
        self._timeout_s = timeout_s
        self._overdue = overdue

    def __str__(self) -> str:
        return self.statement.text()

    def refuse(self, error: Exception) -> None:
        """Fail with this error: the operation will not start."""
        self.follow(_Refused(error, self))

    def wait_begun(self, deadline: float = FOREVER) -> None:
        started = time.monotonic()
        try:
            if self._overdue is not None:
                with contextlib.suppress(TimeoutError):
                    super().wait_begun(deadline if deadline < FOREVER else started + self._timeout_s)
                    return
                self._overdue()
                deadline = time.monotonic() + SILENCE_S_MAX
            super().wait_begun(deadline)
        except TimeoutError:
            seconds = time.monotonic() - started
            error = ProcessGroupError(f"{self}: timed out, some ranks have not come within {seconds:.3g} s")
            raise self.explain(error) or error from None


class _Refused(FinishedOperation):
    """The outcome of an operation that does not start, with an error in the group's words."""

    def __init__(self, error: Exception, operation: ExplainedOperation) -> None:
        super().__init__([], error)
        self._error = error
        self._operation = operation

    def wait_until(self, deadline: float) -> None:
        raise self._operation.explain(self._error) or self._error

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._complete_by_waiting(future)
        return future


# -- the description of a call, which is all that looks at tensors and at torch's options


def describe(row: Collective, args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int) -> Statement:
    """Describe a call, made in a group of `world_size` ranks, in the terms of the rules of agreement.

    Most calls repeat, so their description is remembered, and is the same object each time.
    """
    if row is ALLREDUCE and len(args) == 2 and type(args[0]) is list and len(args[0]) == 1:
        # A gradient bucket's call: after a wait the caches are cold, and the general way takes twice as long.
        tensor, options = args[0][0], args[1]
        if type(tensor) is torch.Tensor and type(options) is AllreduceOptions:
            like = tensor.dtype, tensor.shape, tensor.layout, tensor.device
            return _sum_of_one(*like, hash(options.reduceOp))
    call = row.bind(tuple(args), kwargs)
    inputs = _specifications(row.input, call.inputs)
    outputs = () if row.output is row.input else _specifications(row.output, call.outputs)
    if row.agreement == PAIRED:
        takes_any = row.name == "recv_anysource"
        peer = None if takes_any else int(call.argument(1, *PEER_NAMES))
        tag = int(call.argument(1 if takes_any else 2, "tag") or 0)
        return Statement(row.name, row.agreement, inputs, outputs, peer=peer, tag=tag)
    if row.agreement == EXCHANGED and row.output is not None and row.output.depth == 0:
        output_sizes, input_sizes = call.split_sizes
        inputs = _parts(call.inputs, input_sizes, world_size)
        outputs = _parts(call.outputs, output_sizes, world_size)
    root = call.root if row.name in ROOTED else None
    reduce_op = REDUCE_OPS[hash(call.reduce_op)] if "reduce" in row.name else None
    return _statement(row.name, row.agreement, inputs, outputs, root, reduce_op)


_statement = functools.lru_cache(REMEMBERED_MAX)(Statement)


@functools.lru_cache(REMEMBERED_MAX)
def _sum_of_one(
    dtype: torch.dtype, shape: tuple[int, ...], layout: torch.layout, device: torch.device, reduce_op: int
) -> Statement:
    inputs = (_specification(dtype, shape, layout, device),)
    return _statement(ALLREDUCE.name, ALLREDUCE.agreement, inputs, (), None, REDUCE_OPS[reduce_op])


def _specifications(argument: Argument | None, nested: Any) -> tuple[str, ...]:
    # Most arguments are lists of tensors, and a generator takes longer than to describe one.
    tensors = nested if argument is not None and argument.depth == 1 else tensors_of(nested)
    return tuple([_specification(t.dtype, t.shape, t.layout, t.device) for t in tensors])


@functools.lru_cache(REMEMBERED_MAX)
def _specification(
    dtype: torch.dtype, shape: tuple[int, ...], layout: torch.layout, device: torch.device
) -> str:
    """Describe a tensor as `float32[4, 2]`, with its layout and device where they are not the usual ones."""
    kind = "" if layout == torch.strided else f"{str(layout).removeprefix('torch.')} "
    place = "" if device.type == "cpu" else f" on {device.type}"
    return f"{kind}{specification(dtype, shape)}{place}"


def _parts(tensor: torch.Tensor, sizes: Sequence[int], world_size: int) -> tuple[str, ...]:
    """Describe each rank's part of a tensor that is split along its first dimension, or all of it."""
    rows = tensor.shape[0] if tensor.dim() else 1
    lengths = sizes or [rows // world_size] * world_size
    fits = sum(lengths) == rows
    shapes = [(length, *tensor.shape[1:]) for length in lengths] if fits else [tensor.shape]
    return tuple([_specification(tensor.dtype, shape, tensor.layout, tensor.device) for shape in shapes])


def _error_for(problem: Problem) -> Exception:
    if isinstance(problem, Disagreement):
        return CollectiveMismatchError(problem.aspect, problem.calls)
    if problem.lost:
        return PeerLostError(problem.ranks, problem.waiting)
    return CollectiveTimeoutError(problem.seconds, problem.ranks, problem.waiting)


# -- the connections between the ranks and the referee

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
UNREAD_BYTES_MAX = 1 << 24  # of answers that a rank has not read, until it counts as lost

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI?")  # the secret, the rank, whether it predicts calls
_HINT = "is check_collectives (TORCHFT_CHECK_COLLECTIVES) the same on every rank?"
_ABSENT = "is a rank dead, or does the network between two of them not work"


class Sockets:
    """Sockets that any thread can shut down.

    A lock keeps `cut` from a socket that is being closed: the number of a closed descriptor may belong to
    another file.
    """

    def __init__(self, *sockets: socket.socket) -> None:
        self._lock = threading.Lock()
        self._sockets = list(sockets)
        self.is_cut: bool = False

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
    """A rank's connection to the referee, which it owns; on rank 0 it ends the referee's, too."""

    def __init__(self, connection: socket.socket, hub: Hub | None = None) -> None:
        self._socket = connection
        self._sockets = Sockets(connection)
        self._hub = hub
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, recipient: CheckedBackend) -> None:
        """Start a thread that calls `recipient`; if there is none to be had, the others lose this rank."""
        self._thread = threading.Thread(
            target=self._read, args=(recipient,), name="torchft-checking", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self.cut()
            self._sockets.close()
            raise

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
            _log.debug("no more rulings from rank 0: %s", error)
        finally:
            why = End.CUT if self._sockets.is_cut else why
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
    """The referee's end of the ranks' connections, which it owns, and the thread that serves them."""

    def __init__(self, connections: list[socket.socket], predicts: bool = False) -> None:
        self._connections = connections
        self._sockets = Sockets(*connections)
        self._open = set(range(len(connections)))
        self._buffers = [bytearray() for _ in connections]
        self._unread = [bytearray() for _ in connections]  # answers for which a rank has no room yet
        self._referee = Referee(len(connections), predicts)
        self._selector = selectors.DefaultSelector()
        name = "torchft-checking-referee"
        self.thread: threading.Thread = threading.Thread(target=self._serve, name=name, daemon=True)
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
                for rank in ready:
                    if rank in self._open and self._unread[rank] and not self._send_unread(rank):
                        self._announce(self._lose(rank))
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
            _log.debug("rank %d: %s", rank, error)
            self._announce(self._lose(rank))

    def _judge_all(self, rank: int) -> None:
        """Judge the requests that have come from a rank."""
        try:
            while rank in self._open and (request := take_request(self._buffers[rank])) is not None:
                self._announce(self._judge(rank, request))
        except ValueError as error:
            _log.debug("rank %d: %s", rank, error)
            self._announce(self._lose(rank))

    def _judge(self, rank: int, request: Request) -> list[Answer]:
        now_s = time.monotonic()
        if request.kind == OVERDUE:
            return self._referee.overdue(rank, request.ticket, now_s)
        if request.kind == PASSED:
            return self._referee.passed(rank, request.number)
        if request.kind == WHY:
            return self._referee.why(rank, request.number, request.timeout_s, now_s)
        statement, deadline_s = decode(request.body), now_s + request.timeout_s
        call = referee.Call(rank, request.ticket, statement, now_s, deadline_s, request.number)
        return self._referee.hear(call)

    def _lose(self, rank: int) -> list[Answer]:
        if rank not in self._open:
            return []
        self._open.remove(rank)
        self._selector.unregister(self._connections[rank])
        shut(self._connections[rank])  # it may live, and would wait for answers
        # Connections that this rank has cut say nothing of the ranks behind them.
        return [] if self._sockets.is_cut else self._referee.lose(rank)

    def _announce(self, answers: Iterable[Answer]) -> None:
        """Send answers; to rank 0 last, because its reaction may end all connections."""
        pending = deque(sorted(answers, key=lambda answer: answer.rank == 0))
        while pending:
            answer = pending.popleft()
            if answer.rank in self._open and not self._send(answer):
                # The rank is gone, or has not read for long: the others must not wait for it.
                pending.extendleft(self._lose(answer.rank))

    def _send(self, answer: Answer) -> bool:
        """Send an answer, or keep it for when the rank reads; return whether that is to be hoped for.

        A rank that calls while this thread is slow reads nothing meanwhile: it is blocked sending, with the
        lock that its reader needs.
        """
        unread = self._unread[answer.rank]
        unread += encode_answer(answer)
        return self._send_unread(answer.rank) and len(unread) <= UNREAD_BYTES_MAX

    def _send_unread(self, rank: int) -> bool:
        unread, connection = self._unread[rank], self._connections[rank]
        try:
            del unread[: connection.send(unread)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        awaits_room = selectors.EVENT_WRITE if unread else 0
        self._selector.modify(connection, selectors.EVENT_READ | awaits_room, rank)
        return True


def join(
    members: GroupMembers,
    abort: AbortSignal,
    out_of_reach: Callable[[AbortableStore], str],
    *,
    predicts: bool,
) -> Link:
    """Connect the ranks of a group that is being configured; block until all are there.

    Args:
        out_of_reach: the backend's, for the error: a rank that comes late may not be able to connect to
            another one, while this one is connected to both.

    Raises:
        ProcessGroupAbortedError: the group was aborted during the wait.
        ProcessGroupError: a rank did not come in time, or checks in another way.
    """
    place = replace(members.store, prefix=f"{members.store.prefix}/checking")
    # As long as the others try to connect: all who give up then say at the same time what they know.
    limit = members.timeout + timedelta(seconds=max(CONFIGURE_GRACE_S - EXPLAIN_S, 0.0))
    patient = replace(members, store=place, timeout=limit)
    sockets = Sockets()
    with abort.ends(sockets.cut):
        try:
            with meeting_store(patient, abort) as store:
                return (_gather if members.rank == 0 else _reach)(store, patient, sockets, predicts)
        except BaseException as error:
            sockets.close()
            abort.check()
            if isinstance(error, TimeoutError):
                is_known = isinstance(error, _AbsentError)
                said = str(error) if is_known else "the ranks did not meet to check collectives"
                why = _culprits(members, abort, out_of_reach) or _ABSENT
                raise ProcessGroupError(f"{said}: {why}; or {_HINT}") from error
            raise


class _AbsentError(TimeoutError):
    """Ranks have not come in time; the text says which."""


def _culprits(
    members: GroupMembers, abort: AbortSignal, out_of_reach: Callable[[AbortableStore], str]
) -> str:
    """Return who does not reach whom, as far as the members find out that give up now."""
    store = AbortableStore(members.store, members.timeout)
    without = contextlib.suppress(OSError, ProcessGroupError)  # this error does without those of the store
    with without, contextlib.closing(store), abort.ends(store.abort):
        store.connect(insists=False)
        return out_of_reach(store)
    abort.check()
    return ""


def _gather(store: AbortableStore, members: GroupMembers, sockets: Sockets, predicts: bool) -> Link:
    """Publish rank 0's address, and accept the connections of all other ranks.

    Where too many connections have not said which rank they are, the oldest makes room. So a client that
    connects and says nothing keeps no rank waiting.
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
                raise _AbsentError(f"ranks {missing} did not come to have collectives checked")
            ready = [key.fileobj for key, _ in selector.select(min(left_s, PATIENCE_S_MAX))]
            for one in [one for one in unknown if one in ready]:
                part = b""
                with contextlib.suppress(OSError):
                    part = one.recv(_HELLO.size - len(unknown[one]))
                unknown[one] += part
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
    with contextlib.suppress(ValueError):
        match read_json(data):
            case [str(host), int(port), str(token), bool(predicts)]:
                if len(secret := bytes.fromhex(token)) == TOKEN_BYTES:
                    return parse_address(str(Address(host, port))), secret, predicts
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
    if isinstance(answer, Question):
        return ANSWER.pack(QUESTION, 0, answer.number, 0)
    body = encode_problem(answer.problem)
    kind = LAST_RULING if answer.is_final else RULING
    return ANSWER.pack(kind, answer.ticket, answer.agreement, len(body)) + body


def encode_problem(problem: Problem | None) -> bytes:
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
