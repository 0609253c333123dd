"""Memory, events and streams of a GPU, shared between a trainer and its own subprocess.

Three things go from one process to the other, all of them as plain data (integers and bytes):

* *memory*: a storage is exported once, mapped by each subprocess once, and used under its number;
* *order*: an event that one side has recorded and the other side's stream waits for;
* *streams*: each of the trainer's has a counterpart in the subprocess.

torch counts the processes that map a storage, in a file that both sides write to: the one that maps
decrements when it is done, and only then the memory of a storage that has died is used again. A subprocess
that is killed never decrements, and the memory is lost. The trainer cannot make up for it, either, because it
cannot know whether the subprocess had decremented; a count that is one too low loses the memory, too. So here
the subprocess maps under a counter that does not exist, which torch ignores.

INVARIANTS
* A counter is taken from one to zero by the trainer, exactly once: when no subprocess maps the
  memory (it is dead and reaped) and none will.
* A subprocess unmaps nothing: torch would have its thread wait for the stream that is current.
* An event is recorded anew only when the device has passed every wait for it.

This module does not know how messages travel, nor how a subprocess is started and ended. The driver removes a
dead process's work from the device before the process can be reaped; the first invariant relies on that.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchft_like.errors import NotSupportedError

# Returns whether the device has passed a certain point.
IsPast = Callable[[], bool]

# (number, device, handle of the allocation, bytes, offset in it)
MemoryMessage = tuple[int, int, bytes, int, int]
# (number, device, handle the first time and None later)
EventMessage = tuple[int, int, bytes | None]
# (device, torch's id of the stream, priority)
StreamMessage = tuple[int, int, int]

# No process makes a counter file of this name: torch's own names begin with /torch_.
_NO_COUNTER = b"/torchft-nobody-counts-here"


class TorchCuda:
    """The calls of torch that this module needs; tests replace them."""

    def use_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def current_stream(self, device: torch.device | None = None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """Make the memory mappable for other processes; torch sets a new counter to one."""
        description: tuple[Any, ...] = storage._share_cuda_()  # type: ignore[no-untyped-call]
        return description

    def open(self, device: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        """Map memory of another process, without a part in its counter and without waiting for it."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
            device, handle, nbytes, offset, _NO_COUNTER, 0, b"", False
        )
        return storage

    def decrement(self, counter: bytes, offset: int) -> None:
        """Take a counter of this process down by one."""
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def handle_of(self, event: torch.cuda.Event) -> bytes:
        """Return the handle that `open_event` needs, of an event that was recorded."""
        return bytes(event.ipc_handle())  # type: ignore[no-untyped-call]

    def open_event(self, device: int, handle: bytes) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)  # type: ignore[no-untyped-call]
        return event

    def private_event(self) -> torch.cuda.Event:
        """Make an event of this process alone, which costs a tenth of one that can be shared."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def mark(self, stream: torch.cuda.Stream) -> IsPast:
        """Return a function that tells whether the stream has passed the point at which it is now."""
        event = self.private_event()
        event.record(stream)
        return event.query

    def new_stream(self, device: int, priority: int) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        return stream


_TORCH = TorchCuda()


class Export:
    """Memory of this process that any number of subprocesses may map, one after the other.

    Raises:
        NotSupportedError: the memory cannot be shared; the text says why.
    """

    def __init__(self, storage: torch.UntypedStorage, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        try:
            device, handle, nbytes, offset, counter, counter_offset, _, _ = cuda.share(storage)
        except RuntimeError as error:
            raise NotSupportedError(
                f"CUDA memory cannot be shared with the subprocess: {error}. Memory from torch's own "
                "allocator without expandable_segments can"
            ) from error
        self._counter = counter, counter_offset
        self.message: MemoryMessage = (next(_numbers), device, handle, nbytes, offset)

    @property
    def number(self) -> int:
        """The number of the memory in messages."""
        return self.message[0]

    def release(self) -> None:
        """Return the memory to torch with its storage: no subprocess maps it any more, and none will."""
        self._cuda.decrement(*self._counter)


_numbers = itertools.count(1)


class OwnEvents:
    """Events that this side records and the other side's streams wait for; for one thread at a time.

    It makes no more events than are in use at once.
    """

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
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
        event = self._cuda.new_event()
        event.record(stream)
        self._events.append(event)
        self._devices.append(device)
        return len(self._events) - 1, device, self._cuda.handle_of(event)

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

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._events: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[int, IsPast]] = []
        self._unused: list[int] = []

    def open(self, message: EventMessage) -> None:
        """Open an event that a stream may wait for later."""
        number, device, handle = message
        if handle is not None:
            self._events[number] = self._cuda.open_event(device, handle)

    def order(self, number: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the event; the caller reports with `skip` when that wait is passed."""
        self._events[number].wait(stream)

    def wait(self, number: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the event."""
        self.order(number, stream)
        self._waits.append((number, self._cuda.mark(stream)))

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


def stream_message(stream: torch.cuda.Stream) -> StreamMessage:
    """Describe a stream of the trainer's for `MirroredStreams`."""
    return stream.device_index, stream.stream_id, stream.priority


class MirroredStreams:
    """The subprocess's counterparts of the trainer's streams, which order its operations in the same way.

    There are as many as the trainer uses; torch's own pool has 32 for each priority.
    """

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._streams: dict[StreamMessage, torch.cuda.Stream] = {}

    def get(self, message: StreamMessage) -> torch.cuda.Stream:
        """Return the counterpart of a stream."""
        if (stream := self._streams.get(message)) is None:
            device, _, priority = message
            stream = self._streams[message] = self._cuda.new_stream(device, priority)
        return stream
