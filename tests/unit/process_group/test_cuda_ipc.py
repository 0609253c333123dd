"""Sharing a GPU with a subprocess, without a GPU: torch's part is played by `Machine`.

Whether torch really behaves so is what tests/gpu is for.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.process_group.cuda_ipc import (
    IsPast,
    MemoryExports,
    MemoryImports,
    MirroredStreams,
    OwnEvents,
    PeerEvents,
    TorchCuda,
    stream_message,
)


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
        self.collected = 0
        self.opened: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.refusal: RuntimeError | None = None

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if self.refusal is not None:
            raise self.refusal
        if storage.nbytes() == 0:
            return 0, None, 0, 0, None, 0, None, None
        self.counters.append(1)
        return 0, b"handle", storage.nbytes(), 512, b"/torch_1_1", len(self.counters) - 1, b"", True

    def open(self, device: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        self.opened.append((device, handle, nbytes, offset))
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()

    def decrement(self, counter: bytes, offset: int) -> None:
        assert counter == b"/torch_1_1"
        self.counters[offset] -= 1

    def collect(self) -> None:
        self.collected += 1

    def new_event(self) -> Any:
        self.events.append(Event())
        return self.events[-1]

    def handle_of(self, event: Any) -> bytes:
        return bytes([self.events.index(event)])

    def open_event(self, device: int, handle: bytes) -> Any:
        return self.events[handle[0]]

    def mark(self, stream: Any) -> IsPast:
        return stream.queue()  # type: ignore[no-any-return]

    def new_stream(self, device: int, priority: int) -> Any:
        return Stream(device, priority=priority)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def exports(machine: Machine) -> MemoryExports:
    return MemoryExports(cuda=machine)


def storage_of(count: int = 4) -> torch.UntypedStorage:
    return torch.zeros(count).untyped_storage()


def test_storage_is_exported_and_told_once(exports: MemoryExports, machine: Machine) -> None:
    tensor = torch.zeros(4)
    number, message = exports.map(tensor.untyped_storage())
    assert message == (number, 0, b"handle", 16, 512)
    assert exports.map(tensor[1:].untyped_storage()) == (number, None)
    assert machine.counters == [1]


def test_dead_storage_is_released_when_the_subprocess_has_unmapped_it(
    exports: MemoryExports, machine: Machine
) -> None:
    storage = storage_of()
    number, _ = exports.map(storage)
    assert exports.take_dead() == []
    del storage
    gc.collect()
    assert exports.take_dead() == [number]
    assert exports.take_dead() == []
    assert machine.counters == [1]
    exports.unmapped([number])
    assert machine.counters == [0]
    assert machine.collected == 1


def test_death_of_a_storage_wakes_the_trainer(machine: Machine) -> None:
    woken: list[bool] = []
    exports = MemoryExports(lambda: woken.append(True), machine)
    storage = storage_of()
    exports.map(storage)
    assert woken == []
    del storage
    gc.collect()
    assert woken == [True]


def test_killed_subprocess_loses_no_memory(exports: MemoryExports, machine: Machine) -> None:
    dead, asked, living = storage_of(), storage_of(), storage_of()
    exports.map(dead)
    number, _ = exports.map(asked)
    exports.map(living)
    del asked
    gc.collect()
    assert exports.take_dead() == [number]
    del dead
    gc.collect()
    exports.subprocess_died()
    assert machine.counters == [0, 0, 1]
    assert machine.collected > 0


def test_no_counter_goes_below_zero_whatever_comes_when(exports: MemoryExports, machine: Machine) -> None:
    storage = storage_of()
    number, _ = exports.map(storage)
    del storage
    gc.collect()
    exports.take_dead()
    exports.unmapped([number])
    exports.subprocess_died()
    exports.close()
    exports.close()
    assert machine.counters == [0]


def test_next_subprocess_is_told_anew_without_a_second_export(
    exports: MemoryExports, machine: Machine
) -> None:
    storage = storage_of()
    first = exports.map(storage)
    exports.subprocess_died()
    assert exports.map(storage) == first
    assert machine.counters == [1]


def test_storage_that_dies_between_two_subprocesses_is_released_at_once(
    exports: MemoryExports, machine: Machine
) -> None:
    storage = storage_of()
    exports.map(storage)
    exports.subprocess_died()
    del storage
    gc.collect()
    assert exports.take_dead() == []
    assert machine.counters == [0]


def test_close_holds_on_to_nobodys_memory(exports: MemoryExports, machine: Machine) -> None:
    storage = storage_of()
    exports.map(storage)
    exports.close()
    assert machine.counters == [0]
    del storage
    gc.collect()
    assert exports.take_dead() == []


def test_resized_storage_is_another_memory(exports: MemoryExports, machine: Machine) -> None:
    storage = storage_of()
    number, _ = exports.map(storage)
    storage.resize_(1 << 20)
    other, message = exports.map(storage)
    assert other != number
    assert message is not None
    assert message[3] == 1 << 20
    assert exports.take_dead() == [number]
    exports.unmapped([number])
    assert machine.counters == [0, 1]


def test_storage_without_bytes_has_no_counter(exports: MemoryExports, machine: Machine) -> None:
    storage = torch.zeros(0).untyped_storage()
    number, message = exports.map(storage)
    assert message == (number, 0, None, 0, 0)
    del storage
    gc.collect()
    exports.unmapped(exports.take_dead())
    assert machine.counters == []


def test_unasked_report_is_refused(exports: MemoryExports, machine: Machine) -> None:
    storage = storage_of()
    number, _ = exports.map(storage)
    with pytest.raises(ProcessGroupError, match=f"unmapped memory {number}, which is in use"):
        exports.unmapped([number])
    assert machine.counters == [1]


def test_memory_that_cannot_be_shared_is_refused_with_the_cure(
    exports: MemoryExports, machine: Machine
) -> None:
    machine.refusal = RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")
    with pytest.raises(NotSupportedError, match=r"cudaMallocAsync .* without expandable_segments"):
        exports.map(storage_of())


def test_subprocess_unmaps_when_its_device_has_passed_what_was_queued(machine: Machine) -> None:
    imports, streams = MemoryImports(machine), MirroredStreams(machine)
    stream: Any = streams.get((0, 7, 0))
    imports.map((3, 0, b"handle", 16, 512))
    assert imports.storage(3).nbytes() == 16
    assert machine.opened == [(0, b"handle", 16, 512)]
    stream.queue()
    imports.unmap(3, streams.mark())
    assert imports.take_unmapped() == []
    stream.run()
    assert imports.take_unmapped() == [3]
    assert imports.take_unmapped() == []
    with pytest.raises(KeyError):
        imports.storage(3)


def test_event_is_recorded_anew_only_after_every_wait_for_it(machine: Machine) -> None:
    own, peer = OwnEvents(machine), PeerEvents(machine)
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
    own, peer = OwnEvents(machine), PeerEvents(machine)
    here: Any = Stream()
    for message in own.prepare(here, 3):
        peer.open(message)
    messages = [own.record(here) for _ in range(3)]
    assert sorted(messages) == [(0, 0, None), (1, 0, None), (2, 0, None)]
    for number, _, _ in messages:
        peer.wait(number, Stream())  # type: ignore[arg-type]


def test_events_of_different_devices_are_not_mixed_up(machine: Machine) -> None:
    own = OwnEvents(machine)
    one: Any = Stream(device=1)
    zero: Any = Stream(device=0)
    own.record(one)
    own.free([0])
    assert own.record(zero)[0] == 1
    assert own.record(one) == (0, 1, None)


def test_event_that_nobody_waits_for_is_free_again(machine: Machine) -> None:
    own, peer = OwnEvents(machine), PeerEvents(machine)
    here: Any = Stream()
    peer.open(own.record(here))
    assert not peer.is_over(0)
    here.run()
    assert peer.is_over(0)
    peer.skip(0)
    assert peer.take_passed() == [0]


def test_each_stream_has_one_counterpart(machine: Machine) -> None:
    streams = MirroredStreams(machine)
    training: Any = Stream(0, stream_id=7, priority=-1)
    counterpart = streams.get(stream_message(training))
    assert counterpart.priority == -1
    assert streams.get(stream_message(training)) is counterpart
    other: Any = Stream(0, stream_id=8, priority=-1)
    assert streams.get(stream_message(other)) is not counterpart
