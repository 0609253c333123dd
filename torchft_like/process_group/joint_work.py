"""Several operations as one.

What is left to do once all of them are over, such as copying a result, is done once, by the backend's thread
or by a waiting one, whichever comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.devices import after
from torchft_like.futures import empty_future
from torchft_like.process_group.work import FOREVER, Operation, OperationWork, left_until

Finish = Callable[[], list[Any]]


def joint_work(works: Sequence[Work], finish: Finish, *, waits: bool = False) -> OperationWork:
    """Return a work that is over when all of `works` are, and that fails when one of them does.

    Args:
        works: works of one backend, in the order in which they were begun.
        finish: returns the result, once all have succeeded.
        waits: whether `finish` runs only once a thread waits, or asks for the future. Sends and receives have
          no future.
    """
    return OperationWork(_JointOperation(works, finish, waits))


class _JointOperation(Operation):
    def __init__(self, works: Sequence[Work], finish: Finish, waits: bool) -> None:
        self._works = works
        self._finish = _Once(finish)
        self._future = None if waits else self._follow()

    def wait(self, deadline: float = FOREVER) -> None:
        for work in self._works:
            if deadline == FOREVER:
                work.wait()
            else:
                work.wait(left_until(deadline))
        self._finish()

    def is_over(self) -> bool:
        """Return whether all works are over, and the result is there or cannot come."""
        return (self._future is None or self._future.done()) and all(w.is_completed() for w in self._works)

    def error(self) -> Any:
        """Return the first error, in the order of the works."""
        errors = (work.exception() for work in self._works if work.is_completed())
        return next((error for error in errors if error is not None), None)

    def is_success(self) -> bool:
        """Return whether all works have succeeded, and the result is there unless no future was asked for."""
        is_finished = self._future is None or self._finish.is_done
        return is_finished and all(work.is_success() for work in self._works)

    def result(self) -> list[Any]:
        return self._finish()

    def future(self) -> Future[Any]:
        if self._future is None:
            self._future = self._follow()
        return self._future

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def source_rank(self) -> int:
        """Return the sender's rank, if there is only one operation."""
        return self._works[0]._source_rank() if len(self._works) == 1 else -1

    def _follow(self) -> Future[list[Any]]:
        own = empty_future()
        joined = _joined([work.get_future() for work in self._works])
        joined.add_done_callback(lambda done: self._complete(own, done))
        return own

    def _complete(self, own: Future[list[Any]], done: Future[list[Future[Any]]]) -> None:
        try:
            values = [future.value() for future in done.value()]
            with after(self._works, values):
                own.set_result(self._finish())
        except Exception as error:  # noqa: BLE001 - the future passes it on
            own.set_exception(error)  # type: ignore[arg-type] # torch declares the error as a result


def _joined(futures: list[Future[Any]]) -> Future[list[Future[Any]]]:
    if futures:
        return torch.futures.collect_all(futures)
    nothing: Future[list[Future[Any]]] = Future()
    nothing.set_result([])
    return nothing


class _Once:
    """A function that runs once, however many threads ask for its result."""

    def __init__(self, function: Finish) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._result: list[Any] = []
        self.is_done = False

    def __call__(self) -> list[Any]:
        with self._lock:
            if not self.is_done:
                self._result = self._function()
                self.is_done = True
            return self._result
