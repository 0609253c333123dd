"""CUDA tensors that a subprocess sees: staged in the group's own memory, and ordered by CUDA events.

A request comes after the caller's stream has copied the inputs, and carries an event that this stream has
recorded. The subprocess runs the operation on a stream of its own that waits for it, and answers, as soon as
the operation is queued, with an event that stands for its end. `wait` makes the caller's stream wait for that
one, and copy the outputs. No thread waits for the device.

INVARIANTS
* The outputs are copied once: by the first stream that waits for the operation, or, where it is found to be
  over before a stream has waited, by a stream of the exporter's. So after a subprocess was killed, only a
  stream that its caller made wait writes to a tensor.
* A block is given back when its operation is over and its outputs are copied. What a failed one still writes
  is unknown: its blocks are kept until the subprocess is dead.
* An event's number is given back once, when nothing on this side can touch the event any more.
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
from torchft_like.process_group.baby.cuda_ipc import (
    EventMessage,
    Export,
    IsPast,
    OwnEvents,
    PeerEvents,
    TorchCuda,
    stream_message,
)
from torchft_like.process_group.baby.cuda_memory import Arena
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_sharing import Preamble
from torchft_like.process_group.baby.tensor_spec import TensorSpec, tensor_at
from torchft_like.process_group.baby.work import Failures, RemoteOperation
from torchft_like.process_group.collectives import Call
from torchft_like.process_group.work import FOREVER
from torchft_like.writing import writing_to

EVENTS_PREPARED = 16
ASK_S_MAX = 0.01
TORCH_CUDA = TorchCuda()

# Number and device of an event, how many numbers follow; the event's handle comes last.
_NOTE = struct.Struct("<qqI")


def note_of(event: EventMessage, numbers: Sequence[int]) -> bytes:
    """Pack an event and numbers into a fixed struct: the content of every request and every answer."""
    number, device, handle = event
    head = _NOTE.pack(number, device, len(numbers))
    return head + struct.pack(f"<{len(numbers)}q", *numbers) + (handle or b"")


def read_note(note: bytes) -> tuple[EventMessage, tuple[int, ...]]:
    """Unpack what `note_of` has packed."""
    number, device, count = _NOTE.unpack_from(note)
    numbers = struct.unpack_from(f"<{count}q", note, _NOTE.size)
    return (number, device, note[_NOTE.size + 8 * count :] or None), numbers


class CudaExporter:
    """A `tensor_sharing.Exporter` of CUDA tensors.

    Args:
        device: the device of the group.
        arena: the memory of the group.
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
        self._preambles: deque[Preamble] = deque()
        self._running: deque[_CudaCallTensors] = deque()
        self._failed: list[_CudaCallTensors] = []
        self._is_dead = False
        self._is_abandoned = False

    def export(self, call: Call) -> _CudaCallTensors:
        self._forget_what_is_over()
        return _CudaCallTensors(call, self)

    def next_preamble(self) -> Preamble | None:
        return self._preambles[0] if self._preambles else None

    def preamble_sent(self) -> None:
        self._preambles.popleft()

    def greeting(self) -> Any:
        """Return the device's index, and events that the subprocess opens now, while nothing runs."""
        with self._lock:
            events = self._events.prepare(self.cuda.current_stream(self.device), EVENTS_PREPARED)
        return self.device.index, events

    def greeted(self, greeting: list[EventMessage]) -> None:
        with self._lock:
            for event in greeting:
                self._peers.open(event)

    def cut_off(self) -> int:
        """Return how many operations were cut off; one whose state cannot be asked counts as cut off."""
        with beside_captures(self.device):
            return sum(not call_tensors.has_ended(ASK_S_MAX) for call_tensors in tuple(self._running))

    def is_busy(self) -> bool:
        self._forget_what_is_over()
        return bool(self._running)

    def abandon(self) -> None:
        """Keep the arena for ever. The caller's tensors are safe: the subprocess sees only the arena."""
        self._is_abandoned = True
        self._arena.lose()

    def close(self) -> None:
        with beside_captures(self.device):
            with self._lock:
                self._is_dead = True
                self._peers = PeerEvents(self.cuda)  # the events of a dead process must not be touched
            while self._running:
                self._running.popleft().let_go()
            while self._failed:
                self._failed.pop().let_go()

    @property
    def is_dead(self) -> bool:
        """Whether the subprocess is dead, or cannot be killed."""
        return self._is_dead

    def stage(self, tensor: Tensor) -> tuple[Block[Export], TensorSpec]:
        """Make room for a tensor, and tell the subprocess of its memory."""
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise NotSupportedError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be handed to the subprocess of a "
                f"group on {self.device}: only dense tensors of that device can"
            )
        block, spec = self._arena.stage(tensor)
        export = block.segment
        if export.number not in self._told:
            self._told.add(export.number)
            self._preambles.append(((ToChild.MAP.value, UNASKED, *export.message), ()))
        return block, spec

    def give_back(self, blocks: list[Block[Export]], is_past: IsPast | None = None) -> None:
        """Take back blocks that are used no more, once the device has passed a point of this process's, if
        given.
        """
        if self._is_abandoned:
            return
        if is_past is None:
            self._arena.give_back(blocks)
        else:
            self._arena.give_back_when(is_past, blocks)

    def context(self, stream: torch.cuda.Stream) -> bytes:
        """Pack the event that the operation comes after, the stream, and the events that may be used
        again.
        """
        with self._lock:
            event, passed = self._events.record(stream), self._peers.take_passed()
        return note_of(event, (*stream_message(stream), *passed))

    def started(self, answer: tuple[Any, ...]) -> int:
        """Note that the subprocess has queued the operation; return the number of the event that marks its
        end.
        """
        end, passed = read_note(*answer)
        with self._lock:
            self._peers.open(end)
            self._events.free(passed)
        return end[0]

    def keep(self, call_tensors: _CudaCallTensors) -> None:
        """Keep the call's tensors until the operation is over."""
        self._running.append(call_tensors)

    def keep_failed(self, call_tensors: _CudaCallTensors) -> None:
        """Keep the call's tensors until the subprocess is dead."""
        self._failed.append(call_tensors)

    def order_after(self, end: int, stream: torch.cuda.Stream) -> bool:
        """Make the stream wait for the end of an operation; return False if that end cannot be told any
        more.
        """
        with self._lock:
            if not self._is_dead:
                self._peers.order(end, stream)
            return not self._is_dead

    def is_over(self, end: int, patience_s: float = -1) -> bool:
        """Return whether the device has reached the end of an operation, as far as can be told in
        `patience_s` seconds.
        """
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            return not self._is_dead and self._peers.is_over(end)
        finally:
            self._lock.release()

    def new_stream(self) -> torch.cuda.Stream:
        """Make a stream that waits for nothing of the caller's."""
        return self.cuda.new_stream(self.device.index, 0)

    def take_event(self) -> torch.cuda.Event:
        """Return an event that only this process uses."""
        return self._private.pop() if self._private else self.cuda.private_event()

    def give_event_back(self, event: torch.cuda.Event) -> None:
        """Take back an event that is neither waited for nor queried any more."""
        self._private.append(event)

    def _forget_what_is_over(self) -> None:
        """Retire the calls that are over, up to the first that is not: operations end nearly in their
        order.
        """
        while self._running and self._running[0].is_over():
            number = self._running.popleft().retire()
            with self._lock:
                self._peers.skip(number)


class _CudaCallTensors:
    """A `tensor_sharing.CallTensors` of CUDA tensors.

    It goes through three states: a stream has to wait for the end of the operation (`_end`), the results have
    to be copied, and `_done` has been recorded behind the copies.
    """

    def __init__(self, call: Call, exporter: CudaExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._call: Call | None = call  # keeps the tensors alive
        self._input_ids = set(map(id, tensors_of(call.inputs)))
        self._output_ids = set(map(id, tensors_of(call.outputs)))
        self._located: dict[int, TensorSpec] = {}  # a tensor that is output and input is one for both sides
        self._blocks: list[Block[Export]] = []
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None  # the caller's stream, once it copies the inputs
        self._number = -1  # the number of the event that marks the end
        self._end: int | None = None  # the same number, as long as a stream has to wait for it
        self._has_ended = False  # an end that was seen; otherwise `_done` tells
        self._done: torch.cuda.Event | None = None

    def locate(self, tensor: Tensor) -> TensorSpec:
        if (spec := self._located.get(id(tensor))) is None:
            block, spec = self._exporter.stage(tensor)
            self._located[id(tensor)] = spec
            self._blocks.append(block)
            staged = tensor_at(block.storage, spec)
            if id(tensor) in self._input_ids:
                self._inputs.append((staged, tensor))
            if id(tensor) in self._output_ids:
                self._outputs.append((tensor, staged))
        return spec

    def context(self) -> bytes:
        self._stream = self._exporter.cuda.current_stream(self.device)
        _copy(self._inputs)
        self._inputs.clear()
        return self._exporter.context(self._stream)

    def settle(self, request: Request) -> None:
        if request.outcome is Outcome.DONE:
            with self._lock, beside_captures(self.device):  # the answer may be read on any thread
                self._number = self._end = self._exporter.started(request.answer)
            self._exporter.keep(self)
        elif request.outcome is Outcome.FAILED:
            self._exporter.keep_failed(self)
        else:  # the operation was not begun, or the subprocess is dead
            with beside_captures(self.device):
                self.let_go()

    def operation(
        self, requests: Requests, request: Request, result: list[Any], failures: Failures
    ) -> RemoteOperation:
        return RemoteCudaOperation(requests, request, result, failures, self)

    @property
    def device(self) -> torch.device:
        """The device on which the operation runs."""
        return self._exporter.device

    @property
    def is_lost(self) -> bool:
        """Whether the subprocess is dead before the operation's end was seen, so that its results are
        unknown.
        """
        return self._end is not None and self._exporter.is_dead

    def order_current_stream(self) -> bool:
        """Make the device's current stream wait for the operation; return False if its end is lost."""
        return self.order(self._exporter.cuda.current_stream(self.device), is_callers=True)

    def order(self, stream: torch.cuda.Stream, *, is_callers: bool) -> bool:
        """Make a stream wait for the results of an operation that has been queued; return False if they are
        lost.

        Args:
            is_callers: whether the stream is the caller's. Then the caller's next work comes after the
              operation, and this object need not keep the tensors alive.
        """
        with self._lock:
            if self._end is not None and not self._exporter.order_after(self._end, stream):
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
        """Return whether the operation is lost, or over with its results in the caller's tensors."""
        if not self.has_ended():
            return False
        with self._lock:
            if self._done is None and self._blocks is not _GONE and self._end is None:
                self._bring_back(self._exporter.new_stream())
            return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def has_ended(self, patience_s: float = -1) -> bool:
        """Return whether the device is past the operation, as far as can be told in time; copy nothing."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            if self._end is not None and self._exporter.is_over(self._end, patience_s):
                self._end, self._has_ended = None, True
            if self._end is not None:
                return self._exporter.is_dead
            if self._has_ended or self._done is None:
                return True
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        finally:
            self._lock.release()

    def retire(self) -> int:
        """Release what an operation that is over holds; return the number of its event, which is needed no
        more.
        """
        with self._lock:
            done, self._done, blocks, self._blocks = self._done, None, self._blocks, _GONE
            self._call = None
        if done is not None:
            self._exporter.give_event_back(done)
        self._exporter.give_back(blocks)
        return self._number

    def let_go(self) -> None:
        """Release the blocks: no subprocess touches them any more, or ever will, but streams of this process
        may.
        """
        with self._lock:
            if self._end is None and self._number >= 0 and self._done is None:
                self._bring_back(self._exporter.new_stream())
            elif self._done is None:
                self._call = None
                self._outputs.clear()
            blocks, self._blocks = self._blocks, _GONE
            if self._done is not None:
                is_past: IsPast | None = keeping(self._call, self._done.query)
            else:
                is_past = None if self._stream is None else self._exporter.cuda.mark(self._stream)
        if blocks:
            self._exporter.give_back(blocks, is_past)

    def _bring_back(self, stream: torch.cuda.Stream) -> None:
        """Make a stream that comes after the operation copy its outputs, once."""
        outputs, self._outputs = self._outputs, []
        self._done = self._exporter.take_event()
        try:
            with self._exporter.cuda.on(stream):
                _copy(outputs)
        finally:
            self._done.record(stream)


# Stands in for blocks that were given back.
_GONE: list[Block[Export]] = []


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    if not pairs:
        return
    targets, sources = map(list, zip(*pairs, strict=True))
    with writing_to(*targets):
        if len(pairs) == 1:
            targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(targets, sources)


class RemoteCudaOperation(RemoteOperation):
    """An operation that a subprocess has queued on the device.

    `wait` makes the current stream wait, and the thread only until the subprocess has queued the
    operation. For the thread to wait as well, synchronize the stream after it.
    """

    def __init__(
        self,
        requests: Requests,
        request: Request,
        result: list[Any],
        failures: Failures,
        call_tensors: _CudaCallTensors,
    ) -> None:
        super().__init__(requests, request, result, failures)
        self._call_tensors = call_tensors

    def wait(self, deadline: float = FOREVER) -> None:
        """Make the current stream wait; the errors are those of RemoteOperation.wait."""
        super().wait(deadline)
        if not self._call_tensors.order_current_stream():
            raise self._lost_error().with_traceback(None)

    def is_over(self) -> bool:
        """Return whether the device has come to the operation's end, or it has failed."""
        if not super().is_over():
            return False
        return self._request.outcome is not Outcome.DONE or self._call_tensors.is_over()

    def error(self) -> Exception | None:
        """Return why the operation failed, or that the subprocess is gone before the device reached its
        end.
        """
        if (error := self._error_of_request()) is not None:
            return error
        return self._lost_error() if self._request.is_settled and self._call_tensors.is_lost else None

    def source_rank(self) -> int:
        """Return -1: NCCL has no receive from any source."""
        return -1

    def _new_future(self) -> Future[Any]:
        return Future(devices=[self._call_tensors.device])

    def _set_result(self, future: Future[Any]) -> None:
        with beside_captures(self._call_tensors.device):
            # The future records this stream's position, and a stream that waits for the future waits for
            # that.
            stream = torch.cuda.Stream(self._call_tensors.device)  # type: ignore[no-untyped-call]
            if not self._call_tensors.order(stream, is_callers=False):
                future.set_exception(self._lost_error())
                return
            with torch.cuda.stream(stream):
                future.set_result(self._result)

    def _lost_error(self) -> Exception:
        error = self._failures.describe(Request(UNASKED))
        return self.explain(error) or error
