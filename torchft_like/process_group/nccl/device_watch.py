"""Operations that end on a device, where no thread waits for them, and a watch over them.

A GPU runs its operations later, in the order of a stream, and the host learns of their end only by asking. So
one thread of each generation asks, a few times a second, and only while an operation is under way. It finds
operations that failed or take too long, and reports the first of them.

As in torch, a wait makes the current stream wait, not the thread, and a future is complete at once, with
tensors that are ready in the order of the stream that uses them. Neither can know how the operation will end.
The next `wait`, and the group's `errored`, report an operation that failed.

The watch knows neither CUDA nor NCCL: to it an operation is a function that says whether it is over.

INVARIANTS
* An operation, with the tensors that it holds, is kept until it is over: memory that a device still writes
  must not be used for another tensor.
* Whether an operation was cut off is decided once, before anything is torn down, and for each one: an
  operation that was over is good for ever, any other one is not.
* What an operation costs the thread that issues it, which holds the lock for it, depends on no other one,
  nor does the watch keep the GIL from that thread for longer than a few operations take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.work import FOREVER, ExplainedOperation
from torchft_like.runtime.spin_wait import growing_pauses

PERIOD_S = 0.25
DECISION_S_MAX = 5.0
# After so many operations the asking thread sleeps: a thread that merely releases the GIL takes it again
# before another one is awake.
ASKED_AT_ONCE = 16
REST_S = 20e-6

_logger = logging.getLogger(__name__)

# Returns whether the device is done with an operation; raises if the device failed. It must not block.
IsOver = Callable[[], bool]


@dataclass(eq=False)
class Watched:
    """An operation under way.

    Attributes:
        name: the operation's name in messages.
        is_over: asks for the present state; may be replaced by a better way to ask, together with `settle`.
        settle: called when the operation was cut off; returns the `is_over` from then on, because a
          communicator that is being torn down must not be asked.
        limit_s: how long it may take, in seconds.
        started: when it was started (of `time.monotonic`).
        was_cut_off: whether it was not over when the generation was; its outputs are then undefined.
    """

    name: str
    is_over: IsOver
    settle: Callable[[], IsOver]
    limit_s: float
    started: float
    was_cut_off: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the operation should be over by now."""
        return self.started + self.limit_s < time.monotonic()


class DeviceWatch:
    """The operations of one generation.

    Args:
        failure: returns what is wrong with the communicator, None while it is fine. It must not block.
        give_up: called once, with the reason for which the generation has to end; it must lead to `cut_off`.
        within: returns the context in which the thread asks.
    """

    def __init__(
        self,
        failure: Callable[[], BaseException | None],
        give_up: Callable[[str], object],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._failure = failure
        self._give_up = give_up
        self._within = within
        self._changed = threading.Condition()
        # By limit: of the operations with the same one, the first is the first to be late, and usually to be
        # over.
        self._under_way: dict[float, deque[Watched]] = {}
        self._cut_off_names: list[str] = []
        self._is_torn = False
        self._has_given_up = False
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, is_over: IsOver, settle: Callable[[], IsOver], limit_s: float) -> Watched:
        """Watch an operation from now on; if the end has been decided already, the operation is cut off."""
        watched = Watched(name, is_over, settle, limit_s, time.monotonic())
        with self._changed:
            is_torn = self._is_torn
            if not self._under_way:
                self._start()
                self._changed.notify()
            self._under_way.setdefault(limit_s, deque()).append(watched)
        if is_torn:
            self._mark_cut_off(watched)
        return watched

    def look(self, rest_s: float = 0.0) -> None:
        """Ask for the state of all operations once; sleep for `rest_s` seconds after every few of them."""
        try:
            failure = self._failure()
            late = None if failure is not None else self._late(rest_s)
        except Exception as error:  # noqa: BLE001 - any error is passed on as the reason
            failure, late = error, None
        if failure is not None:
            self._end(f"the device or its communicator failed: {failure}")
        elif late is not None:
            self._end(f"{late.name} was not done within {late.limit_s:g} s")

    def wait_over(self) -> None:
        """Wait until nothing is under way any more, or the end has been decided.

        Raises:
            RuntimeError: the device has failed.
        """
        pauses = growing_pauses()
        while not self._is_torn and any(True for _ in self._first_ones(lambda watched: watched.is_over())):
            time.sleep(next(pauses))

    def cut_off(self) -> None:
        """Decide at the end of the generation which operations had ended before it, and which never will."""
        with self._changed:
            if self._is_torn:
                return
            self._is_torn = True
            under_way = [watched for line in self._under_way.values() for watched in line]
        for watched in sorted(under_way, key=lambda watched: watched.started):
            if _is_over(watched, if_failed=False):
                watched.is_over = _yes
            else:
                self._mark_cut_off(watched)
        self._decided.set()

    def wait_decided(self) -> None:
        """Wait until `cut_off` has decided, once the end has begun: a moment, unless the device is dead."""
        if not self._decided.wait(DECISION_S_MAX):
            _logger.error("the device does not say which operations it has finished")

    def cut_off_operations(self) -> tuple[str, ...]:
        """Return the names of the operations that were cut off, in the order in which they were started."""
        with self._changed:
            return tuple(self._cut_off_names)

    def is_idle(self) -> bool:
        """Return whether nothing is under way any more. A device that failed runs nothing, either."""
        return next(self._first_ones(lambda watched: _is_over(watched, if_failed=True)), None) is None

    def close(self) -> None:
        """End the thread, and drop the operations that are still under way."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def _late(self, rest_s: float) -> Watched | None:
        """Drop the operations that are over; return one that is not, but should be."""
        first_ones = self._first_ones(lambda watched: watched.is_over(), rest_s)
        return next((first for first in first_ones if first.is_late), None)

    def _first_ones(self, is_over: Callable[[Watched], bool], rest_s: float = 0.0) -> Iterator[Watched]:
        """Yield, for each limit, the first operation that is not over; drop those before it."""
        asked = 0
        with self._changed:
            lines = list(self._under_way.items())
        for limit_s, line in lines:
            while (first := self._first_of(line)) is not None and is_over(first):
                self._drop(first, limit_s, line)
                asked += 1
                if rest_s and asked % ASKED_AT_ONCE == 0:
                    time.sleep(rest_s)
            if first is not None:
                yield first

    def _first_of(self, line: deque[Watched]) -> Watched | None:
        with self._changed:
            return line[0] if line else None

    def _drop(self, watched: Watched, limit_s: float, line: deque[Watched]) -> None:
        watched.is_over = _yes  # later the communicator may be gone
        watched.settle = lambda: _yes  # the old one would keep the tensors as long as the work
        with self._changed:
            if line and line[0] is watched:
                line.popleft()
            if not line and self._under_way.get(limit_s) is line:
                del self._under_way[limit_s]

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
        with self._within():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._under_way or self._closed.is_set())
                if self._closed.wait(PERIOD_S):
                    return
                self.look(REST_S)


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
        """Make the current stream wait; with a deadline, which aborts the group when it has passed, and for a
        barrier, the thread, too.
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
        return self._watched.is_over()

    def error(self) -> Any:
        """Return why the operation failed, or that it was cut off."""
        try:
            self._check()
        except ProcessGroupError as error:
            return error
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def future(self) -> Future[Any]:
        """Return torch's future, which is complete at once, with the list of output tensors."""
        return self._work.get_future()

    def synchronize(self) -> None:
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
