"""A backend whose collectives run once the ranks have agreed on them.

The caller's thread describes its call, sends the description and returns. The link's thread receives the
ruling and starts the call on the real backend, in the order of rulings, which is the same on every rank. So
calls stay as asynchronous as they were.

INVARIANT: every call is in `_pending` from before its statement is sent until its ruling, or the end
of the link, settles its operation: exactly one of the two takes it out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import DebugLevel, Work, get_debug_level

from torchft_like.core.agreement.referee import Problem
from torchft_like.core.agreement.rules import Disagreement
from torchft_like.core.agreement.statements import PAIRED, encode
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProcessGroupError,
)
from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.checking.descriptions import describe
from torchft_like.process_group.checking.link import End, Link, join
from torchft_like.process_group.checking.messages import CALL, OVERDUE, Request
from torchft_like.process_group.checking.work import SILENCE_S_MAX, CheckedOperation
from torchft_like.process_group.collectives import COLLECTIVES, Call, Collective
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend, Create, GroupMembers
from torchft_like.process_group.work import Operation, OperationWork

CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
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
        self._methods = _methods_of(backend)
        self._link = link
        self._rank, self._world_size = members.rank, members.world_size
        self._timeout = members.timeout
        self._abort = abort
        self._lock = threading.Lock()  # calls reach the referee in the order of their tickets
        self._tickets = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._ended: End | None = None
        abort.add(link.cut)
        link.start(self)

    @property
    def inner(self) -> object:
        """The object that has the real backend's collectives."""
        return self._backend.inner

    def targets(self) -> tuple[object, ...]:
        """Return the same collectives as the real backend's, checked."""
        rows = (row for row in COLLECTIVES if row.name in self._methods)
        return (SimpleNamespace(**{row.name: partial(self._run, row) for row in rows}),)

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
        if pending is None:
            return
        if problem is None:
            self._start(pending)
        else:
            pending.operation.refuse(_error_for(problem))

    def is_overdue(self) -> bool:
        """Return whether the referee has let a deadline pass."""
        # This must not take the lock: a caller may hold it while it is blocked sending.
        pending = list(self._pending.values())
        oldest = next((p for p in pending if p.deadline_s < math.inf), None)
        return oldest is not None and time.monotonic() > oldest.deadline_s + SILENCE_S_MAX

    def end(self, why: End) -> None:
        """Refuse all calls that wait for a ruling, because none can come any more."""
        with self._lock:
            self._ended = why
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.operation.refuse(self._error_at(why, one.operation))

    def _run(self, row: Collective, *args: Any, **kwargs: Any) -> Work | None:
        operation = self._submit(row.bind(args, kwargs))
        if not row.blocking:
            return OperationWork(operation)
        operation.wait()
        return None

    def _submit(self, call: Call) -> CheckedOperation:
        statement = describe(call, self._world_size)
        timeout = call.timeout or self._timeout
        seconds = timeout.total_seconds()
        with self._lock:
            ticket = next(self._tickets)
            overdue = partial(self._say_overdue, ticket) if statement.rule == PAIRED else None
            streams = _streams_of(call)
            devices = [stream.device for stream in streams]
            operation = CheckedOperation(statement, timeout, overdue, devices)
            if self._ended is not None:
                operation.refuse(self._error_at(self._ended, operation))
                return operation
            deadline_s = math.inf if overdue else time.monotonic() + seconds
            self._pending[ticket] = _Pending(operation, call, deadline_s, streams)
            with contextlib.suppress(OSError):  # if it fails, the link's thread settles the pending calls
                self._link.send(Request(CALL, ticket, seconds, encode(statement)))
        return operation

    def _start(self, pending: _Pending) -> None:
        """Run a call on the streams that were its caller's."""
        row, operation = pending.call.collective, pending.operation
        try:
            with contextlib.ExitStack() as current:
                for stream in pending.streams:
                    current.enter_context(beside_captures(stream.device))
                    current.enter_context(torch.cuda.stream(stream))
                # No variable holds the bound method, because it would keep the backend alive, as in
                # Generation.run.
                started = self._methods[row.name](*pending.call.args, **pending.call.kwargs)
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


@dataclass(frozen=True)
class _Pending:
    """A call that waits for its ruling."""

    operation: CheckedOperation
    call: Call
    deadline_s: float
    streams: tuple[torch.cuda.Stream, ...]


def _methods_of(backend: Backend) -> dict[str, Callable[..., Work | None]]:
    found = ((row.name, row.find_on(*backend.targets())) for row in COLLECTIVES)
    return {name: method for name, method in found if method is not None}


def _as_refusal(error: Exception) -> Exception:
    """Return a backend's error before a call begins as a refusal, unless it says that the backend is
    unusable.
    """
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
