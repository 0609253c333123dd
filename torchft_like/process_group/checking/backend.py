"""A backend whose collectives run once the ranks have agreed on them.

The caller's thread describes its call, sends the description and returns. The link's thread receives the
ruling and starts the call on the real backend, in the order of rulings, which is the same on every rank. So
calls stay as asynchronous as they were.

Where ranks predict calls (`core.agreement.prediction`), one that is as predicted starts at once, on the
caller's thread, and nothing is sent. Sends and receives are not compared there.

INVARIANTS
* Every operation is in `_pending` from before its statement is sent until its ruling, or the end of the link,
  settles it: exactly one of the two takes it out.
* Collectives start in the order of their numbers: none starts at once while another one is in `_pending`, and
  it leaves `_pending` once it has started.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import DebugLevel, ReduceOp, Work, get_debug_level
from torch.futures import Future

from torchft_like.core.agreement.prediction import Predictor
from torchft_like.core.agreement.referee import COMPARED_MAX, ENOUGH, Problem
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
from torchft_like.process_group.checking.link import CALL, OVERDUE, PASSED, WHY, End, Link, Request, join
from torchft_like.process_group.collectives import BY_NAME, ROOTED, Call, Collective, tensors_of
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend, Create, Generation
from torchft_like.process_group.store import GroupMembers
from torchft_like.process_group.work import (
    FOREVER,
    DeferredOperation,
    ExplainedOperation,
    FinishedOperation,
)

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
            link = join(members, abort, predicts=check == "new")
            return CheckedBackend(backend, generation, link, abort, predicts=check == "new")
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


class CheckedBackend:
    """A backend with a check in front of it, for one configuration of a group.

    Args:
        backend: the backend that runs the collectives.
        generation: makes operations of the backend's works, and is told when the group is of no use.
        link: the link to the referee, not yet started.
        predicts: whether calls that are as predicted start at once.
    """

    def __init__(
        self,
        backend: Backend,
        generation: Generation,
        link: Link,
        abort: AbortSignal,
        *,
        predicts: bool,
    ) -> None:
        members = generation.members
        self._backend = backend
        self.rest_s_max = backend.rest_s_max
        self._generation = generation
        self._methods = dict(backend.methods())
        self._link = link
        self._rank, self._world_size = members.rank, members.world_size
        self._timeout = members.timeout
        self._abort = abort
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
        abort.add(link.cut)
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
                if isinstance(failure, RuntimeError) and not (
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
            operation.follow(None if started is None else self._generation.take(call.collective, started))

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
        call = row.bind(args, kwargs)
        statement = describe(call, self._world_size)
        if self._predicts and self._is_predicted(statement):
            return self._method(row)(*args, **kwargs)
        operation = self._submit(call, statement)
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

    def _ask_why(self) -> None:
        """Wait, when the backend has failed, until the referee has said whether it knows the reason."""
        with self._lock:
            if not self._predicts or self._ended is not None or self._link.delivers_here():
                return
            self._was_told.clear()
            self._send(Request(WHY))
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
        statement: its description.
        timeout_s: how long its ranks may take to come.
        overdue: called when a thread has waited that long for a send or a receive, which have no deadline; a
          ruling follows.
    """

    def __init__(
        self, call: Call, statement: Statement, timeout_s: float, overdue: Callable[[], None] | None
    ) -> None:
        self.deadline_s = math.inf if overdue else time.monotonic() + timeout_s
        # The caller's current streams, on which the backend has to find the inputs ready.
        devices = {tensor.device for tensor in tensors_of((call.outputs, call.inputs)) if tensor.is_cuda}
        self.streams = tuple(torch.cuda.current_stream(device) for device in devices)
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


def describe(call: Call, world_size: int) -> Statement:
    """Describe a call, made in a group of `world_size` ranks, in the terms of the rules of agreement.

    Most calls repeat, so their description is remembered, and is the same object each time.
    """
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
    reduce_op = _REDUCE_OPS[hash(call.reduce_op)] if "reduce" in row.name else None
    return _statement(row.name, row.agreement, inputs, outputs, root, reduce_op)


_statement = functools.lru_cache(REMEMBERED_MAX)(Statement)


def _specification(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> str:
    shape = tensor.shape if shape is None else shape
    return _described(tensor.dtype, shape, tensor.layout, tensor.device.type)


@functools.lru_cache(REMEMBERED_MAX)
def _described(dtype: torch.dtype, shape: tuple[int, ...], layout: torch.layout, device: str) -> str:
    """Describe a tensor as `float32[4, 2]`, with its layout and device where they are not the usual ones."""
    kind = "" if layout == torch.strided else f"{str(layout).removeprefix('torch.')} "
    place = "" if device == "cpu" else f" on {device}"
    return f"{kind}{specification(dtype, shape)}{place}"


def _parts(tensor: torch.Tensor, sizes: Sequence[int], world_size: int) -> tuple[str, ...]:
    """Describe each rank's part of a tensor that is split along its first dimension, or all of it."""
    rows = tensor.shape[0] if tensor.dim() else 1
    lengths = sizes or [rows // world_size] * world_size
    if sum(lengths) != rows:
        return (_specification(tensor),)
    return tuple(_specification(tensor, (length, *tensor.shape[1:])) for length in lengths)


# The keys are hashes, because an operation's hash is its number, and its name takes long to find.
_REDUCE_OPS = {hash(op): name for name, op in ReduceOp.RedOpType.__members__.items()}


def _error_for(problem: Problem) -> Exception:
    if isinstance(problem, Disagreement):
        return CollectiveMismatchError(problem.aspect, problem.calls)
    if problem.lost:
        return PeerLostError(problem.ranks, problem.waiting)
    return CollectiveTimeoutError(problem.seconds, problem.ranks, problem.waiting)
