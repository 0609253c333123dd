"""Timeouts: each fires once if it is due, never if it was cancelled, and holds nothing after that."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from tests.faults import raising
from tests.forking import is_so_in_a_fork
from torchft_like import futures
from torchft_like.errors import CollectiveTimeoutError
from torchft_like.futures import (
    WATCHDOG_TIMEOUT_SEC,
    TimerThread,
    context_timeout,
    future_timeout,
    future_wait,
    stream_timeout,
)
from torchft_like.runtime import long_waits
from torchft_like.runtime.long_waits import LONG_WAIT_S, LongWait
from torchft_like.runtime.spin_wait import CROWDED_S, SPIN_S_MAX, AdaptiveSpin
from torchft_like.testing.processes import Processes, RunningProcess

SOON = timedelta(milliseconds=10)
LATE = timedelta(seconds=60)
LIMIT_S = 30.0
OF_A_TEST: Any = SimpleNamespace(endings=())  # what a call is over


def wait_for(event: threading.Event) -> None:
    assert event.wait(LIMIT_S), "the event did not come"


class TestFutureTimeout:
    @pytest.mark.parametrize("is_complete_before", [False, True])
    def test_a_result_or_an_error_in_time_is_handed_on(self, is_complete_before: bool) -> None:
        good, bad = Future[int](), Future[int]()
        if not is_complete_before:
            timed = future_timeout(good, LATE), future_timeout(bad, LATE)
        good.set_result(3)
        bad.set_exception(RuntimeError("peer gone"))  # type: ignore[arg-type]
        if is_complete_before:
            timed = future_timeout(good, LATE), future_timeout(bad, LATE)
        assert timed[0].wait() == 3
        with pytest.raises(RuntimeError, match="peer gone"):
            timed[1].wait()

    def test_a_future_that_does_not_complete_in_time_times_out_and_a_late_result_is_dropped(self) -> None:
        fut: Future[int] = Future()
        timed = future_timeout(fut, SOON)
        with pytest.raises(TimeoutError, match=r"future did not complete within 0\.01 s"):
            timed.wait()
        fut.set_result(1)
        with pytest.raises(TimeoutError):
            timed.wait()

    def test_a_race_of_result_and_timeout_has_one_winner(self) -> None:
        for _ in range(200):
            fut: Future[int] = Future()
            timed = future_timeout(fut, timedelta(microseconds=50))
            fut.set_result(1)
            with contextlib.suppress(TimeoutError):
                assert timed.wait() == 1


def test_a_wait_returns_the_result_or_raises_the_error_or_a_timeout() -> None:
    good, bad = Future[int](), Future[int]()
    threading.Thread(target=good.set_result, args=(5,)).start()
    assert future_wait(good, LATE) == 5
    bad.set_exception(ValueError("bad"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bad"):
        future_wait(bad, LATE)
    with pytest.raises(TimeoutError, match="future did not complete"):
        future_wait(Future[int](), SOON)


class OfTwo(Exception):  # noqa: N818 - an error as a script may define it
    """An error that `copy.copy` cannot copy, as its class is made of other arguments than it keeps."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank


@pytest.mark.parametrize(
    "made_anew", [lambda: CollectiveTimeoutError(1.0, [1], {}), lambda: OfTwo(1, "did not come")]
)
def test_a_failed_future_keeps_nothing_of_those_that_its_error_was_raised_to(
    made_anew: Callable[[], Exception],
) -> None:
    class Held:
        """An object of a caller."""

    def wait(held: Held, *futures: Future[Any]) -> weakref.ref[Held]:
        for future in futures:
            with pytest.raises(type(made_anew()), match="rank 1 did not come") as caught:
                future.wait()
            assert str(caught.value.__cause__) == "why"
            assert vars(caught.value) == vars(made_anew())
        with pytest.raises(type(made_anew())):
            futures[0].value()
        return weakref.ref(held)

    def failed() -> Future[Any]:
        held, future = Held(), Future[Any]()
        try:
            raise ValueError("why")
        except ValueError as why:
            try:
                raise made_anew() from why
            except Exception as error:  # noqa: BLE001 - of the class that is asked for
                futures.fail(future, error)
        made.append(weakref.ref(held))
        return future

    made: list[weakref.ref[Held]] = []
    first = failed()
    passed_on: Future[Any] = Future()
    first.add_done_callback(lambda done: futures.copy_outcome(done, passed_on))
    made.append(wait(Held(), first, passed_on))
    gc.collect()  # pytest's own cycles
    assert [held() for held in made] == [None, None]


def test_a_failed_future_raises_its_error_as_it_was() -> None:
    class OfAFile(Exception):  # noqa: N818 - an error as a script may define it
        def __init__(self, name: str) -> None:
            super().__init__(f"cannot read {name}")

    future = Future[Any]()
    futures.fail(future, OfAFile("data.bin"))
    for _ in range(2):
        with pytest.raises(OfAFile, match=r"^cannot read data\.bin$"):
            future.wait()


def test_an_error_that_is_a_cause_of_itself_fails_a_future() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    future = Future[Any]()
    futures.fail(future, first)
    with pytest.raises(ValueError, match="first") as caught:
        future.wait()
    assert repr(caught.value.__cause__) == "KeyError('second')"


class TestContextTimeout:
    def test_a_block_that_takes_too_long_is_told(self) -> None:
        told = threading.Event()
        with context_timeout(told.set, SOON):
            assert told.wait(LIMIT_S)

    def test_a_block_that_ends_in_time_is_never_told(self) -> None:
        told, is_over = list[bool](), False
        with context_timeout(lambda: told.append(is_over), timedelta(milliseconds=200)):
            pass  # in time, unless the machine is busy
        is_over = True
        later = threading.Event()
        with context_timeout(later.set, timedelta(milliseconds=300)):
            wait_for(later)  # the timer thread has been past the first deadline
        assert True not in told

    def test_the_timeout_ends_with_a_block_that_raises(self) -> None:
        before = len(futures._TIMERS)
        with pytest.raises(KeyError), context_timeout(lambda: None, LATE):
            raise KeyError
        assert len(futures._TIMERS) <= before + 1

    def test_an_error_in_a_callback_stops_no_timeouts(self, caplog: pytest.LogCaptureFixture) -> None:
        told = threading.Event()
        with (
            caplog.at_level(logging.ERROR),
            context_timeout(raising(RuntimeError("the callback is broken")), SOON),
            context_timeout(told.set, timedelta(milliseconds=50)),
        ):
            wait_for(told)
        assert "the callback is broken" in caplog.text


class TestTimerThread:
    def test_a_cancelled_timer_lets_go_of_its_callback_at_once(self) -> None:
        class Held:
            def call(self) -> None: ...

        held = Held()
        reference = weakref.ref(held)
        timer = TimerThread().call_later(LATE.total_seconds(), held.call)
        del held
        timer.cancel()
        gc.collect()
        assert reference() is None

    def test_cancelled_timers_do_not_pile_up(self) -> None:
        timers = TimerThread()
        for _ in range(10_000):
            timers.call_later(LATE.total_seconds(), lambda: None).cancel()
        assert len(timers) < 200

    def test_a_timer_beyond_all_time_is_accepted(self) -> None:
        timers = TimerThread()
        told = threading.Event()
        timers.call_later(timedelta.max.total_seconds(), lambda: None)
        timers.call_later(0.01, told.set)
        assert told.wait(LIMIT_S)


class TestStreamTimeout:
    @pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is present")
    def test_without_an_accelerator_there_is_nothing_to_wait_for(self) -> None:
        before = len(futures._TIMERS)
        stream_timeout(lambda: pytest.fail("called"), SOON)
        assert len(futures._TIMERS) == before


# TORCHFT_WATCHDOG_TIMEOUT_SEC: a process in which no timeout works any more ends, and no other does.


PROGRAM = """
import threading, time
from datetime import timedelta
from torchft_like.futures import context_timeout
blocks = {blocks}
done = threading.Event()
def callback():
    done.set()
    if blocks:
        time.sleep(600)
with context_timeout(callback, timedelta(seconds=0.01)):
    done.wait()
{then}
"""


Run = Callable[[str, str | None, bool], RunningProcess]


@pytest.fixture
def run(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program to its end, with a limit or without."""
    monkeypatch.delenv(WATCHDOG_TIMEOUT_SEC, raising=False)
    script = tmp_path / "program.py"

    def run(then: str, limit: str | None, blocks: bool) -> RunningProcess:
        script.write_text(PROGRAM.format(then=then, blocks=blocks))
        done = processes.fork(str(script), env={} if limit is None else {WATCHDOG_TIMEOUT_SEC: limit})
        done.wait()
        return done

    return run


def test_a_callback_that_does_not_return_ends_the_process(run: Run) -> None:
    done = run("time.sleep(600)", "0.5", True)
    assert done.exit_code == 1
    assert "the callback of a timeout ran for 0.5 s (TORCHFT_WATCHDOG_TIMEOUT_SEC)" in done.output
    assert "in callback" in done.output


def test_it_ends_as_well_where_nothing_can_be_written(run: Run) -> None:
    full = "import sys; sys.stderr = open('/dev/full', 'w', buffering=1)"
    assert run(f"{full}; time.sleep(600)", "0.5", True).exit_code == 1


@pytest.mark.parametrize(("limit", "blocks"), [("0.2", False), (None, True), ("", True)])
def test_others_go_on(run: Run, limit: str | None, blocks: bool) -> None:
    assert run("time.sleep(1); print('went on')", limit, blocks).output == "went on\n"


@pytest.mark.parametrize("limit", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_an_error(run: Run, limit: str) -> None:
    assert f"TORCHFT_WATCHDOG_TIMEOUT_SEC is '{limit}': it must be" in run("", limit, False).output


# Long waits: which lines they log, and what a fork takes over of those of its parent.


def test_a_line_is_due_once_in_every_minute_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    wait = LongWait(1000.0)
    with caplog.at_level(logging.INFO):
        for second in range(0, 200, 5):
            wait.look(1000.0 + second, lambda: "rank 1, for rank 0")
    assert caplog.messages == [f"waiting for {n * LONG_WAIT_S:.0f} s: rank 1, for rank 0" for n in (1, 2, 3)]


def test_nothing_is_said_of_a_wait_that_may_be_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LongWait(0.0, is_expected=True).look(1e9, lambda: "rank 1")
    assert caplog.messages == []


def test_a_call_is_told_of_until_it_has_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: dict[object, tuple[float, str, long_waits.Group]] = {}
    monkeypatch.setattr(long_waits, "calls", calls)
    watch = long_waits._Watch()
    with caplog.at_level(logging.INFO):
        calls["old"], calls["new"] = (0.0, "recv", OF_A_TEST), (float("inf"), "send", OF_A_TEST)
        watch._look()
        del calls["old"]
        watch._look()
    assert [text.partition(": ")[2] for text in caplog.messages] == [f"recv over {OF_A_TEST}"]
    assert set(watch._waits) == {"new"}


def test_a_fork_has_none_of_its_parents_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_waits._watch, "_has_begun", True)
    monkeypatch.setitem(long_waits.calls, "a test's", (0.0, "recv", OF_A_TEST))
    assert is_so_in_a_fork(lambda: not long_waits.calls and not long_waits._watch._has_begun)


def test_a_fork_may_limit_a_wait_whatever_its_parents_timers_did() -> None:
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with futures._TIMERS._changed:  # as the thread that waits for the next timer does for moments
            is_held.set()
            is_over.wait(LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(LIMIT_S)
    assert is_so_in_a_fork(lambda: futures._TIMERS._changed.acquire(blocking=False))
    is_over.set()
    holder.join()


# When it is worth while to watch for what is awaited.


def test_who_was_answered_soon_watches_and_who_was_not_sleeps() -> None:
    patience = AdaptiveSpin()
    assert patience.spin_s() == SPIN_S_MAX
    patience.learn(1.0)
    patience.learn(1.0)
    assert patience.spin_s() == 0.0
    for _ in range(10):
        patience.learn(SPIN_S_MAX / 10)
    assert patience.spin_s() == SPIN_S_MAX


def test_where_others_need_the_core_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, moment = AdaptiveSpin(), itertools.count(0.0, 2 * CROWDED_S)  # each look comes late
    monkeypatch.setattr("torchft_like.runtime.spin_wait.time.monotonic", moment.__next__)
    assert not patience.watch(lambda: False, math.inf)
    assert patience.spin_s() == 0.0
    for _ in range(20):
        patience.learn(10e-6)
    assert patience.spin_s() == SPIN_S_MAX  # it tries again


def test_watching_ends_with_what_is_awaited_or_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, looks = itertools.count(0.0, CROWDED_S / 10), iter([False, False, True])
    monkeypatch.setattr("torchft_like.runtime.spin_wait.time.monotonic", moment.__next__)
    assert AdaptiveSpin().watch(lambda: next(looks), math.inf)
    assert not AdaptiveSpin().watch(lambda: False, next(moment) + CROWDED_S)
    assert not AdaptiveSpin().watch(lambda: False, math.inf)


def test_one_long_wait_among_short_ones_is_forgotten() -> None:
    patience = AdaptiveSpin()
    patience.learn(3600.0)
    for _ in range(8):
        patience.learn(10e-6)
    assert patience.spin_s() == SPIN_S_MAX
