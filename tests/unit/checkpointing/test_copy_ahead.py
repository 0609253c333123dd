"""What a source copies ahead of the end of a step: the same bits as without, whoever wrote meanwhile."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.fake_world import fake_mesh
from tests.faults import raising
from tests.unit.checkpointing.states import dump_state, stream_of
from tests.waiting import wait_for
from torchft_like.checkpointing import copy_ahead
from torchft_like.checkpointing.copy_ahead import CopyAhead
from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.state_stream import Snapshot
from torchft_like.optim import GradientReplay

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_ahead, "PLAIN_FROM", 1)


class Trained:
    """A model and its optimizer after a step, and a state that holds more than these."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(50, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
        self.net.register_parameter("square", nn.Parameter(torch.randn(8, 8)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), amsgrad=True)
        self.replay = GradientReplay(self.optimizer)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.net(torch.randn(16, 50)).square().mean() + self.net.square.sum()).backward()  # type: ignore[operator]
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "more": [torch.arange(7), b"bytes", self.net.square.detach().T],  # type: ignore[operator]
            "optimizer": self.optimizer.state_dict(),
        }


class UsedMemory(KeptMemory):
    """Lends memory that was used before."""

    def lend(self, nbytes: int, borrower: object) -> memoryview:
        memory = super().lend(nbytes, borrower)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(255)
        return memory


def begin(replay: GradientReplay) -> CopyAhead:
    """Begin to copy, and wait until that is known of every tensor."""
    ahead = CopyAhead(replay.changed_by_steps, UsedMemory())
    wait_for(lambda: ahead._begun)
    return ahead


def of(state: object, ahead: CopyAhead | None = None) -> bytes:
    return stream_of(Snapshot(state, None, ahead).fill())


def overwrite(trained: Trained) -> None:
    with torch.no_grad():
        trained.net[0].weight.mul_(2.0)  # type: ignore[operator]


def replace(trained: Trained) -> None:
    trained.net[0].weight.data = torch.randn(30, 50)


def load(trained: Trained) -> None:
    trained.net.load_state_dict({name: value + 1 for name, value in trained.net.state_dict().items()})
    trained.optimizer.load_state_dict(Trained().optimizer.state_dict())


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("write", [str, overwrite, replace, load, Trained.step])
def test_a_snapshot_is_that_of_the_state_whoever_wrote_since_its_copy_was_begun(
    write: Callable[[Trained], object],
) -> None:
    trained = Trained()
    ahead = begin(trained.replay)
    write(trained)
    assert of(trained.state(), ahead) == dump_state(trained.state())


@pytest.mark.heal_is_clean
def test_a_write_to_a_dtensor_is_seen_though_its_shard_does_not_count_it() -> None:
    with fake_mesh(1) as mesh:
        parameter = nn.Parameter(DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)]))
        ahead = begin(GradientReplay(torch.optim.SGD([parameter])))
        with torch.no_grad():
            parameter.mul_(2.0)
        assert of({"p": parameter}, ahead) == dump_state({"p": parameter})


@pytest.mark.heal_is_clean
def test_a_piece_whose_copy_fails_on_the_thread_is_copied_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained, copy, has_failed = Trained(), ctypes.memmove, threading.Event()

    def fail(*arguments: Any) -> None:
        if threading.current_thread().name == "torchft-copy-ahead":
            has_failed.set()
            raise MemoryError
        copy(*arguments)

    monkeypatch.setattr(ctypes, "memmove", fail)
    expected, ahead = dump_state(trained.state()), begin(trained.replay)
    assert has_failed.wait(LIMIT_S)
    assert of(trained.state(), ahead) == expected


def test_a_tensor_without_memory_of_its_own_is_not_copied_ahead() -> None:
    in_others = TwoTensor(torch.ones(5), torch.ones(5))  # type: ignore[no-untyped-call]
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    for tensor in (in_others, freed, torch.ones(0)):
        assert copy_ahead.plain_part(tensor) is None, "to read from address 0 would end the process"


def test_a_snapshot_keeps_no_memory_of_which_it_has_no_part() -> None:
    trained, lender = Trained(), KeptMemory()
    ahead = begin(trained.replay)
    snapshot, memory = Snapshot({"other": torch.ones(3)}, lender, ahead), weakref.ref(ahead)
    del ahead
    for thread in threading.enumerate():
        if thread.name == "torchft-copy-ahead":
            thread.join(LIMIT_S)
    assert memory() is None
    assert stream_of(snapshot.fill()) == dump_state({"other": torch.ones(3)})


@pytest.mark.heal_is_clean
def test_a_snapshot_is_complete_before_the_optimizer_may_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, copy = Trained(), ctypes.memmove
    is_copying, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        if threading.current_thread().name == "torchft-copy-ahead":
            is_copying.set()
            assert go_on.wait(LIMIT_S)
        copy(*arguments)

    monkeypatch.setattr(ctypes, "memmove", slow)
    expected, ahead = dump_state(trained.state()), begin(trained.replay)
    assert is_copying.wait(LIMIT_S)
    snapshot = Snapshot(trained.state(), None, ahead)
    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(snapshot.fill)
        # The filling thread takes all pieces but the one that the other thread has.
        wait_for(lambda: not ahead._open)
        assert not filling.done()
        go_on.set()
        filling.result(LIMIT_S)
    trained.step()
    assert stream_of(snapshot) == expected


def test_what_was_copied_ahead_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_ahead, "COPY_BYTES", 1000)
    trained = Trained()
    expected, ahead = dump_state(trained.state()), begin(trained.replay)
    snapshot = Snapshot(trained.state(), None, ahead)
    left = sum(len(piece.place) for piece, _ in snapshot._left)
    assert left < 1000 < snapshot.nbytes, "buffers, and what no optimizer has"
    assert stream_of(snapshot.fill()) == expected


@pytest.mark.parametrize("why", ["stopped", "no memory"])
def test_without_copies_ahead_the_whole_state_is_copied(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    trained, lender = Trained(), KeptMemory()
    if why == "no memory":
        monkeypatch.setattr(lender, "lend", raising(MemoryError))
    ahead = CopyAhead(trained.replay.changed_by_steps, lender)
    if why == "stopped":
        ahead.stop()
    trained.step()
    assert of(trained.state(), ahead) == dump_state(trained.state())
