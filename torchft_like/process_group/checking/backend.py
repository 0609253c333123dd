"""A backend whose collectives run once the ranks have agreed on them.

Threads: the caller describes its call, sends that and returns. The link's thread hears the ruling and
starts the call on the real backend, in the order of rulings, which is the same on every rank. So
calls stay as asynchronous as they were.

INVARIANT: every call is in `_pending` from before its description is sent until its ruling, or the end
of the link, settles its work: exactly one of the two takes it out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProcessGroupError,
)
from torchft_like.process_group.checking.descriptions import describe, timeout_of
from torchft_like.process_group.checking.link import End, Link, join
from torchft_like.process_group.checking.messages import CALL, OVERDUE, Request, encode_description
from torchft_like.process_group.checking.referee import Problem
from torchft_like.process_group.checking.rules import PAIRED, Description, Disagreement
from torchft_like.process_group.collectives import COLLECTIVES, Call, Collective, tensors_of
from torchft_like.process_group.generation import AbortSignal, Backend, Create, Membership

CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
SILENCE_S_MAX = 5.0  # by how much the referee may miss a deadline before it counts as gone


def checked(create: Create) -> Create:
    """Make what `create` makes, with a referee in front of it. A group of one has nobody to ask."""

    def create_checked(membership: Membership, abort: AbortSignal) -> Backend:
        backend = create(membership, abort)
        if membership.world_size == 1:
            return backend
        try:
            return CheckedBackend(backend, join(membership, abort), membership, abort)
        except BaseException:
            backend.close()
            raise

    return create_checked


def is_wanted(check_collectives: bool | None) -> bool:
    """The argument, or where that is None, the environment.

    Raises:
        ConfigError: the environment says neither yes nor no.
    """
    if check_collectives is not None:
        return check_collectives
    text = os.environ.get(CHECK_ENV, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"the environment variable {CHECK_ENV} is {text!r}: it must be 0 or 1")
    return text == "1"


class CheckedBackend:
    """See the module; for one life of a group.

    Args:
        backend: what runs the collectives.
        link: to the referee, not yet started.
    """

    def __init__(self, backend: Backend, link: Link, membership: Membership, abort: AbortSignal) -> None:
        self._backend = backend
        self._link = link
        self._rank, self._world_size = membership.rank, membership.world_size
        self._timeout = membership.timeout
        self._abort = abort
        self._lock = threading.Lock()  # calls reach the referee in the order of their tickets
        self._tickets = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._ended: End | None = None
        abort.add(link.cut)
        link.start(self)

    @property
    def inner(self) -> object:
        """The real backend's."""
        return self._backend.inner

    def targets(self) -> tuple[object, ...]:
        """The same collectives as the real backend's, checked."""
        found = ((row, row.find_on(*self._backend.targets())) for row in COLLECTIVES)
        return (SimpleNamespace(**{row.name: self._checked(row, run) for row, run in found if run}),)

    def set_timeout(self, timeout: timedelta) -> None:
        """See generation.Backend."""
        self._timeout = timeout
        self._backend.set_timeout(timeout)

    def break_off(self) -> None:
        """See generation.Backend."""
        self._link.cut()
        self._backend.break_off()

    def is_still(self) -> bool:
        """See generation.Backend: nor is anything started any more."""
        return not self._link.is_alive() and self._backend.is_still()

    def close(self) -> None:
        """See generation.Backend."""
        self._abort.remove(self._link.cut)
        self._link.cut()
        self._link.join()
        self._backend.close()

    # For the link, on its thread.

    def deliver(self, ticket: int, problem: Problem | None) -> None:
        """A ruling has come."""
        with self._lock:
            pending = self._pending.pop(ticket, None)
        if pending is None:
            return
        if problem is None:
            pending.start()
        else:
            pending.work.refuse(_error_for(problem))

    def is_overdue(self) -> bool:
        """Whether the referee has let a deadline pass."""
        with self._lock:
            oldest = next((p for p in self._pending.values() if p.deadline_s < math.inf), None)
        return oldest is not None and time.monotonic() > oldest.deadline_s + SILENCE_S_MAX

    def end(self, why: End) -> None:
        """No ruling can come any more: what waits for one fails."""
        with self._lock:
            self._ended = why
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.work.refuse(self._error_at(why, one.work))

    def _checked(self, row: Collective, run: Callable[..., Any]) -> Callable[..., Any]:
        def submit(*args: Any, **kwargs: Any) -> Work | None:
            work = self._submit(row.bind(args, kwargs), run)
            if not row.blocking:
                return work
            work.wait()
            return None

        return submit

    def _submit(self, call: Call, run: Callable[..., Any]) -> CheckedWork:
        description = describe(call, self._world_size)
        timeout = timeout_of(call) or self._timeout
        seconds = timeout.total_seconds()
        with self._lock:
            ticket = next(self._tickets)
            overdue = partial(self._say_overdue, ticket) if description.rule == PAIRED else None
            streams = _streams_of(call)
            work = CheckedWork(description, timeout, overdue, [stream.device for stream in streams])
            if self._ended is not None:
                work.refuse(self._error_at(self._ended, work))
                return work
            deadline_s = math.inf if overdue else time.monotonic() + seconds
            self._pending[ticket] = _Pending(work, call, run, deadline_s, streams)
            with contextlib.suppress(OSError):  # then the link's thread settles what is pending
                self._link.send(Request(CALL, ticket, seconds, encode_description(description)))
        return work

    def _error_at(self, why: End, work: CheckedWork) -> Exception:
        """For a call that will hear no ruling."""
        waiting = {self._rank: (str(work),)}
        if why is End.CLOSED:
            return PeerLostError((0,), waiting)
        if why is End.SILENT:
            return CollectiveTimeoutError(self._timeout.total_seconds(), (0,), waiting)
        return ProcessGroupError(f"{work}: {why.value}")

    def _say_overdue(self, ticket: int) -> None:
        with contextlib.suppress(OSError):  # see `_submit`
            self._link.send(Request(OVERDUE, ticket))


@dataclass(frozen=True)
class _Pending:
    """A call that waits for its ruling, and how it is started then."""

    work: CheckedWork
    call: Call
    run: Callable[..., Any]
    deadline_s: float
    streams: tuple[torch.cuda.Stream, ...]

    def start(self) -> None:
        """Run it, as the caller would have, on the streams that were the caller's."""
        try:
            with contextlib.ExitStack() as current:
                for stream in self.streams:
                    current.enter_context(torch.cuda.stream(stream))
                self.work.follow(self.run(*self.call.args, **self.call.kwargs))
        except RuntimeError as error:
            self.work.refuse(CollectiveRefusedError(str(error)))
        except Exception as error:  # noqa: BLE001 - it is raised where the call is waited for
            self.work.refuse(error.with_traceback(None))


class CheckedWork(Work):
    """An operation that may not have started yet.

    Args:
        description: what it is.
        timeout: of a wait that names none.
        overdue: what to do when somebody has waited that long before it has started; a ruling follows.
        devices: other than the CPU, where its tensors live.
    """

    def __init__(
        self,
        description: Description,
        timeout: timedelta,
        overdue: Callable[[], None] | None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__()
        self._description = description
        self._timeout = timeout
        self._overdue = overdue
        self._devices = list(devices)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._work: Work | None = None
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def __str__(self) -> str:
        return self._description.text()

    def follow(self, work: Work | None) -> None:
        """It has started, and is now what `work` is; None where it is over."""
        with self._lock:
            self._work = work
            future = self._future
            self._settled.set()
        if future is not None:
            self._complete(future)

    def refuse(self, error: Exception) -> None:
        """It will not start."""
        with self._lock:
            self._error = error
            future = self._future
            self._settled.set()
        if future is not None:
            future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done.

        Raises:
            CollectiveMismatchError: the ranks do not agree on it.
            CollectiveTimeoutError: a rank has not come.
            RuntimeError: the backend failed, or `timeout` is over.
        """
        started_s = time.monotonic()
        self._await_ruling(timeout)
        if self._error is not None:
            raise self._error
        if self._work is None:
            return True
        if timeout is None:
            return self._work.wait()
        left_s = timeout.total_seconds() - (time.monotonic() - started_s)
        return self._work.wait(timedelta(seconds=max(left_s, 0.001)))

    def get_future(self) -> Future[Any]:
        """Completes as the backend's does, or with the refusal."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future(devices=self._devices)
            is_settled = self._settled.is_set()
        if is_settled:
            self._complete(self._future)
        return self._future

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._settled.is_set() and (self._work is None or self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self.is_completed() and self._error is None and (self._work is None or self._work.is_success())

    def exception(self) -> Any:
        """The error, once it failed."""
        return self._work.exception() if self._work is not None else self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once it is done."""
        return self._work.result() if self._work is not None else []

    def source_rank(self) -> int:
        """Who sent what a receive from any source got."""
        return self._work._source_rank() if self._work is not None else -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait; blocks until the operation has started."""
        self._await_ruling(None)
        if self._work is not None:
            self._work.synchronize()

    def block_current_stream(self) -> None:
        """As `synchronize`."""
        self._await_ruling(None)
        if self._work is not None:
            self._work.block_current_stream()

    def _await_ruling(self, timeout: timedelta | None) -> None:
        if self._overdue is not None:
            if self._settled.wait((timeout or self._timeout).total_seconds()):
                return
            self._overdue()
            timeout = timedelta(seconds=SILENCE_S_MAX)
        seconds = None if timeout is None else timeout.total_seconds()
        if not self._settled.wait(seconds):
            raise ProcessGroupError(f"{self}: timed out, some ranks have not come within {seconds:g} s")

    def _complete(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif self._work is None:
            future.set_result([])
        else:
            self._work.get_future().add_done_callback(lambda done: _hand_on(done, future))


def _hand_on(done: Future[Any], future: Future[Any]) -> None:
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001 - it goes where the result would have gone
        future.set_exception(error)
    else:
        future.set_result(value)


def _error_for(problem: Problem) -> Exception:
    if isinstance(problem, Disagreement):
        return CollectiveMismatchError(problem.aspect, problem.calls)
    if problem.lost:
        return PeerLostError(problem.ranks, problem.waiting)
    return CollectiveTimeoutError(problem.seconds, problem.ranks, problem.waiting)


def _streams_of(call: Call) -> tuple[torch.cuda.Stream, ...]:
    """The caller's current streams, on which the backend is to find the inputs ready."""
    devices = {tensor.device for tensor in tensors_of((call.outputs, call.inputs)) if tensor.is_cuda}
    return tuple(torch.cuda.current_stream(device) for device in devices)
