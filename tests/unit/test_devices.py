"""What this library does beside a thread that captures a CUDA graph; torch.cuda and CUDA are stand-ins.

Whether CUDA then leaves captures alone is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from tests.unit.process_group.conftest import LIMIT_S, wait_until
from torchft_like import devices, futures, utils
from torchft_like.devices import THREAD_LOCAL, beside_captures
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.quorum_driver import QuorumWorker
from torchft_like.process_group import work
from torchft_like.process_group.work import DeferredOperation, FinishedOperation
from torchft_like.utils import get_stream_context, synchronize
from torchft_like.writing import divide, share_memory

GLOBAL = 0


class Gpu:
    """The devices and capture modes of this process's threads, and events that ask for them."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.is_initialized = True
        self.code = 0
        self.asked_in: list[tuple[str, int, int]] = []  # thread, device, mode
        self.asked = threading.Event()

    @property
    def mode(self) -> int:
        return getattr(self.threads, "mode", GLOBAL)

    @property
    def device(self) -> int:
        return getattr(self.threads, "device", 0)

    def exchange(self, pointer: Any) -> int:
        if self.code == 0:
            value = pointer._obj
            value.value, self.threads.mode = self.mode, value.value
        return self.code

    @contextlib.contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.threads.device = self.device, index
        yield
        self.threads.device = before

    def ask(self) -> None:
        self.asked_in.append((threading.current_thread().name, self.device, self.mode))
        self.asked.set()


class Event:
    gpu: Gpu

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        self.gpu.ask()
        return True

    def synchronize(self) -> None:
        self.gpu.ask()


class Stream:
    def record_event(self) -> Event:
        return Event()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(Event, "gpu", gpu, raising=False)
    monkeypatch.setattr(devices, "_exchange_function", lambda: gpu.exchange)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu.is_initialized)
    for name, value in {
        "current_accelerator": lambda: torch.device("cuda"),
        "is_available": lambda: True,
        "current_device_index": lambda: 3,
        "current_stream": Stream,
        "device_index": gpu.device_index,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    return gpu


def test_the_thread_is_in_another_mode_and_on_the_device_for_the_time_of_the_block(gpu: Gpu) -> None:
    with beside_captures(torch.device("cuda", 2)):
        assert (gpu.mode, gpu.device) == (THREAD_LOCAL, 2)
        with beside_captures(5):
            assert (gpu.mode, gpu.device) == (THREAD_LOCAL, 5)
        assert (gpu.mode, gpu.device) == (THREAD_LOCAL, 2)
    assert (gpu.mode, gpu.device) == (GLOBAL, 0)


def test_an_error_leaves_the_thread_as_it_was(gpu: Gpu) -> None:
    with contextlib.suppress(KeyError), beside_captures(1):
        raise KeyError
    assert gpu.mode == GLOBAL


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_without_a_device_nothing_changes(gpu: Gpu, device: torch.device | None) -> None:
    with beside_captures(device):
        assert gpu.mode == GLOBAL


def test_a_process_without_use_of_its_gpu_asks_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.is_initialized = False
    for name in ("current_stream", "current_device_index", "device_index", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: pytest.fail("a context would be made"))
    assert not devices.is_in_use()
    with beside_captures(0):
        pass
    attempt = Attempt(True, LIMIT_S)
    attempt.synchronize()
    utils.synchronize()
    futures.stream_timeout(lambda: pytest.fail("nothing runs"), timedelta(0))


def test_a_device_that_cannot_be_asked_is_no_error(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.code = 719
    with caplog.at_level(logging.WARNING), beside_captures(0):
        pass
    assert "CUDA error 719" in caplog.text


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA runtime")
def test_the_function_is_in_the_library_that_torch_has_loaded() -> None:
    exchange = devices._exchange_function()
    assert exchange is not None
    if not torch.cuda.is_available():
        assert exchange(ctypes.byref(ctypes.c_int(THREAD_LOCAL))) != 0


def test_the_quorum_worker_works_beside_captures(gpu: Gpu) -> None:
    worker, attempt = QuorumWorker(), Attempt(True, LIMIT_S)
    worker.device = attempt.device
    worker.submit(gpu.ask)
    wait_until(gpu.asked)
    worker.stop(LIMIT_S)
    assert gpu.asked_in == [("torchft-quorum", 3, THREAD_LOCAL)]


def test_the_timer_asks_its_event_beside_captures(gpu: Gpu) -> None:
    futures.stream_timeout(lambda: pytest.fail("it is over"), timedelta(milliseconds=1))
    wait_until(gpu.asked)
    assert gpu.asked_in == [("torchft-timer", 3, THREAD_LOCAL)]


def test_the_thread_that_copies_an_outcome_works_beside_captures(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "Future", lambda devices: Future())
    monkeypatch.setattr(work, "copy_outcome", lambda *_: gpu.ask())
    deferred = DeferredOperation([torch.device("cuda", 3)])
    deferred.get_future()
    deferred.follow(FinishedOperation([]))
    wait_until(gpu.asked)
    assert gpu.asked_in == [("torchft-operation", 3, THREAD_LOCAL)]


def test_a_future_names_no_device_on_which_torch_would_make_the_context(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 3, raising=False)
    named: list[list[torch.device]] = []
    monkeypatch.setattr(futures, "Future", lambda **options: named.append(options["devices"]))
    futures.empty_future()
    assert named == [[torch.device("cuda", 3)]]


# torchft's helpers for streams.


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_without_an_accelerator_there_is_nothing_to_wait_for() -> None:
    with get_stream_context(None) as stream:
        synchronize()
    assert stream is None


# Whether tensors share memory, and what is divided in place.


WHOLE = torch.arange(24.0)
VIEWS = {
    "nothing": WHOLE[3:3],
    "the first half": WHOLE[:12],
    "the second half": WHOLE[12:],
    "the middle": WHOLE[6:18],
    "even": WHOLE[::2],
    "odd": WHOLE[1::2],
    "a column": WHOLE.view(4, 6)[:, 2],
    "two columns": WHOLE.view(4, 6)[:, 1:3],
    "a column turned": WHOLE.view(4, 6).t()[5],
    "one repeated": WHOLE[7:8].expand(3),
    "a scalar": WHOLE[11],
    "another memory": torch.arange(24.0),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.product(VIEWS, repeat=2)))
def test_memory_is_shared_where_an_element_of_the_one_is_one_of_the_other(one: str, other: str) -> None:
    assert share_memory(VIEWS[one], VIEWS[other]) == bool(places(VIEWS[one]) & places(VIEWS[other]))


def places(tensor: Tensor) -> set[int]:
    start = tensor.data_ptr()
    steps = itertools.product(*map(range, tensor.shape))
    offsets = (sum(map(int.__mul__, step, tensor.stride())) for step in steps)
    return {start + offset * tensor.itemsize for offset in offsets}


def test_memory_that_is_seen_as_another_dtype_is_shared() -> None:
    assert share_memory(WHOLE[:4], WHOLE.view(torch.int32)[3:])
    assert not share_memory(WHOLE[:4], WHOLE.view(torch.int32)[4:])


def test_sparse_tensors_are_not_looked_into() -> None:
    sparse = torch.eye(3).to_sparse()
    assert not share_memory(sparse, sparse)


def test_sparse_tensors_are_divided_once_too() -> None:
    sparse = torch.eye(3).to_sparse()
    divide([sparse, sparse], 2)
    assert sparse.to_dense().diagonal().tolist() == [0.5] * 3
