"""A group in which things go wrong on purpose, for tests.

A planted fault is felt wherever a real one would be: in `wait()`, in `get_future()`, or by the
thread that calls. `injected` counts the faults that were felt, so that a test can prove that it
tested something.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.collectives import BY_NAME, Collective
from torchft_like.process_group.work import DoneWork
from torchft_like.process_group.wrapper import ProcessGroupWrapper

ANY = "any"


class FaultInjectingProcessGroup(ProcessGroupWrapper):
    """Hands every call to `pg` except those that a fault was planted for.

    Faults outlive `configure`. `call` counts the calls of the collective from the planting on,
    beginning with 1; the collective "any" counts all of them.

    Attributes:
        injected: how many faults were felt.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._aborted = threading.Event()
        self.injected = 0

    def report_future_error(self, e: Exception) -> None:
        """The next collective runs, and then fails with `e`, in `wait()` and in its future."""
        self.fail(ANY, e)

    def fail(self, collective: str, error: Exception, call: int = 1) -> None:
        """A call runs, and then fails with `error`, in `wait()` and in its future."""

        def inject(run: Callable[[], Work | None]) -> Work:
            return _FailedWork(run(), error)

        self._plant(collective, call, inject)

    def refuse(self, collective: str, error: Exception, call: int = 1) -> None:
        """A call raises `error` and never runs."""

        def inject(run: Callable[[], Work | None]) -> Work:
            raise error

        self._plant(collective, call, inject)

    def delay(self, collective: str, seconds: float, call: int = 1) -> None:
        """A call begins late; its caller is blocked until then, or until an abort."""

        def inject(run: Callable[[], Work | None]) -> Work | None:
            self._aborted.wait(seconds)
            return run()

        self._plant(collective, call, inject)

    def hang(self, collective: str, call: int = 1) -> None:
        """A call never runs and never ends, until an abort fails it."""

        def inject(run: Callable[[], Work | None]) -> Work:
            return _HungWork(self._aborted)

        self._plant(collective, call, inject)

    def abort(self, reason: str = "abort() was called", *, quorum_id: int | None = None) -> None:
        """See ProcessGroup.abort; ends delays and hangs, too."""
        super().abort(reason, quorum_id=quorum_id)
        if quorum_id is None or super().errored() is not None:
            self._end_stalls()

    def shutdown(self) -> None:
        """See ProcessGroup.shutdown."""
        self._end_stalls()
        super().shutdown()

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Any) -> None:
        """See ProcessGroup.configure; ends the delays and hangs of the time before."""
        self._end_stalls()
        super().configure(store_addr, rank, world_size, **about)

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

    def _end_stalls(self) -> None:
        stalled, self._aborted = self._aborted, threading.Event()
        stalled.set()


FakeProcessGroupWrapper = FaultInjectingProcessGroup

Inject = Callable[[Callable[[], Work | None]], Work | None]


@dataclass
class _Fault:
    collective: str
    calls_left: int
    inject: Inject


class _FailedWork(DoneWork):
    """Runs to its end, then fails."""

    def __init__(self, work: Work | None, error: Exception) -> None:
        super().__init__([], error)
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            self._work.wait()
        return super().wait(timeout)

    def get_future(self) -> Future[Any]:
        if self._work is None:
            return super().get_future()
        failed: Future[Any] = Future()
        self._work.get_future().add_done_callback(lambda _: failed.set_exception(self._error))
        return failed

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


class _HungWork(DoneWork):
    """Waits for an abort and fails with it."""

    def __init__(self, aborted: threading.Event) -> None:
        super().__init__([], ProcessGroupAbortedError("the group was aborted while a collective hung"))
        self._aborted = aborted

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._aborted.wait(timeout.total_seconds() if timeout else None):
            raise TimeoutError(f"the collective still hangs after {timeout}")
        return super().wait()

    def get_future(self) -> Future[Any]:
        hung: Future[Any] = Future()

        def end() -> None:
            self._aborted.wait()
            hung.set_exception(self._error)

        threading.Thread(target=end, name="torchft-hung-collective", daemon=True).start()
        return hung

    def is_completed(self) -> bool:
        return self._aborted.is_set()
