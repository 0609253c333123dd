"""CUDA tensors for a subprocess: their memory by IPC, the order of things by events.

A request carries an event that the trainer's stream has recorded; the subprocess runs the operation on a
stream of its own that waits for it, and answers, as soon as the operation is queued, with an event that
stands for its end. `wait` makes the caller's stream wait for that one. No thread waits for the device.

INVARIANTS
* A loan's tensors are kept alive until a stream of the caller waits for the operation, or it is over:
  before that the memory must not be used for anything else. What of a failed one is still on its way, nobody
  can tell: its tensors are kept until the subprocess is dead.
* An event's number is given back once, when nothing of this side can touch the event any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.devices import beside_captures
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
    MirroredStreams,
    OwnEvents,
    PeerEvents,
    TorchCuda,
    stream_message,
)

EVENTS_PREPARED = 16
ASK_S_MAX = 0.01
TORCH_CUDA = TorchCuda()


class CudaLender:
    """See lending.Lender.

    Args:
        device: the group's.
    """

    def __init__(self, device: torch.device, cuda: TorchCuda = TORCH_CUDA) -> None:
        self.cuda = cuda
        self.device = device
        self._lock = threading.Lock()
        self._memory = MemoryExports(cuda=cuda)
        self._events = OwnEvents(cuda)
        self._peers = PeerEvents(cuda)
        self._letters: deque[Letter] = deque()
        self._running: deque[_CudaLoan] = deque()
        self._failed: list[_CudaLoan] = []
        self._is_dead = False
        self._is_abandoned = False

    def lend(self, call: Call) -> _CudaLoan:
        """See lending.Lender."""
        self._forget_what_is_over()
        return _CudaLoan(call, self)

    def next_letter(self) -> Letter | None:
        """See lending.Lender."""
        for number in self._memory.take_dead():
            self._letters.append(((ToChild.UNMAP.value, UNASKED, number), ()))
        return self._letters[0] if self._letters else None

    def letter_sent(self) -> None:
        """See lending.Lender."""
        self._letters.popleft()

    def greeting(self) -> Any:
        """The device's index, and events to be opened while nothing runs."""
        with self._lock:
            events = self._events.prepare(self.cuda.current_stream(self.device), EVENTS_PREPARED)
        return self.device.index, events

    def greeted(self, greeting: list[EventMessage]) -> None:
        """See lending.Lender."""
        with self._lock:
            for event in greeting:
                self._peers.open(event)

    def cut_off(self) -> int:
        """See lending.Lender. What cannot be asked counts as cut off."""
        with beside_captures(self.device):
            return sum(not loan.is_surely_over() for loan in tuple(self._running))

    def abandon(self) -> None:
        """See lending.Lender."""
        self._is_abandoned = True

    def close(self) -> None:
        """See lending.Lender."""
        with beside_captures(self.device):
            with self._lock:
                self._is_dead = True
                self._peers = PeerEvents(self.cuda)  # a dead process's events must not be touched
            if not self._is_abandoned:
                self._running.clear()
                while self._failed:
                    self._failed.pop().retire()
                self._memory.subprocess_died()
                self._memory.close()

    def locate(self, tensor: Tensor) -> TensorSpec:
        """See lending.Loan."""
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise NotSupportedError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be handed to the subprocess of a "
                f"group on {self.device}: only dense tensors of that device can"
            )
        number, message = self._memory.map(tensor.untyped_storage())
        if message is not None:
            self._letters.append(((ToChild.MAP.value, UNASKED, *message), ()))
        return spec_of(tensor, number)

    def context(self) -> Any:
        """The stream, the event that the operation comes after, and the events that may be used again."""
        stream = self.cuda.current_stream(self.device)
        with self._lock:
            return stream_message(stream), self._events.record(stream), self._peers.take_passed()

    def started(self, answer: tuple[Any, ...]) -> int:
        """The subprocess has queued the operation; gives the number of the event that stands for its end."""
        end: EventMessage
        end, passed, unmapped = answer
        with self._lock:
            self._peers.open(end)
            self._events.free(passed)
        self._memory.unmapped(unmapped)
        return end[0]

    def keep(self, loan: _CudaLoan) -> None:
        """Until the operation is over."""
        self._running.append(loan)

    def keep_failed(self, loan: _CudaLoan) -> None:
        """Until the subprocess is dead, or for ever if it does not die."""
        self._failed.append(loan)

    @property
    def is_abandoned(self) -> bool:
        """Whether the subprocess does not die, and may still do what it was asked for."""
        return self._is_abandoned

    def order_after(self, end: int, stream: torch.cuda.Stream) -> bool:
        """Make the stream wait for the end of an operation; once for each. False if nobody can tell it."""
        with self._lock:
            if not self._is_dead:
                self._peers.wait(end, stream)
            return not self._is_dead

    def is_over(self, end: int, patience_s: float = -1) -> bool:
        """Whether the device has come to the end of an operation, as far as can be told in time."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            return self._is_dead or self._peers.is_over(end)
        finally:
            self._lock.release()

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
            with self._lock, beside_captures(self.device):  # on whatever thread reads the answer
                self._end = self._lender.started(request.answer)
            self._lender.keep(self)
        elif request.outcome is Outcome.FAILED or self._lender.is_abandoned:
            self._lender.keep_failed(self)
        else:  # it was not begun, or the subprocess is dead
            self._call = None

    def work(self, requests: Requests, request: Request, result: list[Any], failures: Failures) -> BabyWork:
        return BabyWorkNCCL(requests, request, result, failures, self)

    @property
    def device(self) -> torch.device:
        """Where the operation runs."""
        return self._lender.device

    def order_current_stream(self) -> bool:
        """Make the device's current stream wait for the operation; False if nobody can tell its end."""
        return self.order(self._lender.cuda.current_stream(self.device), is_callers=True)

    def order(self, stream: torch.cuda.Stream, *, is_callers: bool) -> bool:
        """Make a stream wait for the operation, which has been queued; False if nobody can tell its end.

        Args:
            is_callers: what the caller does next comes after the operation, so the tensors are safe.
        """
        with self._lock:
            if self._end is not None:
                if not self._lender.order_after(self._end, stream):
                    return False
                self._waited = self._lender.cuda.new_event()
                self._waited.record(stream)
                self._end = None
            elif self._waited is not None:  # the subprocess's event may stand for something else by now
                self._waited.wait(stream)
            if is_callers:
                self._call = None
            return True

    def is_over(self, patience_s: float = -1) -> bool:
        """Whether the device has come to the end of the operation, as far as can be told in time."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            if self._end is not None:
                return self._lender.is_over(self._end, patience_s)
            return self._waited is None or bool(self._waited.query())  # type: ignore[no-untyped-call]
        finally:
            self._lock.release()

    def is_surely_over(self) -> bool:
        """As `is_over`, without waiting for who may be waiting for the device."""
        return self.is_over(ASK_S_MAX)

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
        if not self._loan.order_current_stream():
            raise self._lost_error().with_traceback(None)
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
        return Future(devices=[self._loan.device])

    def _set_result(self, future: Future[Any]) -> None:
        with beside_captures(self._loan.device):
            # The future records where this stream is, and whoever waits for it waits for that.
            stream = torch.cuda.Stream(self._loan.device)  # type: ignore[no-untyped-call]
            if not self._loan.order(stream, is_callers=False):
                future.set_exception(self._lost_error())
                return
            with torch.cuda.stream(stream):
                future.set_result(self._result)

    def _lost_error(self) -> Exception:
        error = self._failures.describe(Request(UNASKED))
        return self.explain(error) or error


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
