"""Timeouts: each fires once if it is due, never if it was cancelled, and holds nothing after that."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from datetime import timedelta

import pytest
import torch
from torch.futures import Future

from torchft_like import futures
from torchft_like.futures import TimerThread, context_timeout, future_timeout, future_wait, stream_timeout

SOON = timedelta(milliseconds=10)
LATE = timedelta(seconds=60)
LIMIT_S = 30.0

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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
        def fail() -> None:
            raise RuntimeError("the callback is broken")

        told = threading.Event()
        with (
            caplog.at_level(logging.ERROR),
            context_timeout(fail, SOON),
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

    @pytest.mark.gpu
    @needs_cuda
    def test_work_that_is_done_in_time_is_not_reported(self) -> None:
        told: list[str] = []
        stream_timeout(lambda: told.append("late"), timedelta(milliseconds=100))
        torch.cuda.synchronize()
        later = threading.Event()
        with context_timeout(later.set, timedelta(milliseconds=200)):
            wait_for(later)
        assert told == []

    @pytest.mark.gpu
    @needs_cuda
    def test_work_that_takes_too_long_is_reported(self) -> None:
        told = threading.Event()
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call] # clock cycles: some seconds
        stream_timeout(told.set, SOON)
        assert told.wait(LIMIT_S)
        torch.cuda.synchronize()
