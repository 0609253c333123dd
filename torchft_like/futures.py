"""Futures of what another thread does, and time limits of futures, blocks of code and accelerator streams.

All limits are entries in one heap, served by one daemon thread that sleeps until the next one is due; it
starts with the first timeout. An entry that is cancelled drops its callback at once, so that a long timeout
on a short operation keeps nothing alive.

Callbacks run on the timer thread: they must be quick, because the other timeouts wait for them.
TORCHFT_WATCHDOG_TIMEOUT_SEC limits the time of one callback: after it the process ends, with the stack of
every thread on stderr, because no other timeout would work any more. Without the variable there is no limit.
"""

from __future__ import annotations

import concurrent.futures
import copy
import faulthandler
import heapq
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from lighthouse.forks import Turn, in_each_fork
from torchft_like import devices
from torchft_like.errors import ConfigError
from torchft_like.runtime.background import run_in_background
from torchft_like.runtime.durations import seconds_of

T = TypeVar("T")
WATCHDOG_TIMEOUT_SEC = "TORCHFT_WATCHDOG_TIMEOUT_SEC"

_logger = logging.getLogger(__name__)


def future_timeout(fut: Future[T], timeout: timedelta | float) -> Future[T]:
    """Return a future that completes as `fut` does, or with a TimeoutError once `timeout` has passed.

    `fut` itself is not cancelled, as torch futures cannot be; its later result is dropped.
    """
    timeout_s = seconds_of(timeout, may_be_0=True)
    timed: Future[T] = empty_future()
    first = threading.Lock()  # taken once: the outcome that comes second is dropped

    def expire() -> None:
        if first.acquire(blocking=False):
            fail(timed, _timeout_error(timeout_s))

    def complete(done: Future[T]) -> None:
        timer.cancel()
        if first.acquire(blocking=False):
            copy_outcome(done, timed)

    timer = _TIMERS.call_later(timeout_s, expire)
    fut.add_done_callback(complete)
    return timed


def empty_future() -> Future[Any]:
    """Make a future that may be given tensors of any device that this process uses.

    torch has to know beforehand on which devices the result may be, and before a callback it makes a stream
    on each of them, and with it a context where there was none: half a gigabyte of another rank's GPU.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Future()
    return Future(
        devices=[
            torch.device("cuda", index)
            for index in range(torch.cuda.device_count())
            if torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined] # CUDA builds only
        ]
    )


class _Failed(torch.Tensor):
    """A tensor on which each operation raises an error."""

    _error: BaseException

    @staticmethod
    def of(error: BaseException) -> _Failed:
        """Return such a tensor, without elements."""
        failed: _Failed = torch.Tensor._make_wrapper_subclass(_Failed, (0,))
        failed._error = error
        return failed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise the error."""
        raise without_frames(
            next(leaf._error for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        )


def fail(future: Future[Any], error: Exception) -> None:
    """Complete a future with an error, which waits and callbacks raise, and torch's DDP.

    To torch's own `set_exception` the error is a value that Python raises. C++ takes it for tensors, as DDP
    without a comm hook does, whose process it ended with SIGSEGV. So this value is tensors that raise.

    INVARIANT: the error that a future keeps holds no frame. One that is raised holds those that it went
    through, and these the future and the backend's works; Python's collector sees no cycle through C++.
    """
    kept = without_frames(error)

    def raise_it(_: object) -> None:
        raise without_frames(kept)

    future._set_unwrap_func(raise_it)
    future.set_result([_Failed.of(kept)])


def without_frames(error: BaseException, outer: tuple[BaseException, ...] = ()) -> BaseException:
    """Return a copy of an error, with those of its causes, that holds no frame; one that cannot be copied
    loses its own.

    Args:
        outer: the errors of which it is a cause. One of them may be its own cause, as after `raise e from e`.
    """
    copied = _copy_of(error)
    cause, outer = error.__cause__, (*outer, error)
    if cause is not None:
        cause = None if any(cause is each for each in outer) else without_frames(cause, outer)
    copied.__cause__ = cause
    return copied.with_traceback(None)


def _copy_of(error: BaseException) -> BaseException:
    for make in (copy.copy, _made_anew):
        with suppress(Exception):
            copied = make(error)
            copied.args = error.args  # its class may have made another text of what was one already
            return copied
    return error


def _made_anew(error: BaseException) -> BaseException:
    """Make an error whose class is made of other arguments than it keeps."""
    made = type(error).__new__(type(error), *error.args)
    vars(made).update(vars(error))
    return made


def complete(
    future: concurrent.futures.Future[T], act: Callable[[], T], kept: type[BaseException] = BaseException
) -> concurrent.futures.Future[T]:
    """Give a future what `act` returns or raises, if that is an error of the kind `kept`; return it."""
    try:
        future.set_result(act())
    except kept as error:  # it is raised in the threads that wait
        future.set_exception(error)
    return future


def in_background(name: str, act: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Return the future of what `act` returns or raises on a thread of that name (`run_in_background`)."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    run_in_background(name, complete, future, act)
    return future


def future_wait(fut: Future[T], timeout: timedelta | float) -> T:
    """Wait for `fut` on this thread, and return its result.

    Raises:
        TimeoutError: `fut` is not complete after `timeout`.
        Exception: the error with which `fut` completed.
    """
    timeout_s = seconds_of(timeout, may_be_0=True)
    completed = threading.Event()
    fut.add_done_callback(lambda _: completed.set())
    if not completed.wait(timeout_s):
        raise _timeout_error(timeout_s)
    return fut.wait()


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta | float) -> Iterator[None]:
    """Call `callback`, once, if the block is still running after `timeout`.

    The block is not interrupted: the callback has to end it, for example by aborting a group.
    """
    timer = _TIMERS.call_later(seconds_of(timeout, may_be_0=True), callback)
    try:
        yield
    finally:
        timer.cancel()


def stream_timeout(callback: Callable[[], None], timeout: timedelta | float) -> None:
    """Call `callback`, once, if the work queued so far on the current stream is not done by `timeout`.

    Without an accelerator operations are complete when they return, so the callback is never called.
    """
    timeout_s = seconds_of(timeout, may_be_0=True)
    if not devices.is_in_use():
        return
    _finished_events.clear()
    event = torch.Event()
    event.record()

    device = torch.accelerator.current_device_index()

    def check() -> None:
        with devices.beside_captures(device):
            is_late = not event.query()
        if is_late:
            callback()
        _finished_events.append(event)

    _TIMERS.call_later(timeout_s, check)


# Destroying an event may block while the device queue is full. The next caller of `stream_timeout`, which
# uses the device anyway, does it, not the timer thread, on which all timeouts depend.
_finished_events: deque[torch.Event] = deque()


class Timer:
    """One callback that is due at `deadline` (seconds of the monotonic clock), unless cancelled."""

    def __init__(self, deadline: float, callback: Callable[[], None]) -> None:
        self.deadline = deadline
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Drop the callback; it may already be running or done."""
        self._callback = None

    @property
    def cancelled(self) -> bool:
        """Whether there is no callback left to call."""
        return self._callback is None

    def fire(self) -> None:
        """Call the callback the first time; log an error in it, as no caller could catch it."""
        callback, self._callback = self._callback, None
        if callback is None:
            return
        try:
            callback()
        except Exception:
            _logger.exception("the callback of a timeout failed")


class TimerThread:
    """The heap of timers and the thread that serves it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._swept_size = _SWEEP_SIZE_MIN
        self._thread: threading.Thread | None = None
        self._firing: Timer | None = None

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the timer thread in `delay_s` seconds."""
        timer = Timer(time.monotonic() + delay_s, callback)
        with self._changed:
            self._start()
            self._sweep()
            heapq.heappush(self._heap, (timer.deadline, next(self._sequence), timer))
            if self._heap[0][2] is timer:
                self._changed.notify()
        return timer

    def __len__(self) -> int:
        """Return how many entries the heap has, including cancelled ones that are not swept yet."""
        with self._changed:
            return len(self._heap)

    def _sweep(self) -> None:
        """Drop cancelled entries whenever the heap has doubled: that is a constant cost per entry."""
        if len(self._heap) < self._swept_size:
            return
        self._heap = [entry for entry in self._heap if not entry[2].cancelled]
        heapq.heapify(self._heap)
        self._swept_size = max(_SWEEP_SIZE_MIN, 2 * len(self._heap))

    def forget(self) -> None:
        """Forget the timers and the thread, which are the parent's; runs in a fork."""
        self.__init__()  # type: ignore[misc] # the lock, too: the thread may have held it

    def _start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        limit_s = watchdog_s()
        self._thread = threading.Thread(target=self._run, name="torchft-timer", daemon=True)
        self._thread.start()
        if limit_s is not None:
            threading.Thread(
                target=self._watch, args=(limit_s,), name="torchft-watchdog", daemon=True
            ).start()

    def _run(self) -> None:
        while True:
            self._firing = self._next_due()
            self._firing.fire()
            self._firing = None

    def _watch(self, limit_s: float) -> None:
        """End the process when one callback has run for `limit_s` seconds.

        This counts its looks instead of reading the clock: a process that was stopped has not been stuck.
        """
        seen, looks = None, 0
        while looks < _LOOKS:
            time.sleep(limit_s / _LOOKS)
            now = self._firing
            seen, looks = now, looks + 1 if now is not None and now is seen else 0
        try:
            sys.stderr.write(f"the callback of a timeout ran for {limit_s:g} s ({WATCHDOG_TIMEOUT_SEC})\n")
            faulthandler.dump_traceback()
        finally:  # standard error may be on a full disk
            os._exit(1)

    def _next_due(self) -> Timer:
        with self._changed:
            while True:
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the limit that TORCHFT_WATCHDOG_TIMEOUT_SEC sets, if it is set.

    Raises:
        ConfigError: it is no number of seconds.
    """
    text = environ.get(WATCHDOG_TIMEOUT_SEC)
    if not text:
        return None
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{WATCHDOG_TIMEOUT_SEC} is {text!r:.100}: it must be a number of seconds above 0")
    return limit_s


_SWEEP_SIZE_MIN = 64
_LOOKS = 10
_TIMERS = TimerThread()
in_each_fork(Turn.LOCKS, _TIMERS.forget)


def copy_outcome(source: Future[T], target: Future[T]) -> None:
    """Complete `target` with the result or the error of `source`, which is complete."""
    try:
        result = source.wait()
    except Exception as error:  # noqa: BLE001 - any error is passed on to the waiting thread
        fail(target, error)
    else:
        target.set_result(result)


def _timeout_error(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"future did not complete within {timeout_s:g} s")
