"""The watch over operations of a device, with operations that the test ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.process_group.conftest import LIMIT_S, wait_until
from torchft_like.process_group import nccl
from torchft_like.process_group.nccl import DeviceWatch, IsOver, Watched


class Operation:
    """On a device that exists only here."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None

    def is_over(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def settle(self) -> IsOver:
        return self.is_over


class Device:
    """A watch, and what it has given up for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.gave_up = threading.Event()
        self.watch = DeviceWatch(lambda: None, self.give_up)

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)
        self.gave_up.set()

    def start(self, operation: Operation, name: str = "allreduce", limit_s: float = LIMIT_S) -> Watched:
        return self.watch.watch(name, operation.is_over, operation.settle, limit_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(nccl, "PERIOD_S", 0.005)
    device = Device()
    yield device
    device.watch.close()


def test_shorter_limit_behind_a_longer_one_counts(device: Device) -> None:
    device.start(Operation(), "allreduce")
    device.start(Operation(), "barrier", limit_s=0.02)
    wait_until(device.gave_up)
    assert device.reasons == ["barrier was not done within 0.02 s"]


def test_late_operation_that_is_done_is_no_failure(device: Device) -> None:
    operation = Operation()
    operation.done = True
    device.start(operation, limit_s=1e-9)
    device.watch.look()
    assert device.reasons == []


def test_failed_device_ends_the_generation(device: Device) -> None:
    operation = Operation()
    device.start(operation)
    operation.error = RuntimeError("an illegal memory access was encountered")
    wait_until(device.gave_up)
    assert device.reasons == [
        "the device or its communicator failed: an illegal memory access was encountered"
    ]


def test_nothing_under_way_means_nothing_is_asked() -> None:
    asked = threading.Event()
    threads = set(threading.enumerate())
    watch = DeviceWatch(asked.set, lambda reason: None)
    watch.close()
    assert not asked.is_set()
    assert set(threading.enumerate()) <= threads


def test_what_the_end_has_decided_stays_decided(device: Device) -> None:
    done, running = Operation(), Operation()
    done.done = True
    first, second = device.start(done, "allreduce"), device.start(running, "broadcast")
    device.watch.cut_off()
    done.error = RuntimeError("the communicator is being aborted: do not ask")
    device.watch.cut_off()
    running.done = True
    device.watch.look()
    assert first.is_over()
    assert [first.was_cut_off, second.was_cut_off] == [False, True]
    assert device.watch.cut_off_operations() == ("broadcast",)


def test_end_does_not_give_up_again(device: Device) -> None:
    device.watch.close()  # no thread looks before the end
    device.start(Operation(), limit_s=1e-9)
    device.watch.cut_off()
    device.watch.look()
    assert device.reasons == []


@pytest.mark.no_zombie
def test_operation_started_after_the_end_is_cut_off(device: Device) -> None:
    device.watch.cut_off()
    operation = Operation()
    operation.done = True
    assert device.start(operation, "reduce").was_cut_off
    assert device.watch.cut_off_operations() == ("reduce",)


def test_device_that_fails_at_the_end_is_idle(device: Device) -> None:
    operation = Operation()
    operation.settle = lambda: (_ for _ in ()).throw(RuntimeError("dead"))  # type: ignore[method-assign]
    watched = device.start(operation)
    device.watch.cut_off()
    device.watch.settle()
    assert watched.was_cut_off
    assert device.watch.is_idle()


def test_late_operation_is_found_behind_one_that_is_over_and_had_less_time(device: Device) -> None:
    device.watch.close()  # no thread looks before that one is over
    done = Operation()
    device.start(Operation(), "barrier", limit_s=2e-9)
    device.start(done, "send", limit_s=1e-9)
    done.done = True
    device.watch.look()
    assert device.reasons == ["barrier was not done within 2e-09 s"]


@pytest.mark.parametrize("count", [200, 800])
def test_what_an_operation_costs_does_not_depend_on_how_many_there_are(count: int) -> None:
    watch = DeviceWatch(lambda: None, lambda reason: None)
    watch.close()  # no thread: what is counted happens here
    operations = [Operation() for _ in range(count)]
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_call)
    try:
        for operation in operations:
            watch.watch("allreduce", operation.is_over, operation.settle, LIMIT_S)
            operation.done = True
        watch.look()
    finally:
        sys.setprofile(None)
    assert watch.is_idle()
    assert calls < 50 * count


def test_the_watch_rests_while_it_drops_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the issuing thread would wait for the GIL until all are dropped."""
    rests: list[int] = []
    watch = DeviceWatch(lambda: None, lambda reason: None)
    watch.close()
    operations = [Operation() for _ in range(100)]
    for operation in operations:
        watch.watch("allreduce", operation.is_over, operation.settle, LIMIT_S)
        operation.done = True
    monkeypatch.setattr(time, "sleep", lambda _: rests.append(sum(map(len, watch._under_way.values()))))
    watch.look(nccl.REST_S)
    assert rests == [84, 68, 52, 36, 20, 4]
