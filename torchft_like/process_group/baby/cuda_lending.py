"""CUDA tensors for a subprocess: staged in the group's own memory, in an order that events give.

A request comes after the caller's stream has copied the inputs, and carries an event that this stream has
recorded. The subprocess runs the operation on a stream of its own that waits for it, and answers, as soon as
the operation is queued, with an event that stands for its end. `wait` makes the caller's stream wait for that
one, and copy the outputs. No thread waits for the device.

INVARIANTS
* The outputs are copied once: by the first stream that waits for the operation, or, where it is found to be
  over before anybody has waited, by a stream of the lender's. So after a subprocess was killed nothing is
  written to a tensor but by a stream that its caller made wait.
* A block is given back when its operation is over and its outputs are copied. What of a failed one is
  still on its way, nobody can tell: its blocks are kept until the subprocess is dead.
* An event's number is given back once, when nothing of this side can touch the event any more.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from torchft_like.devices import beside_captures, keeping
from torchft_like.errors import NotSupportedError
from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.baby.blocks import Block
from torchft_like.process_group.baby.cuda_memory import Arena
from torchft_like.process_group.baby.lending import Letter
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_spec import TensorSpec, tensor_at
from torchft_like.process_group.baby.work import Failures, RemoteOperation
from torchft_like.process_group.collectives import Call
from torchft_like.process_group.cuda_ipc import (
    EventMessage,
    Export,
    IsPast,
    OwnEvents,
    PeerEvents,
    TorchCuda,
    stream_message,
)
from torchft_like.process_group.work import FOREVER
from torchft_like.writing import writing_to

EVENTS_PREPARED = 16
ASK_S_MAX = 0.01
TORCH_CUDA = TorchCuda()

_NOTE = struct.Struct("<qqI")  # number and device of an event, how many numbers follow; the handle comes last


def note_of(event: EventMessage, numbers: Sequence[int]) -> bytes:
    """An event and numbers as a fixed struct: what every request and every answer has to say."""
    number, device, handle = event
    head = _NOTE.pack(number, device, len(numbers))
    return head + struct.pack(f"<{len(numbers)}q", *numbers) + (handle or b"")


def read_note(note: bytes) -> tuple[EventMessage, tuple[int, ...]]:
    """What `note_of` was given."""
    number, device, count = _NOTE.unpack_from(note)
    numbers = struct.unpack_from(f"<{count}q", note, _NOTE.size)
    return (number, device, note[_NOTE.size + 8 * count :] or None), numbers


class CudaLender:
    """See lending.Lender.

    Args:
        device: the group's.
        arena: the group's memory.
    """

    def __init__(self, device: torch.device, arena: Arena, cuda: TorchCuda = TORCH_CUDA) -> None:
        self.cuda = cuda
        self.device = device
        self._lock = threading.Lock()
        self._arena = arena
        self._told: set[int] = set()
        self._events = OwnEvents(cuda)
        self._peers = PeerEvents(cuda)
        self._private: list[torch.cuda.Event] = []
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
            return sum(not loan.has_ended(ASK_S_MAX) for loan in tuple(self._running))

    def is_busy(self) -> bool:
        """See lending.Lender."""
        self._forget_what_is_over()
        return bool(self._running)

    def abandon(self) -> None:
        """See lending.Lender. The caller's tensors are safe: the subprocess sees the arena alone."""
        self._is_abandoned = True
        self._arena.lose()

    def close(self) -> None:
        """See lending.Lender."""
        with beside_captures(self.device):
            with self._lock:
                self._is_dead = True
                self._peers = PeerEvents(self.cuda)  # a dead process's events must not be touched
            while self._running:
                self._running.popleft().let_go()
            while self._failed:
                self._failed.pop().let_go()

    @property
    def is_dead(self) -> bool:
        """Whether the subprocess is dead, or as good as dead."""
        return self._is_dead

    def stage(self, tensor: Tensor) -> tuple[Block[Export], TensorSpec]:
        """Room for a tensor, of which the subprocess is told."""
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise NotSupportedError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be handed to the subprocess of a "
                f"group on {self.device}: only dense tensors of that device can"
            )
        block, spec = self._arena.stage(tensor)
        export = block.segment
        if export.number not in self._told:
            self._told.add(export.number)
            self._letters.append(((ToChild.MAP.value, UNASKED, *export.message), ()))
        return block, spec

    def give_back(self, blocks: list[Block[Export]], is_past: IsPast | None = None) -> None:
        """Nobody touches the blocks any more, once the device has passed a point of this process's."""
        if self._is_abandoned:
            return
        if is_past is None:
            self._arena.give_back(blocks)
        else:
            self._arena.give_back_when(is_past, blocks)

    def context(self, stream: torch.cuda.Stream) -> bytes:
        """The event that the operation comes after, the stream, and the events that may be used again."""
        with self._lock:
            event, passed = self._events.record(stream), self._peers.take_passed()
        return note_of(event, (*stream_message(stream), *passed))

    def started(self, answer: tuple[Any, ...]) -> int:
        """The subprocess has queued the operation; gives the number of the event that stands for its end."""
        end, passed = read_note(*answer)
        with self._lock:
            self._peers.open(end)
            self._events.free(passed)
        return end[0]

    def keep(self, loan: _CudaLoan) -> None:
        """Until the operation is over."""
        self._running.append(loan)

    def keep_failed(self, loan: _CudaLoan) -> None:
        """Until the subprocess is dead."""
        self._failed.append(loan)

    def order_after(self, end: int, stream: torch.cuda.Stream) -> bool:
        """Make the stream wait for the end of an operation. False if nobody can tell it."""
        with self._lock:
            if not self._is_dead:
                self._peers.order(end, stream)
            return not self._is_dead

    def is_over(self, end: int, patience_s: float = -1) -> bool:
        """Whether the device has come to the end of an operation, as far as can be told in time."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            return not self._is_dead and self._peers.is_over(end)
        finally:
            self._lock.release()

    def new_stream(self) -> torch.cuda.Stream:
        """On which nothing waits for anything of the caller's."""
        return self.cuda.new_stream(self.device.index, 0)

    def take_event(self) -> torch.cuda.Event:
        """One of this process alone."""
        return self._private.pop() if self._private else self.cuda.private_event()

    def give_event_back(self, event: torch.cuda.Event) -> None:
        """Nobody will wait for it, or ask it."""
        self._private.append(event)

    def _forget_what_is_over(self) -> None:
        """The first one that is not over stands for all behind it: one after the other is close enough."""
        while self._running and self._running[0].is_over():
            number = self._running.popleft().retire()
            with self._lock:
                self._peers.skip(number)


class _CudaLoan:
    """See lending.Loan.

    It goes through three states: the end of the operation is yet to be waited for (`_end`), the results are
    to be copied, and `_done` has been recorded behind the copies.
    """

    def __init__(self, call: Call, lender: CudaLender) -> None:
        self._lender = lender
        self._lock = threading.Lock()
        self._call: Call | None = call  # keeps the tensors alive
        self._input_ids = set(map(id, tensors_of(call.inputs)))
        self._output_ids = set(map(id, tensors_of(call.outputs)))
        self._located: dict[int, TensorSpec] = {}  # a tensor that is output and input is one for both sides
        self._blocks: list[Block[Export]] = []
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None  # the caller's, once the inputs are being copied
        self._number = -1  # of the event that stands for the end
        self._end: int | None = None  # the same, as long as it has to be waited for
        self._has_ended = False  # as was seen; else `_done` tells
        self._done: torch.cuda.Event | None = None

    def locate(self, tensor: Tensor) -> TensorSpec:
        if (spec := self._located.get(id(tensor))) is None:
            block, spec = self._lender.stage(tensor)
            self._located[id(tensor)] = spec
            self._blocks.append(block)
            staged = tensor_at(block.storage, spec)
            if id(tensor) in self._input_ids:
                self._inputs.append((staged, tensor))
            if id(tensor) in self._output_ids:
                self._outputs.append((tensor, staged))
        return spec

    def context(self) -> bytes:
        self._stream = self._lender.cuda.current_stream(self.device)
        _copy(self._inputs)
        self._inputs.clear()
        return self._lender.context(self._stream)

    def settle(self, request: Request) -> None:
        if request.outcome is Outcome.DONE:
            with self._lock, beside_captures(self.device):  # on whatever thread reads the answer
                self._number = self._end = self._lender.started(request.answer)
            self._lender.keep(self)
        elif request.outcome is Outcome.FAILED:
            self._lender.keep_failed(self)
        else:  # it was not begun, or the subprocess is dead
            with beside_captures(self.device):
                self.let_go()

    def operation(
        self, requests: Requests, request: Request, result: list[Any], failures: Failures
    ) -> RemoteOperation:
        return RemoteCudaOperation(requests, request, result, failures, self)

    @property
    def device(self) -> torch.device:
        """Where the operation runs."""
        return self._lender.device

    @property
    def is_lost(self) -> bool:
        """Whether the subprocess is dead, and nobody can tell what it did."""
        return self._end is not None and self._lender.is_dead

    def order_current_stream(self) -> bool:
        """Make the device's current stream wait for the operation; False if nobody can tell its end."""
        return self.order(self._lender.cuda.current_stream(self.device), is_callers=True)

    def order(self, stream: torch.cuda.Stream, *, is_callers: bool) -> bool:
        """Make a stream wait for the results of an operation that has been queued; False if they are lost.

        Args:
            is_callers: what the caller does next comes after the operation, so the tensors are safe.
        """
        with self._lock:
            if self._end is not None and not self._lender.order_after(self._end, stream):
                return False
            self._end = None
            if self._done is None and self._blocks is not _GONE:
                self._bring_back(stream)
            elif self._done is not None:
                self._done.wait(stream)
            if is_callers:
                self._call = None
            return True

    def is_over(self) -> bool:
        """Whether the device is past the operation and its results are where they belong, or it is lost."""
        if not self.has_ended():
            return False
        with self._lock:
            if self._done is None and self._blocks is not _GONE and self._end is None:
                self._bring_back(self._lender.new_stream())
            return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def has_ended(self, patience_s: float = -1) -> bool:
        """Whether the device is past the operation, as far as can be told in time; nothing is copied."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            if self._end is not None and self._lender.is_over(self._end, patience_s):
                self._end, self._has_ended = None, True
            if self._end is not None:
                return self._lender.is_dead
            if self._has_ended or self._done is None:
                return True
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        finally:
            self._lock.release()

    def retire(self) -> int:
        """It is over; gives the number of the event, which nobody waits for any more."""
        with self._lock:
            done, self._done, blocks, self._blocks = self._done, None, self._blocks, _GONE
            self._call = None
        if done is not None:
            self._lender.give_event_back(done)
        self._lender.give_back(blocks)
        return self._number

    def let_go(self) -> None:
        """No subprocess touches the blocks any more, or ever will; streams of this process may."""
        with self._lock:
            if self._end is None and self._number >= 0 and self._done is None:
                self._bring_back(self._lender.new_stream())
            elif self._done is None:
                self._call = None
                self._outputs.clear()
            blocks, self._blocks = self._blocks, _GONE
            if self._done is not None:
                is_past: IsPast | None = keeping(self._call, self._done.query)
            else:
                is_past = None if self._stream is None else self._lender.cuda.mark(self._stream)
        if blocks:
            self._lender.give_back(blocks, is_past)

    def _bring_back(self, stream: torch.cuda.Stream) -> None:
        """Have a stream that comes after the operation copy its outputs, once."""
        outputs, self._outputs = self._outputs, []
        self._done = self._lender.take_event()
        try:
            with self._lender.cuda.on(stream):
                _copy(outputs)
        finally:
            self._done.record(stream)


# In place of blocks that were given back: what is left of the operation is over.
_GONE: list[Block[Export]] = []


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """To each first one from the second."""
    if not pairs:
        return
    targets, sources = map(list, zip(*pairs, strict=True))
    with writing_to(*targets):
        if len(pairs) == 1:
            targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(targets, sources)


class RemoteCudaOperation(RemoteOperation):
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

    def wait(self, deadline: float = FOREVER) -> None:
        """Make the current stream wait; see RemoteOperation.wait for the errors."""
        super().wait(deadline)
        if not self._loan.order_current_stream():
            raise self._lost_error().with_traceback(None)

    def is_over(self) -> bool:
        """Whether the device has come to its end, or it has failed."""
        if not super().is_over():
            return False
        return self._request.outcome is not Outcome.DONE or self._loan.is_over()

    def error(self) -> Exception | None:
        """Why it failed, or that the subprocess is gone and the device does not tell its end."""
        if (error := self._error_of_request()) is not None:
            return error
        return self._lost_error() if self._request.is_settled and self._loan.is_lost else None

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
