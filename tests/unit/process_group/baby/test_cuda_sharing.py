"""The two sides that share CUDA tensors, without a GPU: `Machine` plays torch's part.

Whether torch really behaves so is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_like import shared_memory
from torchft_like.errors import NotSupportedError, ProcessGroupError, SubprocessLostError
from torchft_like.process_group.baby import cuda_sharing as cuda_memory
from torchft_like.process_group.baby.cuda_sharing import (
    Arena,
    CudaExporter,
    CudaImporter,
    OwnEvents,
    PeerEvents,
    RemoteCudaOperation,
)
from torchft_like.process_group.baby.fork_pool import _Fork, _load
from torchft_like.process_group.baby.group import ProcessGroupBabyNCCL
from torchft_like.process_group.baby.messages import Channel, Outcome, ToChild, encode_call
from torchft_like.process_group.baby.requests import Request
from torchft_like.process_group.collectives import BY_NAME
from torchft_like.process_group.nccl import ProcessGroupNCCL
from torchft_like.process_group.work import Operation
from torchft_like.shared_memory import Export, IsPast, TorchCuda

LIMIT_S = 60.0


class Stream:
    """A queue of a device: how far it has come, and how much is in it."""

    def __init__(self, stream_id: int = 0, priority: int = 0) -> None:
        self.device_index = 0
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
    """The device of the trainer and of its subprocess: counters, memory, events and streams of both."""

    def __init__(self) -> None:
        self.counters: list[int] = []
        self.events: list[Event] = []
        self.private = 0
        self.refusal: RuntimeError | None = None
        self.current = Stream()
        self.shared: list[torch.UntypedStorage] = []
        self.made: list[Stream] = []

    def use_device(self, index: int) -> None:
        pass

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.current

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def new_stream(self, device: int, priority: int) -> Any:
        self.made.append(Stream(priority=priority))
        return self.made[-1]

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if self.refusal is not None:
            raise self.refusal
        self.counters.append(1)
        self.shared.append(storage)
        handle = bytes([len(self.shared) - 1])
        return 0, handle, storage.nbytes(), 512, b"/torch_1_1", len(self.counters) - 1, b"", True

    def open(self, device: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        return self.shared[handle[0]]

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


class Pair:
    """An exporter, its importer, and the messages between them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arena = Arena(torch.device("cpu"))
        self.exporter = CudaExporter(torch.device("cpu"), self.arena)
        self.importer = CudaImporter(self.exporter.greeting())
        self.exporter.greeted(self.importer.greeting())
        self.streams: list[Stream] = []
        self.mapped: list[tuple[Any, ...]] = []
        self.exporter.send = self.deliver

    def deliver(self, message: tuple[Any, ...], descriptors: tuple[int, ...]) -> None:
        kind, _, number, *details = message
        assert kind == ToChild.MAP
        self.mapped.append((number, *details))
        self.importer.map(number, tuple(details), list(descriptors))

    def run(self, tensor: torch.Tensor) -> tuple[Any, Request]:
        """One allreduce, as far as the answer."""
        call_tensors = self.exporter.export(BY_NAME["allreduce"].bind(([tensor],), {}))
        spec = call_tensors.locate(tensor)
        context = call_tensors.context()
        request = Request(1)
        with self.importer.entered(context):
            self.importer.tensor(spec).mul_(2)
            self.streams.append(self.machine.current)
            request.answer = self.importer.answer_when_started(None)
        request.outcome = Outcome.DONE
        call_tensors.settle(request)
        request.is_settled = True
        return call_tensors, request

    def finish(self) -> None:
        """The subprocess's streams come to their ends."""
        for stream in self.streams:
            stream.run()

    def finish_copies(self) -> None:
        """So do those of the exporter, on which results are copied that nobody waits for."""
        for stream in self.machine.made:
            if stream not in self.streams:
                stream.run()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (cuda_memory, shared_memory):
        monkeypatch.setattr(module, "cuda", machine)
    return machine


@pytest.fixture
def pair(machine: Machine) -> Pair:
    return Pair(machine)


def test_memory_that_cannot_be_shared_is_refused_with_the_cure(machine: Machine) -> None:
    machine.refusal = RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")
    with pytest.raises(NotSupportedError, match=r"cudaMallocAsync .* without expandable_segments"):
        Export(torch.zeros(4).untyped_storage())


def test_event_is_recorded_anew_only_after_every_wait(machine: Machine) -> None:
    own, peer = OwnEvents(), PeerEvents()
    here: Any = Stream()
    there: Any = Stream()
    first = own.record(here)
    assert first == (0, 0, b"\x00")
    peer.open(first)
    peer.wait(0, there)
    assert peer.take_passed() == []
    assert own.record(here) == (1, 0, b"\x01")
    there.run()
    assert peer.take_passed() == [0]
    assert peer.take_passed() == []
    own.free([0])
    assert own.record(here) == (0, 0, None)


def test_the_operation_comes_after_the_callers_stream_and_the_caller_after_it(pair: Pair) -> None:
    call_tensors, _ = pair.run(torch.zeros(8))
    assert pair.streams[0] is not pair.machine.current
    queued = pair.machine.current.queued
    assert not call_tensors.is_over()
    call_tensors.order_current_stream()
    assert pair.machine.current.queued > queued


def test_each_stream_of_the_caller_has_a_counterpart(pair: Pair) -> None:
    first = pair.machine.current
    pair.run(torch.zeros(8))
    pair.machine.current = Stream(stream_id=7)
    pair.run(torch.zeros(8))
    pair.machine.current = first
    pair.run(torch.zeros(8))
    assert pair.streams[0] is pair.streams[2]
    assert pair.streams[0] is not pair.streams[1]


def test_the_outputs_are_copied_by_the_stream_that_waits_and_once(pair: Pair) -> None:
    tensor = torch.ones(8)
    call_tensors, _ = pair.run(tensor)
    assert tensor.tolist() == [1.0] * 8  # the subprocess sees the group's memory alone
    call_tensors.order_current_stream()
    assert tensor.tolist() == [2.0] * 8
    tensor.fill_(5.0)
    call_tensors.order_current_stream()
    assert tensor.tolist() == [5.0] * 8


def test_the_outputs_of_an_operation_that_is_over_are_there_though_nobody_has_waited(pair: Pair) -> None:
    tensor = torch.ones(8)
    call_tensors, _ = pair.run(tensor)
    assert not call_tensors.is_over()
    pair.finish()
    call_tensors.is_over()
    assert tensor.tolist() == [2.0] * 8


def test_an_input_is_copied_and_not_written_to(pair: Pair) -> None:
    source, output = torch.ones(2), torch.zeros(4)
    call = BY_NAME["_allgather_base"].bind((output, source), {})
    call_tensors = pair.exporter.export(call)
    spec, written = call_tensors.locate(source), call_tensors.locate(output)
    call_tensors.context()
    assert pair.importer.tensor(spec).tolist() == [1.0, 1.0]
    assert spec != written
    assert [pair.exporter.stage(t)[1] for t in (source, output)] != [spec, written]  # in use


def test_views_with_gaps_come_back_to_where_they_were(pair: Pair) -> None:
    whole = torch.ones(4, 4)
    call_tensors, _ = pair.run(whole[:, 1])
    call_tensors.order_current_stream()
    assert whole[:, 1].tolist() == [2.0] * 4
    assert whole[:, 0].tolist() == [1.0] * 4


def test_tensors_of_the_caller_cost_no_export(pair: Pair) -> None:
    for _ in range(100):
        call_tensors, _ = pair.run(torch.ones(1000))
        call_tensors.order_current_stream()
        pair.finish()
        pair.machine.current.run()
    assert len(pair.machine.counters) == len(pair.mapped) == 1


def test_a_block_is_used_again_when_the_results_are_copied_and_not_before(pair: Pair) -> None:
    big = 10 * 1024 * 1024
    call_tensors, _ = pair.run(torch.ones(big))
    call_tensors.order_current_stream()
    pair.finish()
    pair.run(torch.ones(big))  # the caller's stream has not come to the copy
    assert len(pair.machine.counters) == 2
    pair.machine.current.run()
    pair.run(torch.ones(big))
    assert len(pair.machine.counters) == 2


def test_the_next_subprocess_maps_the_same_memory(pair: Pair) -> None:
    call_tensors, _ = pair.run(torch.ones(8))
    call_tensors.order_current_stream()
    pair.finish()
    pair.machine.current.run()
    pair.exporter.close()
    pair.exporter = CudaExporter(torch.device("cpu"), pair.arena)
    pair.exporter.send = pair.deliver
    pair.importer = CudaImporter(pair.exporter.greeting())
    pair.exporter.greeted(pair.importer.greeting())
    pair.run(torch.ones(8))
    assert len(pair.mapped) == 2
    assert pair.mapped[0] == pair.mapped[1]
    assert len(pair.machine.counters) == 1


def test_waiting_again_does_not_touch_an_event_that_stands_for_something_else(pair: Pair) -> None:
    call_tensors, _ = pair.run(torch.zeros(8))
    call_tensors.order_current_stream()
    events = len(pair.machine.events)
    pair.finish()
    pair.machine.current.run()
    for _ in range(5):
        pair.run(torch.zeros(8))
        pair.finish()
        pair.machine.current.run()
    other = Stream(stream_id=3)
    call_tensors.order(other, is_callers=True)
    assert other.queued == 0  # it is over: there is nothing to wait for
    assert len(pair.machine.events) <= events + 3


def test_events_are_used_again_and_again(pair: Pair) -> None:
    prepared = len(pair.machine.events)
    tensor = torch.zeros(8)
    made = []
    for _ in range(50):
        call_tensors, _ = pair.run(tensor)
        call_tensors.order_current_stream()
        pair.finish()
        pair.machine.current.run()
        made.append(pair.machine.private)
    assert len(pair.machine.events) <= prepared
    of_the_subprocess = 1  # for each wait
    assert made[-1] - made[-11] == 10 * of_the_subprocess


def test_operations_that_are_not_over_are_counted_before_a_kill(pair: Pair) -> None:
    pair.run(torch.zeros(8))
    pair.finish()
    waited, _ = pair.run(torch.zeros(8))
    waited.order_current_stream()
    pair.run(torch.zeros(8))
    assert pair.exporter.cut_off() == 2


@pytest.mark.no_leak
def test_a_kill_is_held_up_once_by_threads_that_hold_a_lock_and_not_for_each_operation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread may be blocked in CUDA, on a stream that has no room for more waits."""
    for _ in range(3):
        pair.run(torch.zeros(8))
    given: list[float] = []

    def is_over(end: int, patience_s: float = -1) -> bool:
        given.append(patience_s)
        time.sleep(patience_s)
        return False

    monkeypatch.setattr(pair.exporter, "is_over", is_over)
    assert pair.exporter.cut_off() == 3
    assert given[0] > 0
    assert given[1:] == [0, 0]


def test_a_capture_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotSupportedError, match="cannot be captured"):
        pair.run(torch.zeros(8))
    assert not pair.exporter.running


def test_the_memory_goes_back_when_nobody_uses_the_arena(pair: Pair) -> None:
    call_tensors, _ = pair.run(torch.zeros(8))
    call_tensors.order_current_stream()
    pair.exporter.close()
    machine, stream = pair.machine, pair.machine.current
    del call_tensors, pair.exporter, pair.arena
    gc.collect()
    assert machine.counters == [1]  # the caller's stream has not come to the copy
    stream.run()
    Arena(torch.device("cpu")).stage(torch.zeros(1))
    gc.collect()
    assert machine.counters[0] == 0


class Settled:
    """Of requests that all have their answers."""

    def wait(self, request: Request, deadline: float) -> bool:
        return request.is_settled


def handle(request: Request, call_tensors: Any) -> Operation:
    """Of a request that is settled, so that the subprocess is not asked."""
    return RemoteCudaOperation(Settled(), request, [], killed, call_tensors)  # type: ignore[arg-type]


def killed(_: Request) -> SubprocessLostError:
    """Return why a subprocess carried nothing out."""
    return SubprocessLostError("it was killed")


def test_results_that_were_there_before_the_end_of_the_subprocess_stay(pair: Pair) -> None:
    over, lost = torch.ones(8), torch.ones(8)
    first, _ = pair.run(over)
    pair.finish()
    second, request = pair.run(lost)
    assert pair.exporter.cut_off() == 1
    pair.exporter.close()
    assert first.order_current_stream()
    assert over.tolist() == [2.0] * 8
    assert not second.order_current_stream()
    assert lost.tolist() == [1.0] * 8
    work = handle(request, second)
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), SubprocessLostError)


def test_a_wait_with_a_timeout_blocks_the_thread_until_the_end_or_the_abort(pair: Pair) -> None:
    tensor = torch.ones(8)
    call_tensors, request = pair.run(tensor)
    work = handle(request, call_tensors)
    with pytest.raises(ProcessGroupError, match="not done after the timeout"):
        work.wait(timedelta(milliseconds=1))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(work.wait, timedelta(seconds=LIMIT_S))
        pair.finish()
        assert waiting.result(LIMIT_S)
        assert tensor.tolist() == [2.0] * 8
        cut_off = threads.submit(handle(request, pair.run(torch.ones(8))[0]).wait, timedelta(seconds=LIMIT_S))
        pair.exporter.cut_off()
        assert isinstance(cut_off.exception(LIMIT_S), SubprocessLostError)


def test_a_refused_request_keeps_nothing(pair: Pair) -> None:
    for _ in range(100):
        tensor = torch.zeros(8)
        call_tensors = pair.exporter.export(BY_NAME["allreduce"].bind(([tensor],), {}))
        call_tensors.locate(tensor)
        call_tensors.context()
        call_tensors.settle(Request(1, outcome=Outcome.REFUSED))
        pair.machine.current.run()
    memory = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert memory() is None
    assert len(pair.machine.counters) == 1


@pytest.mark.no_zombie
@pytest.mark.parametrize("is_abandoned", [False, True])
def test_blocks_of_a_failed_request_wait_for_the_subprocess_to_die(pair: Pair, is_abandoned: bool) -> None:
    tensor = torch.zeros(8)
    call_tensors = pair.exporter.export(BY_NAME["allreduce"].bind(([tensor],), {}))
    call_tensors.locate(tensor)
    block = call_tensors._blocks[0]
    call_tensors.settle(Request(1, outcome=Outcome.FAILED))
    assert all(pair.exporter.stage(tensor)[0] is not block for _ in range(63))
    if is_abandoned:
        pair.exporter.abandon()
    pair.exporter.close()
    again = CudaExporter(torch.device("cpu"), pair.arena)
    assert (again.stage(tensor)[0] is block) != is_abandoned


def test_an_arena_in_use_is_never_given_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Arena] = []
    monkeypatch.setattr(cuda_memory, "_lost", lost)
    pair.run(torch.zeros(8))
    pair.exporter.abandon()
    pair.exporter.close()
    machine = pair.machine
    del pair.exporter, pair.arena
    gc.collect()
    assert machine.counters == [1]
    lost.clear()


def test_the_events_of_refused_requests_are_used_again(pair: Pair) -> None:
    ours, childs = map(Channel, Channel.pair())
    server = _Fork(childs)
    server._importer = pair.importer
    made = []
    for number in range(100):
        call_tensors = pair.exporter.export(BY_NAME["barrier"].bind((), {}))
        call = encode_call("a method that is not there", [], {}, call_tensors.locate)
        server._run(number, call, call_tensors.context())
        _, outcome, *_ = ours.receive()[0]
        call_tensors.settle(Request(number, outcome=Outcome(outcome)))
        pair.machine.current.run()
        pair.run(torch.zeros(8))  # whose answer says which events have passed
        pair.finish()
        pair.exporter.is_busy()
        pair.finish_copies()
        made.append(len(pair.machine.events))
    assert outcome == Outcome.REFUSED
    assert made[-1] == made[20]
    ours.close()
    childs.close()


def test_a_tensor_of_another_device_is_refused_by_name() -> None:
    device = torch.device("cuda", 0)
    exporter = CudaExporter(device, Arena(device))
    with pytest.raises(NotSupportedError, match=r"cpu.*cuda:0"):
        exporter.find(torch.zeros(2))


def test_the_work_says_how_it_ended(pair: Pair) -> None:
    call_tensors, request = pair.run(torch.zeros(8))
    work = handle(request, call_tensors)
    assert not work.is_completed()
    pair.finish()
    assert not work.is_completed()  # the results are being copied
    pair.finish_copies()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def test_what_a_group_names_for_its_subprocess_is_there() -> None:
    assert _load(ProcessGroupBabyNCCL.IMPORTER) is CudaImporter
    assert _load(ProcessGroupBabyNCCL.GROUP) is ProcessGroupNCCL


def test_a_group_keeps_its_memory_from_one_subprocess_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.process_group.baby.group.require_nccl", lambda: None)
    monkeypatch.setattr("torchft_like.process_group.baby.group.fork_pool.start", lambda: None)
    group = ProcessGroupBabyNCCL()
    group._device = torch.device("cuda", 0)
    first = group._exporter()
    assert group._exporter()._arena is first._arena
    group._device = torch.device("cuda", 1)
    assert group._exporter()._arena is not first._arena
    group.shutdown()
    assert group._arena is None
