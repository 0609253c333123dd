"""An operation on NCCL's stream.

As with torch's own: to wait makes the current stream wait, not the thread, and the future is complete at
once, with tensors that whoever gets them finds in the order of his stream. Neither can know how the
operation will end. What ended badly is told by the next `wait`, and by the group's `errored`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupError
from torchft_like.patience import growing_pauses
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.device_watch import DeviceWatch, IsOver, Watched
from torchft_like.process_group.work import FOREVER, ExplainedOperation


class NcclOperation(ExplainedOperation):
    """See the module.

    Args:
        work: torch's handle.
        watched: the same operation, as the watch knows it.
        watch: which keeps it until it is over.
        abort: set when the generation is over; this object sets it when a wait lasts too long.
        mark: gives a function that says whether the current stream has come to where it is now.
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
            deadline: until when the thread waits; the group is aborted when it has passed.

        Raises:
            ProcessGroupAbortedError: the group was aborted before the operation was done.
        """
        # First of all, whatever became of the group: what comes next on this stream may write to the
        # tensors, and must come after NCCL's last access to them.
        self._work.block_current_stream()
        if deadline < FOREVER or self._blocks_thread:
            self._block_thread(deadline)
        else:
            # The watch lets go of torch's work, and so of the tensors: this stream keeps them safe now.
            is_past = self._mark()
            self._watched.is_over = is_past
            self._watched.settle = lambda: is_past
        self._check()

    def is_over(self) -> bool:
        """Whether the device is done with it."""
        return self._watched.is_over()

    def error(self) -> Any:
        """Why it failed, or that it was cut off."""
        try:
            self._check()
        except ProcessGroupError as error:
            return error
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._work.result()

    def future(self) -> Future[Any]:
        """torch's: complete at once, with the list of output tensors."""
        return self._work.get_future()

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self._work.block_current_stream()

    def _block_thread(self, deadline: float) -> None:
        """Until it is over, or the group is. In short sleeps, which Ctrl-C ends."""
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
