"""The Work that a managed collective returns: it succeeds, or the Manager has heard why not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from torchft_like.futures import future_wait

TensorFuture = torch.futures.Future[torch.Tensor]


class ManagedWork(Work):
    """A Work over a future that never carries an error.

    `wait()` and `get_future()` give the tensor; after an error its content is undefined and the
    Manager will not commit the step.
    """

    def __init__(self, future: TensorFuture) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done.

        Raises:
            TimeoutError: not done within `timeout`.
        """
        if timeout is None:
            self._future.wait()
        else:
            future_wait(self._future, timeout)
        return True

    def get_future(self) -> TensorFuture:
        """Completes with the tensor."""
        return self._future

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return self._future.done()

    def is_success(self) -> bool:
        """Errors have gone to the Manager."""
        return self._future.done()


def finished(tensor: torch.Tensor) -> ManagedWork:
    """A Work that is done already."""
    future: TensorFuture = torch.futures.Future()
    future.set_result(tensor)
    return ManagedWork(future)


def managed(
    work: Work, tensor: torch.Tensor, divide_by: int | None, on_error: Callable[[Exception], object]
) -> ManagedWork:
    """Continue `work`: divide the tensor where an average was asked for, and swallow its error.

    The continuation runs on the thread that completes the collective.
    """

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        try:
            future.value()
            if divide_by is not None:
                tensor.div_(divide_by)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is lost and the Manager knows
            on_error(error)
        return tensor

    return ManagedWork(work.get_future().then(finish))
