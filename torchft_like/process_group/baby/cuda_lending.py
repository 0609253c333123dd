"""CUDA tensors for a subprocess: their memory by IPC, the order of things by events.

A request carries an event that the trainer's stream has recorded; the subprocess runs the operation on a
stream of its own that waits for it, and answers, as soon as the operation is queued, with an event that
stands for its end. `wait` makes the caller's stream wait for that one. No thread waits for the device.

INVARIANTS
* A loan's tensors are kept alive until a stream of the caller waits for the operation, or it is over:
  before that the memory must not be used for anything else.
* An event's number is given back once, when nothing of this side can touch the event any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.errors import NotSupportedError
from torchft_like.process_group.baby.lending import Letter
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_spec import TensorSpec, spec_of, tensor_at
from torchft_like.process_group.baby.work import BabyWork, Failures
from torchft_like.process_group.collectives import Call
from torchft_like.process_group.cuda_ipc import (
    EventMessage,
    MemoryExports,
    MemoryImports,
    MemoryMessage,
    MirroredStreams,
    OwnEvents,
    PeerEvents,
    TorchCuda,
    stream_message,
)

EVENTS_PREPARED = 16
TORCH_CUDA = TorchCuda()


class CudaLender:
    """See lending.Lender.

    Args:
        device: the group's.
    """

    def __init__(self, device: torch.device, cuda: TorchCuda = TORCH_CUDA) -> None:
        self.cuda = cuda
        self._device = device
        self._lock = threading.Lock()
        self._memory = MemoryExports(cuda=cuda)
        self._events = OwnEvents(cuda)
        self._peers = PeerEvents(cuda)
        self._new: list[MemoryMessage] = []
        self._running: deque[_CudaLoan] = deque()

    def lend(self, call: Call) -> _CudaLoan:
        """See lending.Lender."""
        self._forget_what_is_over()
        return _CudaLoan(call, self)

    def letters(self) -> Iterable[Letter]:
        """See lending.Lender."""
        new, self._new = self._new, []
        for message in new:
            yield (ToChild.MAP.value, UNASKED, *message), ()
        for number in self._memory.take_dead():
            yield (ToChild.UNMAP.value, UNASKED, number), ()

    def greeting(self) -> Any:
        """The device's index, and events to be opened while nothing runs."""
        with self._lock:
            events = self._events.prepare(self.cuda.current_stream(self._device), EVENTS_PREPARED)
        return self._device.index, events

    def greeted(self, greeting: list[EventMessage]) -> None:
        """See lending.Lender."""
        with self._lock:
            for event in greeting:
                self._peers.open(event)

    def cut_off(self) -> int:
        """See lending.Lender."""
        return sum(not loan.is_over() for loan in tuple(self._running))

    def close(self) -> None:
        """See lending.Lender."""
        self._running.clear()
        self._peers = PeerEvents(self.cuda)  # a dead process's events must not be touched
        self._memory.subprocess_died()
        self._memory.close()

    def locate(self, tensor: Tensor) -> TensorSpec:
        """See lending.Loan."""
        if tensor.device != self._device or tensor.layout is not torch.strided:
            raise NotSupportedError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be handed to the subprocess of a "
                f"group on {self._device}: only dense tensors of that device can"
            )
        number, message = self._memory.map(tensor.untyped_storage())
        if message is not None:
            self._new.append(message)
        return spec_of(tensor, number)

    def context(self) -> Any:
        """The stream, the event that the operation comes after, and the events that may be used again."""
        stream = self.cuda.current_stream(self._device)
        with self._lock:
            return stream_message(stream), self._events.record(stream), self._peers.take_passed()

    def started(self, loan: _CudaLoan, answer: tuple[Any, ...]) -> int:
        """The subprocess has queued the operation; gives the number of the event that stands for its end."""
        end: EventMessage
        end, passed, unmapped = answer
        with self._lock:
            self._peers.open(end)
            self._events.free(passed)
            self._running.append(loan)
        self._memory.unmapped(unmapped)
        return end[0]

    def order_after(self, end: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the end of an operation; once for each."""
        with self._lock:
            self._peers.wait(end, stream)

    def is_over(self, end: int) -> bool:
        """Whether the device has come to the end of an operation."""
        with self._lock:
            return self._peers.is_over(end)

    def _forget_what_is_over(self) -> None:
        """The first one that is not over stands for all behind it: one after the other is close enough."""
        while self._running and self._running[0].is_over():
            loan = self._running.popleft()
            if (end := loan.retire()) is not None:
                with self._lock:
                    self._peers.skip(end)


class _CudaLoan:
    """See lending.Loan."""

    def __init__(self, call: Call, lender: CudaLender) -> None:
        self._lender = lender
        self._lock = threading.Lock()
        self._call: Call | None = call  # keeps the tensors alive
        self._end: int | None = None  # the event, as long as nobody has waited for it
        self._waited: torch.cuda.Event | None = None

    def locate(self, tensor: Tensor) -> TensorSpec:
        return self._lender.locate(tensor)

    def context(self) -> Any:
        return self._lender.context()

    def settle(self, request: Request) -> None:
        if request.outcome is Outcome.DONE:
            self._end = self._lender.started(self, request.answer)
        else:
            self._call = None

    def work(self, requests: Requests, request: Request, result: list[Any], failures: Failures) -> BabyWork:
        return BabyWorkNCCL(requests, request, result, failures, self)

    def order(self, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the operation, which has been queued."""
        with self._lock:
            if self._end is not None:
                self._lender.order_after(self._end, stream)
                self._waited = self._lender.cuda.new_event()
                self._waited.record(stream)
                self._end = None
            elif self._waited is not None:  # the subprocess's event may stand for something else by now
                self._waited.wait(stream)
            self._call = None

    def order_current_stream(self) -> None:
        """Make the current stream wait for the operation, which has been queued."""
        self.order(self._lender.cuda.current_stream())

    def is_over(self) -> bool:
        """Whether the device has come to the end of the operation."""
        with self._lock:
            if self._end is not None:
                return self._lender.is_over(self._end)
            return self._waited is None or bool(self._waited.query())  # type: ignore[no-untyped-call]

    def retire(self) -> int | None:
        """It is over; gives the number of the event if nobody has waited for it and nobody will."""
        with self._lock:
            end, self._end, self._call = self._end, None, None
            return end


class BabyWorkNCCL(BabyWork):
    """An operation on the device that a subprocess has queued.

    `wait` makes the current stream wait, and the thread only until the subprocess has queued the
    operation. For the thread to wait as well, synchronize the stream after it.
    """

    def __init__(
        self,
        requests: Requests,
        request: Request,
        result: list[Any],
        failures: Failures,
        loan: _CudaLoan,
    ) -> None:
        super().__init__(requests, request, result, failures)
        self._loan = loan

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; see BabyWork.wait for the errors."""
        super().wait(timeout)
        self._loan.order_current_stream()
        return True

    def is_completed(self) -> bool:
        """Whether the device has come to its end, or it has failed."""
        if not super().is_completed():
            return False
        return self._request.outcome is not Outcome.DONE or self._loan.is_over()

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self.is_completed() and self._request.outcome is Outcome.DONE

    def exception(self) -> Exception | None:
        """The error, once it failed."""
        return self._error_of_request()

    def source_rank(self) -> int:
        """NCCL has no receive from any source."""
        return -1

    def _new_future(self) -> Future[Any]:
        return Future(devices=[torch.device("cuda", torch.cuda.current_device())])

    def _set_result(self, future: Future[Any]) -> None:
        # The future records where this stream is, and whoever waits for it waits for that.
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            self._loan.order_current_stream()
            future.set_result(self._result)


class CudaBorrower:
    """See lending.Borrower.

    Args:
        greeting: the lender's.
    """

    def __init__(self, greeting: Any, cuda: TorchCuda = TORCH_CUDA) -> None:
        device, events = greeting
        self._cuda = cuda
        self._memory = MemoryImports(cuda)
        self._events = OwnEvents(cuda)
        self._peers = PeerEvents(cuda)
        self._streams = MirroredStreams(cuda)
        cuda.use_device(device)
        for event in events:
            self._peers.open(event)

    def greeting(self) -> list[EventMessage]:
        """Events to be opened while nothing runs."""
        return self._events.prepare(self._cuda.current_stream(), EVENTS_PREPARED)

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        """See lending.Borrower."""
        number, device, handle, nbytes, offset = details
        self._memory.map((number, device, handle, nbytes, offset))

    def unmap(self, storage: int) -> None:
        """See lending.Borrower."""
        self._memory.unmap(storage, self._streams.mark())

    def tensor(self, spec: TensorSpec) -> Tensor:
        """See lending.Borrower."""
        return tensor_at(self._memory.storage(spec[0]), spec)

    @contextlib.contextmanager
    def entered(self, context: Any) -> Iterator[None]:
        """On the counterpart of the caller's stream, after what the caller has queued there."""
        stream_named, event, freed = context
        stream = self._streams.get(stream_named)
        self._events.free(freed)
        with self._cuda.on(stream):
            self._peers.open(event)
            self._peers.wait(event[0], stream)
            yield

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...]:
        """The event that stands for the end, and what the trainer may use again."""
        if work is not None:
            work.wait()
        stream = self._cuda.current_stream()
        return self._events.record(stream), self._peers.take_passed(), self._memory.take_unmapped()
