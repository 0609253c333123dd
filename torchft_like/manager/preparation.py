"""The thread that configures the process group, after the quorum is known and before it is used.

The training thread goes on with the forward pass meanwhile; the coordination loop stays free to receive the
alarm that a member died, and to abort what this thread waits for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from torchft_like import devices

Job = Callable[[], None]
OnError = Callable[[Exception], None]

logger = logging.getLogger(__name__)


class QuorumWorker:
    """A daemon thread that runs one job after the other.

    Attributes:
        device: the index of the device that is current in jobs; None if the process uses none.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, OnError] | None] = queue.SimpleQueue()
        self.device: int | None = None
        self._thread = threading.Thread(target=self._run, name="torchft-quorum", daemon=True)
        self._thread.start()

    def submit(self, job: Job, on_error: OnError = lambda _: None) -> None:
        """Run `job` after those that were submitted before. An error is logged and passed to `on_error`."""
        self._jobs.put((job, on_error))

    def stop(self, timeout_s: float | None) -> None:
        """End after the jobs submitted so far; wait for that `timeout_s` at most (None: not at all)."""
        self._jobs.put(None)
        if timeout_s is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, on_error = entry
            try:
                with devices.beside_captures(self.device):
                    job()
            # It may be an error of a user's transport, and later jobs have to run nevertheless.
            except Exception as error:
                logger.exception("a job of the quorum worker failed")
                on_error(error)
            del entry, job, on_error  # these hold attempts, and attempts hold tensors
