"""An operation on NCCL's stream.

As in torch, a wait makes the current stream wait, not the thread, and the future is complete at once, with
tensors that are ready in the order of the stream that uses them. Neither can know how the operation will end.
The next `wait`, and the group's `errored`, report an operation that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.nccl.device_watch import DeviceWatch, IsOver, Watched
from torchft_like.process_group.work import FOREVER, ExplainedOperation
from torchft_like.runtime.spin_wait import growing_pauses


class NcclOperation(ExplainedOperation):
    """An operation on NCCL's stream, which a `DeviceWatch` watches.

    Args:
        work: torch's work.
        watched: the same operation in the watch.
        watch: the watch, which keeps the operation until it is over.
        abort: the signal of the generation's end; this object sets it when a wait lasts too long.
        mark: returns a function that tells whether the current stream has passed the point at which it is
          now.
    """

    def __init__(
        self, work: Work, watched: Watched, watch: DeviceWatch, abort: AbortSignal, mark: Callable[[], IsOver]
    ) -> None:
        self._work = work
        self._watched = watched
        self._watch = watch
        self._abort = abort
        self._mark = mark
        self._blocks_thread = watched.name == "barrier"

    def wait(self, deadline: float = FOREVER) -> None:
        """Make the current stream wait; with a deadline, and for a barrier, the thread, too.

        Args:
            deadline: until when the thread waits, of the monotonic clock; when it has passed, the group is
              aborted.

        Raises:
            ProcessGroupAbortedError: the group was aborted before the operation was done.
        """
        # The stream waits whatever became of the group: its next work may write to the tensors, and must come
        # after NCCL's last access to them.
        self._work.block_current_stream()
        if deadline < FOREVER or self._blocks_thread:
            self._block_thread(deadline)
        else:
            # The watch drops torch's work, and with it the tensors: this stream keeps them safe now.
            is_past = self._mark()
            self._watched.is_over = is_past
            self._watched.settle = lambda: is_past
        self._check()

    def is_over(self) -> bool:
        """Return whether the device is done with the operation."""
        return self._watched.is_over()

    def error(self) -> Any:
        """Return why the operation failed, or that it was cut off."""
        try:
            self._check()
        except ProcessGroupError as error:
            return error
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._work.result()

    def future(self) -> Future[Any]:
        """Return torch's future, which is complete at once, with the list of output tensors."""
        return self._work.get_future()

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self._work.block_current_stream()

    def _block_thread(self, deadline: float) -> None:
        """Wait until the operation or the group is over, in short sleeps, which Ctrl-C ends."""
        limit_s = round(deadline - time.monotonic(), 2)
        pauses = growing_pauses()
        while not self._watched.is_over() and self._abort.reason is None:
            if time.monotonic() > deadline:
                self._abort.set(f"{self._watched.name} was not done within {limit_s:g} s")
                return
            time.sleep(next(pauses))

    def _check(self) -> None:
        if self._abort.reason is None:
            return
        self._watch.wait_decided()
        if self._watched.was_cut_off:
            error = ProcessGroupError(f"{self._watched.name} was cut off: {self._abort.reason}")
            raise self.explain(error) or error
