"""The handle of an operation that starts only after its ruling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.checking.rules import Description
from torchft_like.process_group.work import ExplainedWork

SILENCE_S_MAX = 5.0  # by how much the referee may miss a deadline before it counts as gone


class CheckedWork(ExplainedWork):
    """An operation that may not have started yet; then it is what the backend's work is.

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
        self._devices: list[int | str | torch.device] = [*devices]
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
            future.set_exception(self._refusal(error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done.

        Raises:
            CollectiveMismatchError: the ranks do not agree on it.
            CollectiveTimeoutError: a rank has not come.
            RuntimeError: the backend failed, or `timeout` is over.
        """
        timeout = timeout or None  # as in C++, a timeout of zero is none
        started_s = time.monotonic()
        self._await_ruling(timeout)
        if self._error is not None:
            raise self._refusal(self._error)
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
            error = ProcessGroupError(f"{self}: timed out, some ranks have not come within {seconds:g} s")
            raise self._refusal(error)

    def _refusal(self, error: Exception) -> Exception:
        return self.explain(error) or error

    def _complete(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._refusal(self._error))
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
