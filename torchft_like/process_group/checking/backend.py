"""A backend whose collectives run once the ranks have agreed on them.

The caller's thread describes its call, sends the description and returns. The link's thread receives the
ruling and starts the call on the real backend, in the order of rulings, which is the same on every rank. So
calls stay as asynchronous as they were.

INVARIANT: every operation is in `_pending` from before its statement is sent until its ruling, or the end of
the link, settles it: exactly one of the two takes it out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import DebugLevel, Work, get_debug_level
from torch.futures import Future

from torchft_like.core.agreement.referee import Problem
from torchft_like.core.agreement.rules import Disagreement
from torchft_like.core.agreement.statements import EXCHANGED, PAIRED, Statement, encode, specification
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProcessGroupError,
)
from torchft_like.futures import copy_outcome
from torchft_like.process_group.checking.link import CALL, OVERDUE, End, Link, Request, join
from torchft_like.process_group.collectives import BY_NAME, ROOTED, Call, Collective, tensors_of
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend, Create
from torchft_like.process_group.store import GroupMembers
from torchft_like.process_group.work import (
    FOREVER,
    NOTHING,
    ExplainedOperation,
    FinishedOperation,
    FollowingOperation,
    Operation,
    OperationWork,
)

CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
SILENCE_S_MAX = 5.0  # seconds by which the referee may miss a deadline before it counts as gone
_log = logging.getLogger(__name__)


# Returns the operation behind a work of the real backend, with errors in the group's words.
Take = Callable[[Collective, Work], Operation]


def checked(create: Create, take: Take) -> Create:
    """Return a `create` whose backend has a referee in front of it. A group of one rank needs none."""

    def create_checked(members: GroupMembers, abort: AbortSignal) -> Backend:
        backend = create(members, abort)
        if members.world_size == 1:
            return backend
        try:
            return CheckedBackend(backend, take, join(members, abort), members, abort)
        except BaseException:
            backend.close()
            raise

    return create_checked


def is_wanted(check_collectives: bool | None) -> bool:
    """Decide whether to check: by the environment variable, or else the argument, or else
    TORCH_DISTRIBUTED_DEBUG.

    Raises:
        ConfigError: the variable says neither yes nor no.
    """
    text = os.environ.get(CHECK_ENV)
    if not text:  # an empty variable counts as unset
        is_detailed = get_debug_level() == DebugLevel.DETAIL
        return is_detailed if check_collectives is None else check_collectives
    if text not in ("0", "1"):
        raise ConfigError(f"the environment variable {CHECK_ENV} is {text!r}: it must be 0 or 1")
    wanted = text == "1"
    if check_collectives not in (None, wanted):
        told = "check_collectives=%s (%s instead of the argument %s)"
        _log.info(told, wanted, CHECK_ENV, check_collectives)
    return wanted


class CheckedBackend:
    """A backend with a check in front of it, for one configuration of a group.

    Args:
        backend: the backend that runs the collectives.
        take: makes operations of the backend's works.
        link: the link to the referee, not yet started.
    """

    def __init__(
        self, backend: Backend, take: Take, link: Link, members: GroupMembers, abort: AbortSignal
    ) -> None:
        self._backend = backend
        self.rest_s_max = backend.rest_s_max
        self._take = take
        self._methods = dict(backend.methods())
        self._link = link
        self._rank, self._world_size = members.rank, members.world_size
        self._timeout = members.timeout
        self._abort = abort
        self._lock = threading.Lock()  # calls reach the referee in the order of their tickets
        self._tickets = itertools.count()
        self._pending: dict[int, tuple[CheckedOperation, Call]] = {}
        self._ended: End | None = None
        abort.add(link.cut)
        link.start(self)

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

    def is_still(self) -> bool:
        """Return whether the backend is still and the link's thread, which starts operations, has ended."""
        return not self._link.is_alive() and self._backend.is_still()

    def close(self) -> None:
        self._abort.remove(self._link.cut)
        self._link.cut()
        self._link.join()
        self._methods.clear()
        self._backend.close()

    # -- for the link, on its thread

    def deliver(self, ticket: int, problem: Problem | None) -> None:
        """Start a call, or refuse it, as its ruling says."""
        with self._lock:
            pending = self._pending.pop(ticket, None)
        if pending is not None and problem is None:
            self._start(*pending)
        elif pending is not None and problem is not None:
            pending[0].refuse(_error_for(problem))

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
        for operation, _ in pending.values():
            operation.refuse(self._error_at(why, operation))

    def _run(self, row: Collective, *args: Any, **kwargs: Any) -> Work | None:
        operation = self._submit(row.bind(args, kwargs))
        if not row.blocking:
            return OperationWork(operation)
        operation.wait()
        return None

    def _submit(self, call: Call) -> CheckedOperation:
        statement = describe(call, self._world_size)
        timeout_s = (call.timeout or self._timeout).total_seconds()
        with self._lock:
            ticket = next(self._tickets)
            overdue = partial(self._say_overdue, ticket) if statement.rule == PAIRED else None
            operation = CheckedOperation(call, statement, timeout_s, overdue)
            if self._ended is not None:
                operation.refuse(self._error_at(self._ended, operation))
                return operation
            self._pending[ticket] = operation, call
            with contextlib.suppress(OSError):  # if it fails, the link's thread settles the pending calls
                self._link.send(Request(CALL, ticket, timeout_s, encode(statement)))
        return operation

    def _start(self, operation: CheckedOperation, call: Call) -> None:
        """Run a call on the streams that were its caller's."""
        row = call.collective
        try:
            with contextlib.ExitStack() as current:
                for stream in operation.streams:
                    current.enter_context(beside_captures(stream.device))
                    current.enter_context(torch.cuda.stream(stream))
                # No variable holds the bound method, because it would keep the backend alive, as in
                # Generation.run.
                started = self._methods[row.name](*call.args, **call.kwargs)
            operation.follow(None if started is None else self._take(row, started))
        except Exception as error:  # noqa: BLE001 - the error is raised where the call is waited for
            operation.refuse(_as_refusal(error))

    def _error_at(self, why: End, operation: CheckedOperation) -> Exception:
        """Make the error for a call that will get no ruling."""
        waiting = {self._rank: (str(operation),)}
        if why is End.CLOSED:
            return PeerLostError((0,), waiting)
        if why is End.SILENT:
            return CollectiveTimeoutError(self._timeout.total_seconds(), (0,), waiting)
        return ProcessGroupError(f"{operation}: {why.value}")

    def _say_overdue(self, ticket: int) -> None:
        with contextlib.suppress(OSError):  # the link's thread then settles the call
            self._link.send(Request(OVERDUE, ticket))


class CheckedOperation(FollowingOperation, ExplainedOperation):
    """An operation that starts only after its ruling; from then on it behaves as the backend's.

    Args:
        call: the call to start, of which this keeps its caller's current streams only.
        statement: its description.
        timeout_s: how long its ranks may take to come.
        overdue: called when a thread has waited that long for a send or a receive, which have no deadline; a
          ruling follows.
    """

    def __init__(
        self, call: Call, statement: Statement, timeout_s: float, overdue: Callable[[], None] | None
    ) -> None:
        self.inner: Operation = NOTHING
        self.deadline_s = math.inf if overdue else time.monotonic() + timeout_s
        self.streams = _streams_of(call)
        self._devices: list[int | str | torch.device] = [stream.device for stream in self.streams]
        self._statement = statement
        self._timeout_s = timeout_s
        self._overdue = overdue
        self._lock = threading.Lock()
        self._ruled = threading.Event()
        self._futures: list[Future[Any]] = []

    def __str__(self) -> str:
        return self._statement.text()

    def follow(self, operation: Operation | None) -> None:
        """Behave as `operation` from now on, because the call has started; None if it is over."""
        with self._lock:
            self.inner = operation or self.inner
            futures, self._futures = self._futures, []
            self._ruled.set()
        for future in futures:
            self._follow_with(future)

    def refuse(self, error: Exception) -> None:
        """Fail with this error: the operation will not start."""
        self.follow(_Refused(error, self))

    def wait(self, deadline: float = FOREVER) -> None:
        self._await_ruling(deadline)
        self.inner.wait(deadline)

    def is_over(self) -> bool:
        return self._ruled.is_set() and self.inner.is_over()

    def is_success(self) -> bool:
        return self._ruled.is_set() and self.inner.is_success()

    def future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=self._devices)
        with self._lock:
            is_ruled = self._ruled.is_set()
            if not is_ruled:
                self._futures.append(future)
        if is_ruled:
            self._follow_with(future)
        return future

    def synchronize(self) -> None:
        self._await_ruling(FOREVER)
        self.inner.synchronize()

    def block_current_stream(self) -> None:
        """Block the thread until the operation has started, and then only the stream."""
        self._await_ruling(FOREVER)
        self.inner.block_current_stream()

    def _await_ruling(self, deadline: float) -> None:
        started = time.monotonic()
        if self._overdue is not None:
            if self._ruled.wait(deadline - started if deadline < FOREVER else self._timeout_s):
                return
            self._overdue()
            deadline = time.monotonic() + SILENCE_S_MAX
        if not self._ruled.wait(deadline - time.monotonic() if deadline < FOREVER else None):
            seconds = time.monotonic() - started
            error = ProcessGroupError(f"{self}: timed out, some ranks have not come within {seconds:.3g} s")
            raise self.explain(error) or error

    def _follow_with(self, future: Future[Any]) -> None:
        self.inner.future().add_done_callback(lambda done: copy_outcome(done, future))


class _Refused(FinishedOperation):
    """The outcome of an operation that does not start, with an error in the group's words."""

    def __init__(self, error: Exception, operation: ExplainedOperation) -> None:
        super().__init__([], error)
        self._error = error
        self._operation = operation

    def wait(self, deadline: float = FOREVER) -> None:
        raise self._operation.explain(self._error) or self._error

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._complete_by_waiting(future)
        return future


# -- the description of a call, which is all that looks at tensors and at torch's options


def describe(call: Call, world_size: int) -> Statement:
    """Describe a call, made in a group of `world_size` ranks, in the terms of the rules of agreement."""
    row = call.collective
    inputs = tuple(map(_specification, tensors_of(call.inputs)))
    outputs = () if row.output is row.input else tuple(map(_specification, tensors_of(call.outputs)))
    if row.agreement == PAIRED:
        takes_any = row.name == "recv_anysource"
        peer = None if takes_any else int(call.argument(1, "dst_rank", "dstRank", "src_rank", "srcRank"))
        tag = int(call.argument(1 if takes_any else 2, "tag") or 0)
        return Statement(row.name, row.agreement, inputs, outputs, peer=peer, tag=tag)
    if row.agreement == EXCHANGED and row.output is not None and row.output.depth == 0:
        output_sizes, input_sizes = call.split_sizes
        inputs = _parts(call.inputs, input_sizes, world_size)
        outputs = _parts(call.outputs, output_sizes, world_size)
    root = call.root if row.name in ROOTED else None
    return Statement(row.name, row.agreement, inputs, outputs, root, _reduce_op(call))


def _specification(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> str:
    """Describe a tensor as `float32[4, 2]`, with its layout and device where they are not the usual ones."""
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{layout}{specification(tensor.dtype, tensor.shape if shape is None else shape)}{device}"


def _parts(tensor: torch.Tensor, sizes: Sequence[int], world_size: int) -> tuple[str, ...]:
    """Describe each rank's part of a tensor that is split along its first dimension, or all of it."""
    rows = tensor.shape[0] if tensor.dim() else 1
    lengths = sizes or [rows // world_size] * world_size
    if sum(lengths) != rows:
        return (_specification(tensor),)
    return tuple(_specification(tensor, [length, *tensor.shape[1:]]) for length in lengths)


def _reduce_op(call: Call) -> str | None:
    if "reduce" not in call.collective.name:
        return None
    operation = call.reduce_op
    return str(getattr(operation, "op", operation)).rpartition(".")[2]


def _as_refusal(error: Exception) -> Exception:
    """Return a backend's error as a refusal, unless it says that the backend is unusable."""
    is_typed = isinstance(error, ProcessGroupError) and type(error) is not ProcessGroupError
    if isinstance(error, RuntimeError) and not (is_typed or isinstance(error, NotImplementedError)):
        return CollectiveRefusedError(str(error))
    return error.with_traceback(None)


def _error_for(problem: Problem) -> Exception:
    if isinstance(problem, Disagreement):
        return CollectiveMismatchError(problem.aspect, problem.calls)
    if problem.lost:
        return PeerLostError(problem.ranks, problem.waiting)
    return CollectiveTimeoutError(problem.seconds, problem.ranks, problem.waiting)


def _streams_of(call: Call) -> tuple[torch.cuda.Stream, ...]:
    """Return the caller's current streams, on which the backend has to find the inputs ready."""
    devices = {tensor.device for tensor in tensors_of((call.outputs, call.inputs)) if tensor.is_cuda}
    return tuple(torch.cuda.current_stream(device) for device in devices)
