"""Sharing a GPU with a subprocess, without a GPU: torch's part is played by `Machine`.

Whether torch really behaves so is what tests/gpu is for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchft_like import shared_memory
from torchft_like.errors import NotSupportedError
from torchft_like.process_group.baby import cuda_sharing
from torchft_like.process_group.baby.cuda_sharing import OwnEvents, PeerEvents
from torchft_like.shared_memory import Export, IsPast, TorchCuda


class Stream:
    """A queue of a device: how far it has come, and how much is in it."""

    def __init__(self, device: int = 0, stream_id: int = 0, priority: int = 0) -> None:
        self.device_index = device
        self.stream_id = stream_id
        self.priority = priority
        self.queued = 0
        self.done = 0

    def queue(self) -> IsPast:
        self.queued += 1
        position = self.queued
        return lambda: self.done >= position

    def run(self) -> None:
        self.done = self.queued

    def synchronize(self) -> None:
        self.run()


class Event:
    """What was queued before it was recorded last."""

    def __init__(self) -> None:
        self.is_past: IsPast = lambda: True

    def record(self, stream: Any) -> None:
        self.is_past = stream.queue()

    def wait(self, stream: Any) -> None:
        stream.queue()

    def query(self) -> bool:
        return self.is_past()


class Machine(TorchCuda):
    """Counters, memory and events of two processes."""

    def __init__(self) -> None:
        self.counters: list[int] = []
        self.opened: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.private = 0
        self.refusal: RuntimeError | None = None

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if self.refusal is not None:
            raise self.refusal
        self.counters.append(1)
        return 0, b"handle", storage.nbytes(), 512, b"/torch_1_1", len(self.counters) - 1, b"", True

    def open(self, device: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        self.opened.append((device, handle, nbytes, offset))
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()

    def decrement(self, counter: bytes, offset: int) -> None:
        assert counter == b"/torch_1_1"
        self.counters[offset] -= 1

    def new_event(self) -> Any:
        self.events.append(Event())
        return self.events[-1]

    def handle_of(self, event: Any) -> bytes:
        return bytes([self.events.index(event)])

    def open_event(self, device: int, handle: bytes) -> Any:
        return self.events[handle[0]]

    def private_event(self) -> Any:
        self.private += 1
        return Event()

    def new_stream(self, device: int, priority: int) -> Any:
        return Stream(device, priority=priority)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for module in (cuda_sharing, shared_memory):
        monkeypatch.setattr(module, "cuda", machine)
    return machine


def storage_of(count: int = 4) -> torch.UntypedStorage:
    return torch.zeros(count).untyped_storage()


def test_each_memory_has_a_number_of_its_own(machine: Machine) -> None:
    first, second = (Export(storage_of()) for _ in range(2))
    assert first.details == (0, b"handle", 16, 512)
    assert second.number != first.number
    assert machine.counters == [1, 1]


def test_memory_that_cannot_be_shared_is_refused_with_the_cure(machine: Machine) -> None:
    machine.refusal = RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")
    with pytest.raises(NotSupportedError, match=r"cudaMallocAsync .* without expandable_segments"):
        Export(storage_of())


def test_event_is_recorded_anew_only_after_every_wait_for_it(machine: Machine) -> None:
    own, peer = OwnEvents(), PeerEvents()
    here: Any = Stream()
    there: Any = Stream()
    first = own.record(here)
    assert first == (0, 0, b"\x00")
    peer.open(first)
    peer.wait(0, there)
    assert peer.take_passed() == []
    second = own.record(here)
    assert second == (1, 0, b"\x01")
    there.run()
    assert peer.take_passed() == [0]
    assert peer.take_passed() == []
    own.free([0])
    assert own.record(here) == (0, 0, None)


def test_prepared_events_are_opened_before_they_are_needed(machine: Machine) -> None:
    own, peer = OwnEvents(), PeerEvents()
    here: Any = Stream()
    for message in own.prepare(here, 3):
        peer.open(message)
    messages = [own.record(here) for _ in range(3)]
    assert sorted(messages) == [(0, 0, None), (1, 0, None), (2, 0, None)]
    for number, _, _ in messages:
        peer.wait(number, Stream())  # type: ignore[arg-type]


def test_events_of_different_devices_are_not_mixed_up(machine: Machine) -> None:
    own = OwnEvents()
    one: Any = Stream(device=1)
    zero: Any = Stream(device=0)
    own.record(one)
    own.free([0])
    assert own.record(zero)[0] == 1
    assert own.record(one) == (0, 1, None)


def test_event_that_nobody_waits_for_is_free_again(machine: Machine) -> None:
    own, peer = OwnEvents(), PeerEvents()
    here: Any = Stream()
    peer.open(own.record(here))
    assert not peer.is_over(0)
    here.run()
    assert peer.is_over(0)
    peer.skip(0)
    assert peer.take_passed() == [0]
