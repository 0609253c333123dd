"""ProcessGroupNCCL and a thread that captures a CUDA graph; the GPU is a stand-in."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.unit.process_group.conftest import LIMIT_S, Party, wait_until
from tests.unit.process_group.fake_nccl import FakeDevice, FakeEvent, install
from torchft_like.process_group import nccl
from torchft_like.process_group.nccl import ProcessGroupNCCL


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(monkeypatch)


def test_whoever_asks_the_device_aside_spoils_no_capture(
    device: FakeDevice, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture of the training thread ends with an error if another thread asks in the same mode."""
    asked_beside: list[tuple[str, bool]] = []
    local = threading.local()

    @contextlib.contextmanager
    def beside(device: object) -> Iterator[None]:
        before, local.is_beside = getattr(local, "is_beside", False), True
        yield
        local.is_beside = before

    def query(event: FakeEvent) -> bool:
        asked_beside.append((threading.current_thread().name, getattr(local, "is_beside", False)))
        return all(off_the_device.is_set() for off_the_device in event.behind)

    monkeypatch.setattr(nccl, "beside_captures", beside)
    monkeypatch.setattr(FakeEvent, "query", query)
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    group.configure(party.prefix(), 0, 1)
    device.autofinish = False
    group.allreduce([torch.zeros(1)]).wait()
    while not any(name == "torchft-device-watch" for name, _ in asked_beside):
        time.sleep(0.001)
    group.abort("a member was lost")
    wait_until(device.communicators[-1].aborted)
    group.shutdown()
    aside = {name: is_beside for name, is_beside in asked_beside if name.startswith("torchft")}
    # The thread that closes the group asks only for operations that the watch has not dropped by then.
    assert {"torchft-device-watch", "torchft-nccl-abort"} <= set(aside)
    assert all(is_beside for name, is_beside in asked_beside if name.startswith("torchft"))
