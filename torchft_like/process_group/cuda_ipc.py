"""Memory, order and streams of a GPU, shared between a trainer and a subprocess of its own.

Three things cross the border, all of them as plain data (integers and bytes):

* *memory*: a storage is exported once, mapped by each subprocess once, and used under its number;
* *order*: an event that one side has recorded and the other side's stream waits for;
* *streams*: each of the trainer's has a counterpart in the subprocess.

torch counts who maps a storage in a file that both sides write to: the one that maps decrements when
it is done, and only then the memory of a storage that has died is used again. A subprocess that is
killed never decrements, and the memory is lost. The trainer cannot make up for it, either, because
it cannot know whether the subprocess had come to it; a count that is one too low loses the memory,
too. So here the subprocess maps under a counter that does not exist, which torch ignores.

INVARIANTS
* A counter is taken from one to zero by the trainer, exactly once: when no subprocess maps the
  memory (it is dead and reaped) and none will.
* A subprocess unmaps nothing: torch would have its thread wait for the stream that is current.
* An event is recorded anew only when the device has passed every wait for it.

How messages travel, and how a subprocess is started and ended, is not known here. The driver takes a
dead process's work off the device before the process can be reaped; the first invariant leans on it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchft_like.errors import NotSupportedError

# Whether the device has passed a certain point.
IsPast = Callable[[], bool]

# (number, device, handle of the allocation, bytes, offset in it)
MemoryMessage = tuple[int, int, bytes, int, int]
# (number, device, handle the first time and None later)
EventMessage = tuple[int, int, bytes | None]
# (device, torch's id of the stream, priority)
StreamMessage = tuple[int, int, int]

# No process makes a counter file of this name: torch's own begin with /torch_.
_NO_COUNTER = b"/torchft-nobody-counts-here"


class TorchCuda:
    """What is asked of torch, in one place."""

    def use_device(self, index: int) -> None:
        """Make it the thread's current device."""
        torch.cuda.set_device(index)

    def current_stream(self, device: torch.device | None = None) -> torch.cuda.Stream:
        """Of a device, or of the current one."""
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """In the block this is the current stream."""
        return torch.cuda.stream(stream)

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """Make the memory mappable for others; sets a new counter to one."""
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
        """One that can be shared."""
        return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def handle_of(self, event: torch.cuda.Event) -> bytes:
        """What `open_event` needs; for an event that was recorded."""
        return bytes(event.ipc_handle())  # type: ignore[no-untyped-call]

    def open_event(self, device: int, handle: bytes) -> torch.cuda.Event:
        """Another process's event."""
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), handle)  # type: ignore[no-untyped-call]
        return event

    def private_event(self) -> torch.cuda.Event:
        """One of this process alone, which costs a tenth of one that can be shared."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def mark(self, stream: torch.cuda.Stream) -> IsPast:
        """Whether the stream has come to where it is now."""
        event = self.private_event()
        event.record(stream)
        return event.query

    def new_stream(self, device: int, priority: int) -> torch.cuda.Stream:
        """One from torch's pool."""
        stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        return stream


_TORCH = TorchCuda()


class Export:
    """Memory of this process that any number of subprocesses may map, one after the other.

    Raises:
        NotSupportedError: the memory cannot be shared; says why.
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
        """What stands for the memory in messages."""
        return self.message[0]

    def release(self) -> None:
        """No subprocess maps it any more, and none will: the memory goes back to torch with its storage."""
        self._cuda.decrement(*self._counter)


_numbers = itertools.count(1)


class MemoryImports:
    """The subprocess's side of shared memory; for one thread."""

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._mapped: dict[int, torch.UntypedStorage] = {}

    def map(self, message: MemoryMessage) -> None:
        """Map what an `Export` says, for as long as this process lives."""
        number, device, handle, nbytes, offset = message
        self._mapped[number] = self._cuda.open(device, handle, nbytes, offset)

    def storage(self, number: int) -> torch.UntypedStorage:
        """The storage of that number."""
        return self._mapped[number]


class OwnEvents:
    """Events that this side records and the other side's streams wait for; for one thread at a time.

    It makes as many as are in use at once, and no more.
    """

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._events: list[torch.cuda.Event] = []
        self._devices: list[int] = []
        self._free: dict[int, list[int]] = defaultdict(list)

    def record(self, stream: torch.cuda.Stream) -> EventMessage:
        """Record an event on the stream; the message is for `PeerEvents.wait`."""
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
        """Make some that the other side may open now, while nothing runs.

        Opening one later may wait for a device that is busy, and the thread with it.
        """
        messages = [self.record(stream) for _ in range(count)]
        self.free(number for number, _, _ in messages)
        return messages

    def free(self, numbers: Iterable[int]) -> None:
        """The other side's device has passed its waits for these."""
        for number in numbers:
            self._free[self._devices[number]].append(number)


class PeerEvents:
    """Events that the other side has recorded; for one thread at a time.

    Once the other side is dead its events must not be touched: forget this object.
    """

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._events: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[int, IsPast]] = []
        self._unused: list[int] = []

    def open(self, message: EventMessage) -> None:
        """Take note of an event that is to be waited for, or not, later."""
        number, device, handle = message
        if handle is not None:
            self._events[number] = self._cuda.open_event(device, handle)

    def order(self, number: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for it; the caller says with `skip` when the device has passed that."""
        self._events[number].wait(stream)

    def wait(self, number: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for it."""
        self.order(number, stream)
        self._waits.append((number, self._cuda.mark(stream)))

    def is_over(self, number: int) -> bool:
        """Whether the other side's device has come to it."""
        return bool(self._events[number].query())  # type: ignore[no-untyped-call]

    def skip(self, number: int) -> None:
        """Nobody waits for it any more, or will."""
        self._unused.append(number)

    def take_passed(self) -> list[int]:
        """The numbers that nothing waits for any more, for `OwnEvents.free`; each is given once."""
        passed, self._unused = self._unused, []
        waits, self._waits = self._waits, []
        for number, is_past in waits:
            if is_past():
                passed.append(number)
            else:
                self._waits.append((number, is_past))
        return passed


def stream_message(stream: torch.cuda.Stream) -> StreamMessage:
    """What names a stream of the trainer's to `MirroredStreams`."""
    return stream.device_index, stream.stream_id, stream.priority


class MirroredStreams:
    """The subprocess's counterparts of the trainer's streams: what one orders, the other does, too.

    As many as the trainer uses, of which torch's own pool has 32 for each priority.
    """

    def __init__(self, cuda: TorchCuda = _TORCH) -> None:
        self._cuda = cuda
        self._streams: dict[StreamMessage, torch.cuda.Stream] = {}

    def get(self, message: StreamMessage) -> torch.cuda.Stream:
        """The counterpart."""
        if (stream := self._streams.get(message)) is None:
            device, _, priority = message
            stream = self._streams[message] = self._cuda.new_stream(device, priority)
        return stream
