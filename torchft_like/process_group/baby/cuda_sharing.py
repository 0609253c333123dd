"""CUDA tensors that a subprocess sees: staged in the group's own memory, and ordered by CUDA events.

Exporting, mapping and unmapping a tensor of the caller's takes longer than copying it, and torch waits for
the device once a thousand are exported. So the group has memory of its own, which each subprocess maps once.
No subprocess ever touches the caller's tensors.

A request comes after the caller's stream has copied the inputs, and carries an event that this stream has
recorded. The subprocess runs the operation on a stream of its own that waits for it, and answers, as soon as
the operation is queued, with an event that stands for its end. `wait` makes the caller's stream wait for that
one, and copy the outputs. No thread waits for the device.

torch counts the processes that map a storage, in a file that both sides write to: the one that maps
decrements when it is done, and only then the memory of a storage that has died is used again. A subprocess
that is killed never decrements, and the memory is lost. The trainer cannot make up for it, either, because it
cannot know whether the subprocess had decremented; a count that is one too low loses the memory, too. So here
the subprocess maps under a counter that does not exist, which torch ignores.

INVARIANTS
* The outputs are copied once: by the first stream that waits for the operation, or, where it is found to be
  over before a stream has waited, by a stream of the exporter's. So after a subprocess was killed, only a
  stream that its caller made wait writes to a tensor.
* A block is given back when its operation is over, its outputs are copied, and the device has passed all that
  both processes do with it. What a failed operation still writes is unknown: its blocks are kept until the
  subprocess is dead.
* An arena lives for as long as its memory may be touched: by its group, by exporters until their subprocess
  is dead, by copies that the device has not passed. If a subprocess does not die, the arena lives for ever.
* A counter is taken from one to zero by the trainer, exactly once: when no subprocess maps the memory (it is
  dead and reaped) and none will. The driver removes a dead process's work from the device before the process
  can be reaped.
* A subprocess unmaps nothing: torch would have its thread wait for the stream that is current.
* An event is recorded anew only when the device has passed every wait for it, and its number is given back
  once, when nothing on this side can touch the event any more.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from lighthouse.forks import lock_of_each_process
from torchft_like.devices import beside_captures, keeping
from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.futures import fail
from torchft_like.process_group.baby.messages import UNASKED, Outcome
from torchft_like.process_group.baby.requests import NOT_DONE, RemoteOperation, Request
from torchft_like.process_group.baby.tensor_sharing import (
    SLAB_BYTES_MAX,
    Block,
    Blocks,
    CallTensors,
    Exporter,
    Importer,
    copy_all,
)
from torchft_like.process_group.collectives import Call
from torchft_like.process_group.nccl import refuse_capture
from torchft_like.process_group.work import FOREVER
from torchft_like.runtime.spin_wait import ask_until
from torchft_like.shared_memory import Export, IsPast, cuda

# (number, device, handle the first time and None later)
EventMessage = tuple[int, int, bytes | None]


class OwnEvents:
    """Events that this side records and the other side's streams wait for; for one thread at a time.

    It makes no more events than are in use at once.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._devices: list[int] = []
        self._free: dict[int, list[int]] = defaultdict(list)

    def record(self, stream: torch.cuda.Stream) -> EventMessage:
        """Record an event on the stream; return the message for `PeerEvents.wait`."""
        device = stream.device_index
        if self._free[device]:
            number = self._free[device].pop()
            self._events[number].record(stream)
            return number, device, None
        event = cuda.new_event()
        event.record(stream)
        self._events.append(event)
        self._devices.append(device)
        return len(self._events) - 1, device, cuda.handle_of(event)

    def prepare(self, stream: torch.cuda.Stream, count: int) -> list[EventMessage]:
        """Make events that the other side may open now, while nothing runs.

        Opening one later may block the thread until a busy device is done.
        """
        messages = [self.record(stream) for _ in range(count)]
        self.free(number for number, _, _ in messages)
        return messages

    def free(self, numbers: Iterable[int]) -> None:
        """Reuse these events: the other side's device has passed its waits for them."""
        for number in numbers:
            self._free[self._devices[number]].append(number)


class PeerEvents:
    """Events that the other side has recorded; for one thread at a time.

    Once the other side is dead its events must not be touched: drop this object.
    """

    def __init__(self) -> None:
        self._events: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[int, IsPast]] = []
        self._unused: list[int] = []

    def open(self, message: EventMessage) -> None:
        """Open an event that a stream may wait for later."""
        number, device, handle = message
        if handle is not None:
            self._events[number] = cuda.open_event(device, handle)

    def order(self, number: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the event; the caller reports with `skip` when that wait is passed."""
        self._events[number].wait(stream)

    def wait(self, number: int, stream: torch.cuda.Stream) -> None:
        self.order(number, stream)
        self._waits.append((number, cuda.mark(stream)))

    def is_over(self, number: int) -> bool:
        """Return whether the other side's device has reached the event."""
        return bool(self._events[number].query())  # type: ignore[no-untyped-call]

    def skip(self, number: int) -> None:
        """Note that nothing waits for the event any more, or will."""
        self._unused.append(number)

    def take_passed(self) -> list[int]:
        """Return the numbers that nothing waits for any more, for `OwnEvents.free`; each is returned once."""
        passed, self._unused = self._unused, []
        waits, self._waits = self._waits, []
        for number, is_past in waits:
            if is_past():
                passed.append(number)
            else:
                self._waits.append((number, is_past))
        return passed


LARGE_BYTES = 2 * 1024 * 1024
EVENTS_PREPARED = 16
ASK_S_MAX = 0.01

# Number and device of an event, how many numbers follow; the event's handle comes last.
_NOTE = struct.Struct("<qqI")


def note_of(event: EventMessage, numbers: Sequence[int]) -> bytes:
    """Pack an event and numbers into a fixed struct: the content of every request and every answer."""
    number, device, handle = event
    head = _NOTE.pack(number, device, len(numbers))
    return head + struct.pack(f"<{len(numbers)}q", *numbers) + (handle or b"")


def read_note(note: bytes) -> tuple[EventMessage, tuple[int, ...]]:
    number, device, count = _NOTE.unpack_from(note)
    numbers = struct.unpack_from(f"<{count}q", note, _NOTE.size)
    return (number, device, note[_NOTE.size + 8 * count :] or None), numbers


class Arena(Blocks):
    """A pool of blocks on one device."""

    BLOCK_BYTES_MIN = 512  # the alignment of torch's own allocator

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._exports: list[Export] = []
        self._late: list[tuple[IsPast, list[Block]]] = []
        weakref.finalize(self, _release, self._exports).atexit = False

    def give_back_when(self, is_past: IsPast, blocks: Iterable[Block]) -> None:
        """Take blocks back as soon as the device has passed the point that `is_past` asks about."""
        with _settling:
            self._late.append((is_past, list(blocks)))
            _with_late_blocks.add(self)

    def _take(self, nbytes: int) -> Block:
        with _settling:
            for arena in tuple(_with_late_blocks):
                arena._collect()
        return super()._take(nbytes)

    def _size(self, nbytes: int) -> int:
        if nbytes <= SLAB_BYTES_MAX:
            return super()._size(nbytes)
        return -(-nbytes // LARGE_BYTES) * LARGE_BYTES

    def _make_segment(self, nbytes: int) -> tuple[Export, torch.UntypedStorage]:
        # The current stream may still use memory that is free only by the order of its work.
        stream = cuda.new_stream(self.device.index, 0)
        try:
            with cuda.on(stream):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError as error:
            raise ProcessGroupError(
                f"no memory left on {self.device} to stage {nbytes} bytes for the subprocess: use smaller "
                "tensors, or fewer at a time, or ProcessGroupNCCL, which stages nothing"
            ) from error
        stream.synchronize()
        export = Export(memory)
        self._exports.append(export)
        return export, memory

    def _collect(self) -> None:
        late, self._late = self._late, []
        for is_past, blocks in late:
            if is_past():
                self.give_back(blocks)
            else:
                self._late.append((is_past, blocks))
        if not self._late:
            _with_late_blocks.discard(self)


_settling = lock_of_each_process()
_with_late_blocks: set[Arena] = set()
_lost: list[Arena] = []


def _release(exports: list[Export]) -> None:
    for export in exports:
        export.release()


class RemoteCudaOperation(RemoteOperation):
    """An operation that a subprocess has queued on the device.

    `wait` makes the current stream wait, and the thread only until the subprocess has queued the
    operation. With a deadline, and for a barrier, the thread waits for the device, too, as in torch.
    """

    _call_tensors: _CudaCallTensors

    def wait_until(self, deadline: float) -> None:
        super().wait_until(deadline)
        blocks = deadline < FOREVER or self._call_tensors.is_barrier
        if blocks and not ask_until(self._call_tensors.has_ended, deadline):
            raise ProcessGroupError(NOT_DONE)
        if not self._call_tensors.order_current_stream():
            raise self._lost_error().with_traceback(None)

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        return self._request.outcome is not Outcome.DONE or self._call_tensors.is_over()

    def exception(self) -> Exception | None:
        """Return why the operation failed, or that the subprocess died before the device reached its end."""
        if (error := self._error_of_request()) is not None:
            return error
        return self._lost_error() if self._request.is_settled and self._call_tensors.is_lost else None

    def _source_rank(self) -> int:
        """Return -1: NCCL has no receive from any source."""
        return -1

    def _complete_by_waiting(self, future: Future[Any]) -> None:
        self._requests.wait(self._request, FOREVER)
        if (error := self._error_of_request()) is not None:
            fail(future, error)
            return
        with beside_captures(self._call_tensors.device):
            # The future records this stream's position, and a stream that waits for the future waits for
            # that.
            stream = torch.cuda.Stream(self._call_tensors.device)  # type: ignore[no-untyped-call]
            if not self._call_tensors.order(stream, is_callers=False):
                fail(future, self._lost_error())
                return
            with torch.cuda.stream(stream):
                future.set_result(self._result)

    def _lost_error(self) -> Exception:
        error = self._describe(Request(UNASKED))
        return self.explain(error) or error


class CudaExporter(Exporter):
    """The trainer's side, with the device and the memory of the group."""

    OPERATION = RemoteCudaOperation

    def __init__(self, device: torch.device, arena: Arena) -> None:
        super().__init__(arena)
        self.device = device
        self._lock = threading.Lock()
        self._arena = arena
        self._events = OwnEvents()
        self._peers = PeerEvents()
        self._private: list[torch.cuda.Event] = []
        self.running: deque[_CudaCallTensors] = deque()  # until their operations are over
        self.failed: list[_CudaCallTensors] = []  # until the subprocess is dead
        self.is_dead: bool = False  # or cannot be killed

    def export(self, call: Call) -> _CudaCallTensors:
        refuse_capture(call.collective.name)
        self._forget_what_is_over()
        return _CudaCallTensors(call, self)

    def greeting(self) -> Any:
        """Return the device's index, and events that the subprocess opens now, while nothing runs."""
        with self._lock:
            events = self._events.prepare(cuda.current_stream(self.device), EVENTS_PREPARED)
        return self.device.index, events

    def greeted(self, greeting: list[EventMessage]) -> None:
        with self._lock:
            for event in greeting:
                self._peers.open(event)

    def cut_off(self) -> int:
        """Return how many operations are cut off, for good, by the kill that follows; those whose state
        cannot be asked in time, all together, count as cut off.
        """
        until = time.monotonic() + ASK_S_MAX
        with beside_captures(self.device):
            count = sum(
                not call_tensors.has_ended(max(0.0, until - time.monotonic()))
                for call_tensors in tuple(self.running)
            )
        self.is_dead = True
        return count

    def is_busy(self) -> bool:
        self._forget_what_is_over()
        return bool(self.running)

    def abandon(self) -> None:
        """Keep the arena for ever. The caller's tensors are safe: the subprocess sees only the arena."""
        super().abandon()
        _lost.append(self._arena)

    def close(self) -> None:
        with beside_captures(self.device):
            with self._lock:
                self.is_dead = True
                self._peers = PeerEvents()  # the events of a dead process must not be touched
            while self.running:
                self.running.popleft().let_go()
            while self.failed:
                self.failed.pop().let_go()

    def find(self, tensor: Tensor) -> None:
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise NotSupportedError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be handed to the subprocess of a "
                f"group on {self.device}: only dense tensors of that device can"
            )

    def give_back_when(self, is_past: IsPast, blocks: list[Block]) -> None:
        """Take back unused blocks, once the device has passed a point of this process's."""
        if not self._is_abandoned:
            self._arena.give_back_when(is_past, blocks)

    def context(self, stream: torch.cuda.Stream) -> bytes:
        """Pack the event that the operation comes after, the stream, and the events to be used again."""
        with self._lock:
            event, passed = self._events.record(stream), self._peers.take_passed()
        return note_of(event, (stream.device_index, stream.stream_id, stream.priority, *passed))

    def started(self, answer: tuple[Any, ...]) -> int:
        """Note that the operation is queued; return the number of the event that marks its end."""
        end, passed = read_note(*answer)
        with self._lock:
            self._peers.open(end)
            self._events.free(passed)
        return end[0]

    def order_after(self, end: int, stream: torch.cuda.Stream) -> bool:
        """Make the stream wait for the end of an operation; return False if that end is lost."""
        with self._lock:
            if not self.is_dead:
                self._peers.order(end, stream)
            return not self.is_dead

    def is_over(self, end: int, patience_s: float = -1) -> bool:
        """Return whether the device has reached an operation's end, as far as can be told in time."""
        if not self._lock.acquire(timeout=patience_s):
            return False
        try:
            return not self.is_dead and self._peers.is_over(end)
        finally:
            self._lock.release()

    def new_stream(self) -> torch.cuda.Stream:
        """Make a stream that waits for nothing of the caller's."""
        return cuda.new_stream(self.device.index, 0)

    def take_event(self) -> torch.cuda.Event:
        """Return an event that only this process uses."""
        return self._private.pop() if self._private else cuda.private_event()

    def give_event_back(self, event: torch.cuda.Event) -> None:
        """Take back an event that is neither waited for nor queried any more."""
        self._private.append(event)

    def _forget_what_is_over(self) -> None:
        """Retire the first calls that are over: operations end nearly in their order."""
        while self.running and self.running[0].is_over():
            number = self.running.popleft().retire()
            with self._lock:
                self._peers.skip(number)


class _CudaCallTensors(CallTensors):
    """The tensors of a call on a device.

    It goes through three states: a stream has to wait for the end of the operation (`_end`), the results have
    to be copied, and `_done` has been recorded behind the copies.
    """

    _exporter: CudaExporter

    def __init__(self, call: Call, exporter: CudaExporter) -> None:
        super().__init__(call, exporter)
        self._lock = threading.Lock()
        self.is_barrier: bool = call.collective.name == "barrier"
        self._stream: torch.cuda.Stream | None = None  # the caller's stream, once it copies the inputs
        self._number = -1  # the number of the event that marks the end
        self._end: int | None = None  # the same number, as long as a stream has to wait for it
        self._has_ended = False  # an end that was seen; otherwise `_done` tells
        self._done: torch.cuda.Event | None = None

    def context(self) -> bytes:
        self._stream = cuda.current_stream(self.device)
        copy_all(self._inputs)
        return self._exporter.context(self._stream)

    def settle(self, request: Request) -> None:
        if request.outcome is Outcome.DONE:
            with self._lock, beside_captures(self.device):  # the answer may be read on any thread
                self._number = self._end = self._exporter.started(request.answer)
            self._exporter.running.append(self)
        elif request.outcome is Outcome.FAILED:
            self._exporter.failed.append(self)
        else:  # the operation was not begun, or the subprocess is dead
            with beside_captures(self.device):
                self.let_go()

    @property
    def device(self) -> torch.device:
        """The device on which the operation runs."""
        return self._exporter.device

    @property
    def is_lost(self) -> bool:
        """Whether the subprocess died before the operation's end was seen: the results are unknown."""
        return self._end is not None and self._exporter.is_dead

    def order_current_stream(self) -> bool:
        """Make the device's current stream wait for the operation; return False if its end is lost."""
        return self.order(cuda.current_stream(self.device), is_callers=True)

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
        """Release what an operation that is over holds; return the number of its event."""
        with self._lock:
            done, self._done, blocks, self._blocks = self._done, None, self._blocks, _GONE
            self._call = None
        if done is not None:
            self._exporter.give_event_back(done)
        self._exporter.give_back(blocks)
        return self._number

    def let_go(self) -> None:
        """Release the blocks, which streams of this process may still touch, and no subprocess any more."""
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
                is_past = None if self._stream is None else cuda.mark(self._stream)
        if blocks and is_past is not None:
            self._exporter.give_back_when(is_past, blocks)
        else:
            self._exporter.give_back(blocks)

    def _bring_back(self, stream: torch.cuda.Stream) -> None:
        """Make a stream that comes after the operation copy its outputs, once."""
        self._done = self._exporter.take_event()
        try:
            with cuda.on(stream):
                copy_all(self._outputs)
        finally:
            self._done.record(stream)


# Stands in for blocks that were given back.
_GONE: list[Block] = []


class CudaImporter(Importer):
    """The subprocess's side. What it maps it maps as long as it lives."""

    def __init__(self, greeting: Any) -> None:
        super().__init__()
        device, events = greeting
        self._events = OwnEvents()
        self._peers = PeerEvents()
        # The counterparts of the trainer's streams, which order the operations in the same way. There are as
        # many as the trainer uses; torch's own pool has 32 for each priority.
        self._counterpart = functools.cache(lambda device, _, priority: cuda.new_stream(device, priority))
        cuda.use_device(device)
        for event in events:
            self._peers.open(event)

    def greeting(self) -> list[EventMessage]:
        """Return events that the trainer opens now, while nothing runs."""
        return self._events.prepare(cuda.current_stream(), EVENTS_PREPARED)

    @contextlib.contextmanager
    def entered(self, context: bytes | None) -> Iterator[None]:
        """Enter the counterpart of the caller's stream, after the work that the caller has queued there."""
        event, (device, stream_id, priority, *freed) = read_note(context or b"")
        stream = self._counterpart(device, stream_id, priority)
        self._events.free(freed)
        with cuda.on(stream):
            self._peers.open(event)
            self._peers.wait(event[0], stream)
            yield

    def answer_when_started(self, work: Work | None) -> tuple[bytes]:
        """Return the event that marks the operation's end, and the trainer's events that are free again."""
        if work is not None:
            work.wait()
        stream = cuda.current_stream()
        return (note_of(self._events.record(stream), self._peers.take_passed()),)

    def _open(self, details: tuple[Any, ...], descriptors: list[int]) -> torch.UntypedStorage:
        device, handle, nbytes, offset = details
        return cuda.open(device, handle, nbytes, offset)
