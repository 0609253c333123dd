"""Groups for tests, and for code that has nothing to communicate: one in which things go wrong on purpose,
and one that moves nothing.

A planted fault is felt wherever a real one would be: in `wait()`, in `get_future()`, or by the
thread that calls. `injected` counts the faults that were felt, so that a test can prove that it
tested something.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Unpack

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.futures import fail
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import BY_NAME, Collective, refuse_unfit
from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.work import (
    NOTHING,
    DeferredOperation,
    FinishedOperation,
    FollowingOperation,
    Operation,
    wait_until,
)
from torchft_like.process_group.wrapper import ProcessGroupWrapper
from torchft_like.runtime.durations import as_timedelta

ANY = "any"


class FaultInjectingProcessGroup(ProcessGroupWrapper):
    """A wrapper that hands every call to `pg`, except those for which a fault was planted.

    Faults outlive `configure`. `call` counts the calls of the collective from the planting on,
    beginning with 1; the collective "any" counts all of them.

    Attributes:
        injected: how many faults were felt.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self.injected: int = 0

    def report_future_error(self, e: Exception) -> None:
        """Let the next collective run, and then fail with `e`, in `wait()` and in its future."""
        self.fail(ANY, e)

    def fail(self, collective: str, error: Exception, call: int = 1) -> None:
        """Let a call run, and then fail with `error`, in `wait()` and in its future."""

        def inject(run: Run) -> Work:
            return _FailedOperation(run() or NOTHING, error)

        self._plant(collective, call, inject)

    def refuse(self, collective: str, error: Exception, call: int = 1) -> None:
        """Let a call raise `error` without running."""

        def inject(run: Run) -> Work:
            raise error

        self._plant(collective, call, inject)

    def delay(self, collective: str, seconds: float, call: int = 1) -> None:
        """Block the caller of a call for `seconds`, or until an abort, before it begins."""

        def inject(run: Run) -> Work | None:
            over = threading.Event()
            self.configuration.add(over.set)
            over.wait(seconds)
            return run()

        self._plant(collective, call, inject)

    def hang(self, collective: str, call: int = 1) -> None:
        """Keep a call from running and from ending, until an abort fails it."""

        def inject(run: Run) -> Work:
            hung = DeferredOperation()
            error = ProcessGroupAbortedError("the group was aborted while a collective hung")
            self.configuration.add(lambda: hung.follow(FinishedOperation([], error)))
            return hung

        self._plant(collective, call, inject)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        def run() -> Work | None:
            return super(FaultInjectingProcessGroup, self)._run(collective, args, kwargs)

        fault = self._due(collective)
        return run() if fault is None else fault.inject(run)

    def _plant(self, collective: str, call: int, inject: Inject) -> None:
        if collective != ANY and collective not in BY_NAME:
            raise ValueError(f"{collective!r} is no collective; there are {', '.join(BY_NAME)} and any")
        if call < 1:
            raise ValueError(f"calls count from 1, not {call}")
        name = ANY if collective == ANY else BY_NAME[collective].name
        with self._lock:
            self._faults.append(_Fault(name, call, inject))

    def _due(self, collective: Collective) -> _Fault | None:
        with self._lock:
            concerned = [f for f in self._faults if f.collective in (ANY, collective.name)]
            for fault in concerned:
                fault.calls_left -= 1
            due = next((f for f in concerned if f.calls_left == 0), None)
            if due is not None:
                self.injected += 1
            self._faults = [f for f in self._faults if f.calls_left > 0]
            return due


FakeProcessGroupWrapper = FaultInjectingProcessGroup

Run = Callable[[], Work | None]
Inject = Callable[[Run], Work | None]


@dataclass
class _Fault:
    collective: str
    calls_left: int
    inject: Inject


class _FailedOperation(FollowingOperation):
    """An operation that runs to its end, and then fails."""

    def __init__(self, inner: Work, failure: Exception) -> None:
        super().__init__()
        self.inner = inner
        self._failure = failure

    is_success = Operation.is_success

    def wait_until(self, deadline: float) -> None:
        wait_until(self.inner, deadline)
        raise self._failure

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> Exception:
        return self._failure

    def result(self) -> list[Any]:
        return []

    def get_future(self) -> Future[Any]:
        failed: Future[Any] = Future()
        self.inner.get_future().add_done_callback(lambda _: fail(failed, self._failure))
        return failed


class ProcessGroupDummy(ProcessGroup):
    """A group whose collectives are over at once, with the result that a group of one has, and are counted.

    It is for code that needs a group where there is nothing to communicate, and for tests.

    Args:
        rank: 0.
        world: 1.

    Attributes:
        calls: how often each collective was called, by name.
        configure_count, wait_count, get_future_count: how often each of these was called.

    Raises:
        ValueError: another rank or world was given.
    """

    _backend_name = "torchft-dummy"

    def __init__(self, rank: int, world: int) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"a dummy group is rank 0 of a world of 1, not rank {rank} of {world}")
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._timeout = DEFAULT_TIMEOUT
        self.configure_count: int = 0
        self.wait_count = 0
        self.get_future_count = 0

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Count the call: this group always has one member."""
        self.configure_count += 1
        self._begin_configuration(about.get("ends_with"))

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        """End what belongs to this configuration; no operation is ever under way."""
        self._configuration.set(reason)

    def shutdown(self) -> None:
        self._configuration.set("the group was shut down")

    def errored(self) -> Exception | None:
        return None

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the timeout, without effect: nothing takes time."""
        self._timeout = as_timedelta(timeout)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def make_alike(self) -> ProcessGroupDummy:
        return ProcessGroupDummy(0, 1)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        self.calls[collective.name] += 1
        call = collective.bind(args, kwargs)
        refuse_unfit(call)
        call.apply_locally(rank=0, world_size=1)
        return None if collective.blocking else _CountedOperation(self, call.result)


class _CountedOperation(FinishedOperation):
    def __init__(self, group: ProcessGroupDummy, result: list[Any]) -> None:
        super().__init__(result)
        self._group = group

    def wait_until(self, deadline: float) -> None:
        self._group.wait_count += 1

    def get_future(self) -> Future[Any]:
        self._group.get_future_count += 1
        return super().get_future()
