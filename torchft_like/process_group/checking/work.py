"""An operation that starts only after its ruling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from torchft_like.core.agreement.statements import Statement
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.work import FOREVER, NOTHING, ExplainedOperation, Operation

SILENCE_S_MAX = 5.0  # seconds by which the referee may miss a deadline before it counts as gone


class CheckedOperation(ExplainedOperation):
    """An operation that may not have started yet; once it has, it behaves as the backend's operation.

    Args:
        statement: the description of the call.
        timeout: the limit of a wait that has no deadline.
        overdue: called when a thread has waited that long and the operation has not started; a ruling
          follows.
        devices: the devices other than the CPU on which its tensors live.
    """

    def __init__(
        self,
        statement: Statement,
        timeout: timedelta,
        overdue: Callable[[], None] | None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._statement = statement
        self._timeout = timeout
        self._overdue = overdue
        self._devices: list[int | str | torch.device] = [*devices]
        self._lock = threading.Lock()
        self._ruled = threading.Event()
        self._inner: Operation = NOTHING
        self._refused: Exception | None = None
        self._futures: list[Future[Any]] = []

    def __str__(self) -> str:
        return self._statement.text()

    def follow(self, operation: Operation | None) -> None:
        """Behave as `operation` from now on, because the call has started; None if it is over."""
        self._inner = operation or self._inner
        self._settle()

    def refuse(self, error: Exception) -> None:
        """Fail with this error: the operation will not start."""
        self._refused = error
        self._settle()

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the operation is over.

        Raises:
            CollectiveMismatchError: the ranks do not agree on it.
            CollectiveTimeoutError: a rank has not made its call in time.
            RuntimeError: the backend failed, or `deadline` has passed.
        """
        self._await_ruling(deadline)
        if self._refused is not None:
            raise self._refusal(self._refused)
        self._inner.wait(deadline)

    def is_over(self) -> bool:
        """Return whether the operation was refused, or has started and is over."""
        return self._ruled.is_set() and self._inner.is_over()

    def error(self) -> Any:
        """Return the refusal, or the backend's error."""
        return self._refused or self._inner.error()

    def is_success(self) -> bool:
        """Return whether the operation has started, is over, and has not failed."""
        return self._ruled.is_set() and self._refused is None and self._inner.is_success()

    def result(self) -> list[Any]:
        """Return the output tensors, once the operation has started."""
        return self._inner.result()

    def future(self) -> Future[Any]:
        """Return a future that completes as the backend's does, or with the refusal."""
        future: Future[Any] = Future(devices=self._devices)
        with self._lock:
            is_ruled = self._ruled.is_set()
            if not is_ruled:
                self._futures.append(future)
        if is_ruled:
            self._complete(future)
        return future

    def synchronize(self) -> None:
        """Make the current stream wait; block until the operation has started."""
        self._await_ruling(FOREVER)
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, as the backend's work does under this name; block until it has
        started.
        """
        self._await_ruling(FOREVER)
        self._inner.block_current_stream()

    def source_rank(self) -> int:
        """Return the sender's rank, once the operation has started."""
        return self._inner.source_rank()

    def _settle(self) -> None:
        with self._lock:
            futures, self._futures = self._futures, []
            self._ruled.set()
        for future in futures:
            self._complete(future)

    def _await_ruling(self, deadline: float) -> None:
        started = time.monotonic()
        if self._overdue is not None:
            seconds = deadline - started if deadline < FOREVER else self._timeout.total_seconds()
            if self._ruled.wait(seconds):
                return
            self._overdue()
            deadline = time.monotonic() + SILENCE_S_MAX
        if not self._ruled.wait(deadline - time.monotonic() if deadline < FOREVER else None):
            seconds = time.monotonic() - started
            error = ProcessGroupError(f"{self}: timed out, some ranks have not come within {seconds:.3g} s")
            raise self._refusal(error)

    def _refusal(self, error: Exception) -> Exception:
        return self.explain(error) or error

    def _complete(self, future: Future[Any]) -> None:
        if self._refused is not None:
            future.set_exception(self._refusal(self._refused))
        else:
            self._inner.future().add_done_callback(lambda done: _hand_on(done, future))


def _hand_on(done: Future[Any], future: Future[Any]) -> None:
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001 - the future passes it on
        future.set_exception(error)
    else:
        future.set_result(value)
