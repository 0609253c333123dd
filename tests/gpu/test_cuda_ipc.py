"""Memory and order of one GPU between a trainer and a subprocess, with real processes and real kills."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.ipc_child import Child
from tests.waiting import LIMIT_S
from torchft_like.shared_memory import TorchCuda
from torchft_like.testing.processes import Processes

LONG_CYCLES = 3_000_000_000  # more than a second of a GPU
MEBIBYTE = 1 << 20


@pytest.fixture
def child() -> Iterator[Child]:
    """Both sides have run each kernel once: loading one waits for the device."""
    child = Child.start()
    tensor = torch.zeros(10, device="cuda").fill_(1.0) * 2
    child.done_events.wait(child.add(tensor, 0.0, cycles=1), torch.cuda.current_stream())
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    yield child
    child.kill()
    child.release()


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def test_torch_ignores_a_counter_that_does_not_exist() -> None:
    TorchCuda().decrement(b"/torchft-nobody-counts-here", 0)
    assert not Path("/dev/shm/torchft-nobody-counts-here").exists()


def test_subprocess_writes_to_the_trainers_memory(child: Child) -> None:
    tensor = torch.ones(1000, device="cuda")
    for value in range(3):
        child.done_events.wait(child.add(tensor, value), torch.cuda.current_stream())
    assert tensor.tolist() == [4.0] * 1000


def test_view_is_the_same_memory_and_mapped_once(child: Child) -> None:
    tensor = torch.zeros(100, device="cuda")
    number = child.map(tensor)
    assert child.map(tensor[50:]) == number


def test_both_sides_are_ordered_by_the_device_and_neither_thread_waits(child: Child) -> None:
    tensor = torch.zeros(1000, device="cuda")
    child.map(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    is_past = TorchCuda().mark(torch.cuda.current_stream())
    tensor.fill_(1.0)
    done = child.add(tensor, 1.0, LONG_CYCLES)
    child.done_events.wait(done, torch.cuda.current_stream())
    doubled = tensor * 2
    assert not is_past(), "somebody has waited for the device"
    assert not child.done_events.is_over(done)
    assert doubled.tolist() == [4.0] * 1000


def test_each_stream_has_its_own_order(child: Child) -> None:
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensors = [torch.zeros(10, device="cuda") for _ in range(2)]
    for tensor in tensors:
        child.map(tensor)
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        slow_done = child.add(tensors[0], 1.0, LONG_CYCLES)
    with torch.cuda.stream(fast):
        child.done_events.wait(child.add(tensors[1], 2.0), fast)
    fast.synchronize()
    assert not child.done_events.is_over(slow_done)
    assert tensors[1].tolist() == [2.0] * 10
    child.done_events.wait(slow_done, torch.cuda.current_stream())
    assert tensors[0].tolist() == [1.0] * 10


def test_a_thousand_operations_need_few_events(child: Child) -> None:
    """As many as are under way at once."""
    tensor = torch.zeros(10, device="cuda")
    stream = torch.cuda.current_stream()
    for number in range(1000):
        child.done_events.wait(child.add(tensor, 1.0), stream)
        if number % 20 == 0:
            torch.cuda.synchronize()
    assert tensor.tolist() == [1000.0] * 10
    assert len(child.events._events) < 100


def test_killed_subprocess_loses_no_memory() -> None:
    before = allocated()
    for _ in range(5):
        child = Child.start()
        tensor = torch.zeros(8 * MEBIBYTE, device="cuda")
        child.add(tensor, 1.0, LONG_CYCLES)
        child.kill()
        del tensor
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        assert allocated() >= before + 32 * MEBIBYTE, "torch got it back by itself: this tests nothing"
        child.release()
        assert allocated() <= before


def test_memory_survives_the_subprocess_and_is_told_to_the_next() -> None:
    before = allocated()
    tensor = torch.zeros(8 * MEBIBYTE, device="cuda")
    first = Child.start()
    first.done_events.wait(first.add(tensor, 1.0), torch.cuda.current_stream())
    torch.cuda.synchronize()
    first.kill()
    second = Child.start(first.exports)
    try:
        second.done_events.wait(second.add(tensor, 1.0), torch.cuda.current_stream())
        assert tensor[:3].tolist() == [2.0] * 3
    finally:
        second.kill()
    second.release()
    del tensor
    assert allocated() <= before


def test_trainers_stream_goes_on_when_the_subprocess_is_killed(processes: Processes) -> None:
    """Its stream waits for an event of a process that will never get there.

    In a process of its own: should the driver let the stream wait for ever, nothing else can be done
    with the device in that process.
    """
    trainer = processes.start(sys.executable, "-m", "tests.gpu.killed_in_an_operation")
    assert trainer.wait(LIMIT_S) == 0
    assert trainer.output.splitlines()[-2:] == ["the stream waits", "the stream has gone on"]
