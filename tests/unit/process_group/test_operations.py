"""Operations that a backend forgets are given up, and only when that is safe."""

from __future__ import annotations

import _thread
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import Work

from lighthouse.address import Address
from tests.unit.process_group.failing import Promise
from tests.waiting import wait_for
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError
from torchft_like.manager import managed_work
from torchft_like.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupDummy
from torchft_like.process_group import generation as generation_module
from torchft_like.process_group.collectives import BY_NAME
from torchft_like.process_group.generation import ISSUED_MIN, Generation, GroupOperation, Operations
from torchft_like.process_group.gloo import ThreadWatch
from torchft_like.process_group.store import GroupMembers, StoreAddress
from torchft_like.process_group.swallowing import SwallowedOperation
from torchft_like.process_group.work import DeferredOperation, Explain, FinishedOperation, JointOperation
from torchft_like.runtime.long_waits import oldest_call

LIMIT_S = 30.0
ABORTED = ProcessGroupAbortedError("lost b")
AS_IT_IS: Explain = lambda _: None  # noqa: E731


def begun(operations: Operations, work: Work) -> GroupOperation:
    """An operation that the backend has been given."""
    operation = operations.begin(AS_IT_IS)
    operation.inner = work
    return operation


def test_a_forgotten_future_is_given_up_once_the_backend_is_still() -> None:
    operations, backend, looks = Operations(), Promise(), iter([False, False, True])
    own = operations.follow(backend)
    operations.give_up(lambda: next(looks), ABORTED)
    with pytest.raises(ProcessGroupAbortedError, match="lost b"):
        own.wait()
    backend.future.set_result([torch.ones(1)])
    with pytest.raises(ProcessGroupAbortedError, match="lost b"):
        own.wait()


def test_a_backend_that_still_works_keeps_its_operations() -> None:
    """It may write into the tensors yet; what it brings while it is watched is the result."""
    operations, backend = Operations(), Promise()
    own = operations.follow(backend)

    def is_still() -> bool:
        backend.future.set_result([torch.full((1,), 7.0)])
        return False

    operations.give_up(is_still, ABORTED)
    assert own.value()[0].item() == 7.0


def test_a_wait_of_many_slices_returns_what_the_work_does() -> None:
    operations, work = Operations(), Promise()
    timer = threading.Timer(0.6, work.future.set_result, [[]])
    timer.start()
    assert operations.wait(work, time.monotonic() + LIMIT_S)
    timer.join()


def test_a_wait_keeps_its_own_timeout() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        Operations().wait(Promise(), time.monotonic() + 0.3)


def test_what_is_not_awaited_yet_is_given_up_only_when_the_backend_is_still() -> None:
    """Whoever holds the work may come later, and must not be told that it is over too early."""
    operations, work, looks = Operations(), Promise(), iter([False, False, True])
    held = begun(operations, work)
    operations.give_up(lambda: next(looks), ABORTED)
    assert next(looks, None) is None, "three looks were taken"
    with pytest.raises(ProcessGroupAbortedError):
        held.wait()


def test_works_that_are_done_or_dropped_are_not_remembered() -> None:
    operations, done, held = Operations(), Promise(), list[GroupOperation]()
    done.future.set_result([])
    for _ in range(1000):
        held.append(begun(operations, done))
        begun(operations, Promise())
    assert len(operations._issued) < 300
    operations.give_up(lambda: pytest.fail("looked"), ABORTED)


def test_nothing_is_looked_at_when_nothing_is_awaited() -> None:
    operations = Operations()
    operations.give_up(lambda: pytest.fail("looked"), ABORTED)
    own = operations.follow(Promise())
    with pytest.raises(ProcessGroupAbortedError):
        own.wait()


def test_a_backend_that_never_seems_to_rest_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits and futures alike: it may be another group's threads that are busy."""
    monkeypatch.setattr("torchft_like.process_group.generation.LOOKS_S_MAX", 0.1)
    operations, work = Operations(), Promise()
    held = begun(operations, work)
    own = operations.follow(Promise())
    operations.give_up(lambda: False, ABORTED)
    with pytest.raises(ProcessGroupAbortedError):
        own.wait()
    with pytest.raises(ProcessGroupAbortedError):
        held.wait()


def test_a_work_that_was_given_up_is_over_for_whoever_asks() -> None:
    operations = Operations()
    work = begun(operations, Promise())
    assert not work.is_completed()
    assert work.exception() is None
    operations.give_up(lambda: True, ABORTED)
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is ABORTED


def test_the_outputs_of_a_swallowed_work_that_was_given_up_are_defined_when_its_future_is_done() -> None:
    operations = Operations()
    inner = begun(operations, Promise())
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy(0, 1))
    outputs, inputs = [[torch.full((2,), 9.0)]], [torch.ones(2)]
    call = BY_NAME["allgather"].bind((outputs, inputs), {})
    swallowed = SwallowedOperation(inner, lambda: call, group, group.configuration, "allgather")
    done = swallowed.get_future()
    operations.give_up(lambda: True, ABORTED)
    done.wait()
    assert swallowed.is_completed()
    assert [tensor.tolist() for tensor in outputs[0]] == [[1.0, 1.0]]


def test_a_swallowed_operation_is_a_call_under_way_while_a_thread_waits_for_it() -> None:
    promise, group = Promise(), ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy(0, 1))
    call = BY_NAME["broadcast"].bind(([torch.ones(1)],), {})
    inner, configuration = begun(Operations(), promise), group.configuration
    swallowed = SwallowedOperation(inner, lambda: call, group, configuration, "broadcast")
    assert oldest_call(configuration) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(swallowed.wait)
        wait_for(lambda: oldest_call(configuration) is swallowed)
        promise.future.set_result([])
        assert waiting.result(LIMIT_S)
    assert oldest_call(configuration) is None


def test_what_one_operation_has_left_to_do_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A division, here; two jobs' Managers in one process have nothing to do with each other."""
    begun_to_divide, may_end = threading.Event(), threading.Event()

    def divide(_: object, divisor: int) -> None:
        if divisor == 2:
            begun_to_divide.set()
            assert may_end.wait(LIMIT_S)

    monkeypatch.setattr(managed_work, "divide", divide)

    def fail(error: Exception) -> None:
        pytest.fail(str(error))

    slow, other = (managed_work.Reduction([torch.ones(1)], divisor, fail) for divisor in (2, 3))
    for reduction in (slow, other):
        reduction.follow(FinishedOperation([]))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(slow.wait)
        assert begun_to_divide.wait(LIMIT_S)
        again = pool.submit(slow.wait)
        pool.submit(other.wait).result(LIMIT_S / 3)
        assert not first.done()
        assert not again.done(), "who waits for the slow one waits until it is divided"
        may_end.set()
        first.result(LIMIT_S)
        again.result(LIMIT_S)


class TestThreadWatch:
    """The name of a thread is the kernel's, so the test names its own through /proc."""

    def test_a_thread_of_python_with_the_name_of_the_one_that_started_it_is_not_watched(self) -> None:
        name = "still-python"

        def look() -> list[bool]:
            with open("/proc/thread-self/comm", "w") as comm:
                comm.write(name)
            watch = ThreadWatch(name)
            return [watch.have_slept_since() for _ in range(2)]

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(look).result(LIMIT_S) == [True, True]

    def test_a_thread_that_sleeps_is_still_and_one_that_ran_is_not(self) -> None:
        begin, end, name = threading.Semaphore(0), threading.Event(), "still-test"
        beats = threading.Semaphore(0)

        def run() -> None:
            with open("/proc/thread-self/comm", "w") as comm:
                comm.write(name)
            beats.release()
            while begin.acquire() and not end.is_set():
                beats.release()

        _thread.start_new_thread(run, ())  # unknown to `threading`, as native ones are
        try:
            beats.acquire()
            watch = ThreadWatch(name)
            wait_for(watch.have_slept_since)
            begin.release()
            beats.acquire()
            assert not watch.have_slept_since()
        finally:
            end.set()
            begin.release()


def test_an_operation_that_the_backend_gets_in_a_moment_is_not_forgotten() -> None:
    operations = Operations()
    held = [operations.begin(AS_IT_IS) for _ in range(ISSUED_MIN + 1)]
    held[-1].inner = Promise()
    looks = iter([False, True])
    operations.give_up(lambda: next(looks), ABORTED)
    assert next(looks, None) is None, "it was looked whether the backend is done with it"


class Still:
    """A backend that has forgotten its operation, and touches nothing once its connections are broken."""

    rest_s_max = None

    def __init__(self, is_still: bool) -> None:
        self.broken, self._is_still, self.looks = threading.Event(), is_still, 0

    def methods(self) -> dict[str, object]:
        return {}

    def break_off(self) -> None:
        self.broken.set()

    def out_of_reach(self, store: object = None) -> str:
        return ""

    def is_still(self) -> bool:
        self.looks += 1
        return self._is_still and self.broken.is_set()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_still", [True, False])
def test_what_a_backend_has_forgotten_ends_with_the_error_of_the_group_where_that_is_safe(
    monkeypatch: pytest.MonkeyPatch, is_still: bool
) -> None:
    monkeypatch.setattr(generation_module, "LOOKS_S_MAX", 30.0 if is_still else 0.1)
    store = StoreAddress(Address("127.0.0.1", 1), "unused")
    members = GroupMembers(store, 0, 2, timedelta(seconds=LIMIT_S))
    backend: Any = Still(is_still)
    generation = Generation(members)
    generation.make(lambda *_: backend)
    own = generation.operations.follow(promise := Promise())
    generation.fail(RuntimeError("a peer is gone"))
    if is_still:
        with pytest.raises(RuntimeError, match="a peer is gone"):
            own.wait()
        assert backend.looks
    else:
        promise.future.set_result([torch.ones(1)])
        assert own.wait()[0].item() == 1.0
    generation.end("over")
    assert generation.wait_gone(LIMIT_S)


def test_a_callback_that_waits_does_not_hold_up_the_thread_that_begins_operations() -> None:
    """torch's powerSGD hook waits in a callback for the next collective, which that thread has to begin."""
    first, second = DeferredOperation(), DeferredOperation()
    reached = first.get_future().then(lambda _: second.wait(timedelta(seconds=LIMIT_S)))
    first.follow(FinishedOperation([]))
    second.follow(FinishedOperation([]))
    assert reached.wait() is True


@pytest.mark.agreement
def test_a_result_that_ctrl_c_leaves_half_done_is_not_completed_again() -> None:
    """A sum might be divided twice."""
    begun = list[str]()

    def finish() -> list[torch.Tensor]:
        begun.append("divides")
        raise KeyboardInterrupt

    operation = JointOperation([FinishedOperation([])], finish, waits=True)
    with pytest.raises(KeyboardInterrupt):
        operation.wait()
    with pytest.raises(ProcessGroupError, match="interrupted"):
        operation.wait()
    assert begun == ["divides"]
