"""A fake GPU and NCCL, as far as ProcessGroupNCCL touches them, for machines without."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions
from torch.futures import Future

from tests.unit.process_group.conftest import wait_until
from torchft_like.process_group import nccl


class FakeWork:
    """A fake of torch's handle of an operation, which ends when the test, or an abort, ends it."""

    def __init__(self, device: FakeDevice, tensors: list[torch.Tensor]) -> None:
        self.device = device
        self.tensors = tensors
        self.is_done = False
        self.off_the_device = threading.Event()
        self.error: Exception | None = None

    def finish(self) -> None:
        self.is_done = True
        self.off_the_device.set()

    def is_completed(self) -> bool:
        self.device.asked_during_abort += self.device.is_aborting.is_set()
        return self.is_done or self.error is not None

    def exception(self) -> Exception | None:
        return self.error

    def block_current_stream(self) -> None:
        """Release the tensors, as torch does: from now on the stream is to keep them safe."""
        self.device.stream_waits_for.append(self)
        self.tensors = []

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(list(self.tensors))
        return future


class FakeDevice:
    """A fake GPU, as far as this module touches one, and all that happened on it."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []
        self.communicators: list[FakeNccl] = []
        self.stream_waits_for: list[FakeWork] = []
        self.is_aborting = threading.Event()
        self.connecting = threading.Event()
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.abort_takes_effect = True
        self.abort_may_end = threading.Event()
        self.abort_may_end.set()
        self.asked_during_abort = 0
        self.autofinish = True
        self.is_capturing = False
        self.failure: Exception | None = None
        self.environment: dict[str, str | None] = {}


class FakeNccl:
    """A fake of torch's ProcessGroupNCCL and the shell around it in one."""

    def __init__(self, device: FakeDevice, world_size: int) -> None:
        self.device = device
        self.world_size = world_size
        self.is_connected = False
        self.aborted = threading.Event()
        self.seen_async: list[bool] = []
        device.communicators.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device.connecting.set()
        if self is self.device.communicators[0]:
            wait_until(self.device.may_connect)
        self.is_connected = True

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None) -> FakeWork | None:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        self.seen_async.append(opts is None or opts.asyncOp)
        work = FakeWork(self.device, tensors)
        self.device.works.append(work)
        if not self.seen_async[:-1] or self.device.autofinish:  # the first collective proves the connection
            tensors[0].mul_(self.world_size)
            work.finish()
        return work if self.seen_async[-1] else None

    def barrier(self, opts: Any = None) -> FakeWork:
        work = FakeWork(self.device, [])
        self.device.works.append(work)
        return work

    def abort(self) -> None:
        assert self.is_connected, "an abort that misses the communicator"
        self.device.is_aborting.set()
        wait_until(self.device.abort_may_end)
        if self.device.abort_takes_effect:
            for work in self.device.works:
                work.off_the_device.set()
        self.device.is_aborting.clear()
        self.aborted.set()


class FakeEvent:
    """Fires when all works for which its stream waited when it was recorded are off the device."""

    device: FakeDevice

    def record(self, stream: object) -> None:
        self.behind = [work.off_the_device for work in self.device.stream_waits_for]

    def query(self) -> bool:
        if self.device.failure is not None:
            raise self.device.failure
        return all(off_the_device.is_set() for off_the_device in self.behind)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Have torch and ProcessGroupNCCL use a fake GPU."""
    device = FakeDevice()
    monkeypatch.setattr(FakeEvent, "device", device, raising=False)
    real_ones = torch.ones
    quiet = contextlib.nullcontext
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: quiet(),
        "stream": lambda stream: quiet(),
        "Stream": lambda device: "a stream",
        "Event": FakeEvent,
        "current_stream": lambda of=None: device,
        "is_current_stream_capturing": lambda: device.is_capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: real_ones(*args))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "_make_nccl", lambda store, members: FakeNccl(device, members.world_size))
    monkeypatch.setattr(nccl, "_shell_around", lambda inner, members, device: inner)
    monkeypatch.setattr(nccl, "PERIOD_S", 0.005)
    # Variables that the class sets must go when the test is over: `delenv` restores only those that were
    # there before.
    for name in ("TORCH_NCCL_NONBLOCKING_TIMEOUT", *nccl._CONSTRUCTOR_ENVIRONMENT):
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)
    return device
