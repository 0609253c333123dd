"""The event loop of a trainer, on a thread of its own.

All asyncio work of a process runs on one thread (`coordination_loop`): gRPC's asyncio stack shares a
single completion queue per process and is not at ease with several event loops.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from lighthouse.errors import ForkError
from lighthouse.forks import Turn, in_each_fork, keep_for_ever, lock_of_each_process
from lighthouse.starvation import SilenceClock

T = TypeVar("T")
LATE_S = 0.2  # a loop later than that was starved: answers are awaited for longer


class LoopThread:
    """An asyncio loop on a daemon thread of its own.

    Attributes:
        clock: measures the silence of others.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.clock: SilenceClock = SilenceClock(self.loop, LATE_S)
        self._process = os.getpid()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None, *, cancels: bool = False
    ) -> T:
        """Run the coroutine on the loop and wait for its result; never call this from the loop's own thread.

        Args:
            cancels: whether the coroutine ends, too, if the wait is interrupted; otherwise it goes on.

        Raises:
            ForkError: this process is a fork of the one that has the thread.
        """
        if self._process != os.getpid():
            coroutine.close()
            raise ForkError(
                f"process {self._process} made this before it forked process {os.getpid()}, which has none "
                "of its threads: make a Manager, a server or a client in the process that uses it"
            )
        running = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return running.result(timeout)
        except BaseException:
            if cancels:
                running.cancel()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_loop_thread: LoopThread | None = None
_loop_thread_lock = lock_of_each_process()


def coordination_loop() -> LoopThread:
    """Return the loop thread that every asyncio server and client of this process shares."""
    global _loop_thread  # noqa: PLW0603 - one per process
    with _loop_thread_lock:
        if _loop_thread is None:
            _loop_thread = LoopThread("torchft-coordination")
        return _loop_thread


def _leave_loop_to_parent() -> None:
    global _loop_thread  # noqa: PLW0603 - one per process
    if _loop_thread is not None:
        keep_for_ever(_loop_thread)  # its tasks would act as they are destroyed
        _loop_thread = None


in_each_fork(Turn.OBJECTS, _leave_loop_to_parent)
