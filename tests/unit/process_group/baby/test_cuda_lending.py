"""Lending CUDA tensors, without a GPU: torch's part is played by the `Machine` of the IPC tests.

Whether torch really behaves so is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.process_group.test_cuda_ipc import Machine, Stream
from torchft_like.errors import NotSupportedError
from torchft_like.process_group.baby.channel import Channel
from torchft_like.process_group.baby.child import _Server
from torchft_like.process_group.baby.cuda_lending import BabyWorkNCCL, CudaBorrower, CudaLender
from torchft_like.process_group.baby.protocol import Outcome, ToChild
from torchft_like.process_group.baby.requests import Request
from torchft_like.process_group.collectives import BY_NAME


class OneDevice(Machine):
    """The streams of the trainer and of its subprocess, both played here."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()

    def use_device(self, index: int) -> None:
        pass

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.current

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Pair:
    """A lender, the borrower across the border, and what goes between them."""

    def __init__(self) -> None:
        self.machine = OneDevice()
        self.lender = CudaLender(torch.device("cpu"), self.machine)
        self.borrower = CudaBorrower(self.lender.greeting(), self.machine)
        self.lender.greeted(self.borrower.greeting())
        self.streams: list[Stream] = []
        self.letters: list[tuple[Any, ...]] = []

    def deliver_letters(self) -> None:
        while (letter := self.lender.next_letter()) is not None:
            (kind, _, *details), descriptors = letter
            self.lender.letter_sent()
            self.letters.append((kind, *details))
            if kind == ToChild.MAP:
                self.borrower.map(tuple(details), list(descriptors))
            else:
                self.borrower.unmap(*details)

    def run(self, tensor: torch.Tensor) -> tuple[Any, Request]:
        """One allreduce, as far as the answer."""
        loan = self.lender.lend(BY_NAME["allreduce"].bind(([tensor],), {}))
        spec = loan.locate(tensor)
        context = loan.context()
        self.deliver_letters()
        request = Request(1)
        with self.borrower.entered(context):
            self.borrower.tensor(spec)
            self.streams.append(self.machine.current)
            request.answer = self.borrower.answer_when_started(None)
        request.outcome = Outcome.DONE
        loan.settle(request)
        request.is_settled = True
        return loan, request

    def finish(self) -> None:
        """The subprocess's streams come to their ends."""
        for stream in self.streams:
            stream.run()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_memory_is_mapped_once_for_all_its_tensors(pair: Pair) -> None:
    tensor = torch.zeros(8)
    pair.run(tensor)
    pair.run(tensor[2:])
    assert [letter[0] for letter in pair.letters] == [ToChild.MAP]


def test_the_operation_comes_after_the_callers_stream_and_the_caller_after_it(pair: Pair) -> None:
    loan, _ = pair.run(torch.zeros(8))
    assert pair.streams[0] is not pair.machine.current
    queued = pair.machine.current.queued
    assert not loan.is_over()
    loan.order_current_stream()
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


def test_tensors_live_until_the_caller_waits_or_the_operation_is_over(pair: Pair) -> None:
    waited, unwaited = torch.zeros(8), torch.zeros(8)
    first, _ = pair.run(waited)
    pair.run(unwaited)
    del unwaited
    gc.collect()
    pair.lender.lend(BY_NAME["barrier"].bind((), {}))
    pair.deliver_letters()
    assert [letter[0] for letter in pair.letters] == [ToChild.MAP, ToChild.MAP]
    first.order_current_stream()
    pair.machine.current.run()
    pair.finish()
    pair.lender.lend(BY_NAME["barrier"].bind((), {}))
    gc.collect()
    pair.deliver_letters()
    assert [letter[0] for letter in pair.letters][2:] == [ToChild.UNMAP]


def test_waiting_again_does_not_touch_an_event_that_stands_for_something_else(pair: Pair) -> None:
    loan, _ = pair.run(torch.zeros(8))
    loan.order_current_stream()
    events = len(pair.machine.events)
    pair.finish()
    pair.machine.current.run()
    for _ in range(5):
        pair.run(torch.zeros(8))
        pair.finish()
        pair.machine.current.run()
    other = Stream(stream_id=3)
    loan.order(other, is_callers=True)
    assert other.queued == 1
    assert len(pair.machine.events) <= events + 3


def test_events_are_used_again_and_again(pair: Pair) -> None:
    prepared = len(pair.machine.events)
    tensor = torch.zeros(8)
    for _ in range(50):
        loan, _ = pair.run(tensor)
        loan.order_current_stream()
        pair.finish()
        pair.machine.current.run()
    own = 50  # each wait makes one of the caller's own, which goes with the loan
    assert len(pair.machine.events) - own <= prepared


def test_operations_that_are_not_over_are_counted_before_a_kill(pair: Pair) -> None:
    pair.run(torch.zeros(8))
    pair.finish()
    assert pair.lender.cut_off() == 0
    waited, _ = pair.run(torch.zeros(8))
    waited.order_current_stream()
    pair.run(torch.zeros(8))
    assert pair.lender.cut_off() == 2


def test_the_end_of_the_subprocess_takes_the_memory_back(pair: Pair) -> None:
    tensor = torch.zeros(8)
    pair.run(tensor)
    assert pair.machine.counters == [1]
    pair.lender.close()
    assert pair.machine.counters == [0]
    del tensor
    gc.collect()
    assert pair.machine.counters == [0]


def test_a_refused_request_keeps_nothing(pair: Pair) -> None:
    tensor = torch.zeros(8)
    loan = pair.lender.lend(BY_NAME["allreduce"].bind(([tensor],), {}))
    loan.locate(tensor)
    pair.deliver_letters()
    loan.settle(Request(1, outcome=Outcome.REFUSED))
    del tensor
    gc.collect()
    pair.deliver_letters()
    assert [letter[0] for letter in pair.letters] == [ToChild.MAP, ToChild.UNMAP]


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_the_tensors_of_a_failed_request_live_as_long_as_the_subprocess(
    pair: Pair, is_abandoned: bool
) -> None:
    tensor = torch.zeros(8)
    loan = pair.lender.lend(BY_NAME["allreduce"].bind(([tensor],), {}))
    loan.locate(tensor)
    loan.settle(Request(1, outcome=Outcome.FAILED))
    memory = weakref.ref(tensor.untyped_storage())
    del tensor
    pair.lender.lend(BY_NAME["barrier"].bind((), {}))  # looks for what is over
    gc.collect()
    assert memory() is not None
    if is_abandoned:
        pair.lender.abandon()
    pair.lender.close()
    gc.collect()
    assert (memory() is not None) == is_abandoned


def test_a_request_whose_subprocess_does_not_die_keeps_its_tensors_for_ever(pair: Pair) -> None:
    tensor = torch.zeros(8)
    loan = pair.lender.lend(BY_NAME["allreduce"].bind(([tensor],), {}))
    pair.lender.abandon()
    loan.settle(Request(1))
    memory = weakref.ref(tensor)
    del tensor, loan
    pair.lender.close()
    gc.collect()
    assert memory() is not None


def test_the_events_of_refused_requests_are_used_again(pair: Pair) -> None:
    ours, childs = map(Channel, Channel.pair())
    server = _Server(childs)
    server._borrower = pair.borrower
    made = []
    for number in range(100):
        loan = pair.lender.lend(BY_NAME["barrier"].bind((), {}))
        server._run(number, "a method that is not there", [], {}, loan.context())
        _, outcome, *_ = ours.receive()[0]
        loan.settle(Request(number, outcome=Outcome(outcome)))
        pair.machine.current.run()
        pair.run(torch.zeros(8))  # whose answer says which events have passed
        pair.finish()
        made.append(len(pair.machine.events))
    assert outcome == Outcome.REFUSED
    assert made[-1] == made[20]
    ours.close()
    childs.close()


def test_a_tensor_of_another_device_is_refused_by_name() -> None:
    lender = CudaLender(torch.device("cuda", 0), OneDevice())
    with pytest.raises(NotSupportedError, match=r"cpu.*cuda:0"):
        lender.locate(torch.zeros(2))


def test_the_work_says_how_it_ended(pair: Pair) -> None:
    loan, request = pair.run(torch.zeros(8))
    work = BabyWorkNCCL(None, request, [], None, loan)  # type: ignore[arg-type] # settled: nobody is asked
    assert not work.is_completed()
    pair.finish()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
