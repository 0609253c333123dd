"""Operations that end on a device, where no thread waits for them.

What a GPU is told to do it does later, in the order of a stream, and the host hears of the end only if
it asks. So somebody has to ask: here one thread of each generation, a few times a second, and only
while something is under way. It finds what failed and what takes too long, and says so once.

It deliberately knows neither CUDA nor NCCL: an operation is a function that says whether it is over.

INVARIANTS
* An operation, with the tensors that it holds, is kept until it is over: memory that a device still
  writes must not become somebody else's.
* Whether an operation was cut off is decided once, before anything is torn down, and for each one: an
  operation that was over is good for ever, any other one is not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PERIOD_S = 0.25
DECISION_S_MAX = 5.0

_logger = logging.getLogger(__name__)

# Whether the device is done with an operation; raises if the device failed. Must not block.
IsOver = Callable[[], bool]


@dataclass(eq=False)
class Watched:
    """An operation under way.

    Attributes:
        name: for messages.
        is_over: as of now; may be replaced by a better way to ask, together with `settle`.
        settle: called when it was cut off; gives what `is_over` is from then on, for a communicator
            that is being torn down must not be asked.
        limit_s: how long it may take.
        deadline: when that has passed (of `time.monotonic`).
        was_cut_off: it was not over when the generation was; its outputs hold anything.
    """

    name: str
    is_over: IsOver
    settle: Callable[[], IsOver]
    limit_s: float
    deadline: float
    was_cut_off: bool = False


class DeviceWatch:
    """Those of one generation.

    Args:
        failure: says what is wrong with the communicator, None while it is fine. Must not block.
        give_up: called, once, with the reason for which the generation has to end; must lead to `cut_off`.
        prepare: called first of all on the thread that asks.
    """

    def __init__(
        self,
        failure: Callable[[], BaseException | None],
        give_up: Callable[[str], object],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._failure = failure
        self._give_up = give_up
        self._prepare = prepare
        self._changed = threading.Condition()
        self._under_way: deque[Watched] = deque()
        self._cut_off_names: list[str] = []
        self._is_torn = False
        self._has_given_up = False
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, is_over: IsOver, settle: Callable[[], IsOver], limit_s: float) -> Watched:
        """From now on the operation is asked after. Once the end has been decided, it is cut off."""
        watched = Watched(name, is_over, settle, limit_s, time.monotonic() + limit_s)
        with self._changed:
            is_torn = self._is_torn
            self._under_way.append(watched)
            self._start()
            self._changed.notify()
        if is_torn:
            self._mark_cut_off(watched)
        return watched

    def look(self) -> None:
        """Ask after everything once."""
        try:
            failure = self._failure()
            late = None if failure is not None else self._late()
        except Exception as error:  # noqa: BLE001 - the reason, whatever it is, is passed on
            failure, late = error, None
        if failure is not None:
            self._end(f"the device or its communicator failed: {failure}")
        elif late is not None:
            self._end(f"{late.name} was not done within {late.limit_s:g} s")

    def cut_off(self) -> None:
        """The generation is over: decide which operations had ended before, and which never will."""
        with self._changed:
            if self._is_torn:
                return
            self._is_torn = True
            under_way = list(self._under_way)
        for watched in under_way:
            if _is_over(watched, if_failed=False):
                watched.is_over = _yes
            else:
                self._mark_cut_off(watched)
        self._decided.set()

    def wait_decided(self) -> None:
        """After the end has begun: until `cut_off` has decided. A moment, unless the device is dead."""
        if not self._decided.wait(DECISION_S_MAX):
            _logger.error("the device does not say which operations it has finished")

    def cut_off_operations(self) -> tuple[str, ...]:
        """The names of those that were cut off, in the order in which they were started."""
        with self._changed:
            return tuple(self._cut_off_names)

    def is_idle(self) -> bool:
        """Whether nothing is under way any more. A device that failed runs nothing, either."""
        while True:
            with self._changed:
                if not self._under_way:
                    return True
                first = self._under_way[0]
            if not _is_over(first, if_failed=True):
                return False
            self._drop(first)

    def close(self) -> None:
        """End the thread. What is under way is kept by nobody any more."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def _late(self) -> Watched | None:
        """Drop what is over; the first that is not and should be.

        A stream ends operations in their order, so the first that is not over stands for the rest.
        """
        while True:
            with self._changed:
                if not self._under_way:
                    return None
                first = self._under_way[0]
                late = min(self._under_way, key=lambda watched: watched.deadline)
            if not first.is_over():
                break
            self._drop(first)
        if late.deadline > time.monotonic() or late.is_over():
            return None
        return late

    def _drop(self, watched: Watched) -> None:
        watched.is_over = _yes  # later there may be nobody to ask
        with self._changed:
            if self._under_way and self._under_way[0] is watched:
                self._under_way.popleft()

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._is_torn or self._has_given_up:
                return
            self._has_given_up = True
        self._give_up(reason)

    def _mark_cut_off(self, watched: Watched) -> None:
        watched.was_cut_off = True
        watched.is_over = _settled(watched)
        with self._changed:
            self._cut_off_names.append(watched.name)

    def _start(self) -> None:
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="torchft-device-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        self._prepare()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._closed.is_set())
            if self._closed.wait(PERIOD_S):
                return
            self.look()


def _settled(watched: Watched) -> IsOver:
    try:
        return watched.settle()
    except Exception:
        _logger.exception("the device failed while %s was cut off", watched.name)
        return _yes


def _is_over(watched: Watched, *, if_failed: bool) -> bool:
    try:
        return watched.is_over()
    except Exception:
        _logger.exception("the device failed while %s was under way", watched.name)
        return if_failed


def _yes() -> bool:
    return True
