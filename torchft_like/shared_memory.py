"""Memory of this process that others map, and the calls of torch that share that of a CUDA device.

torch counts the processes that map a storage of a device, in a file that both sides write to. Here only the
process whose memory it is touches that counter: the others map under the name of one that does not exist.
Baby groups say why (`process_group/baby/cuda_sharing.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchft_like.errors import NotSupportedError

# Returns whether the device has passed a certain point.
IsPast = Callable[[], bool]

# No process makes a counter file of this name: torch's own names begin with /torch_.
_NO_COUNTER = b"/torchft-nobody-counts-here"

_numbers = itertools.count(1)


class Segment:
    """Memory that both processes see: a number of its own, and what the subprocess needs to map it."""

    def __init__(self, *details: Any, descriptors: tuple[int, ...] = ()) -> None:
        self.number: int = next(_numbers)
        self.details = details
        self.descriptors = descriptors


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


cuda: TorchCuda = TorchCuda()


class Export(Segment):
    """Memory of a device that any number of other processes may map, one after the other.

    Its details are the device, the handle of the allocation, the bytes, and the offset in the allocation. A
    NotSupportedError says why memory cannot be shared.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        try:
            device, handle, nbytes, offset, counter, counter_offset, _, _ = cuda.share(storage)
        except RuntimeError as error:
            raise NotSupportedError(
                f"CUDA memory cannot be shared with another process: {error}. Memory from torch's own "
                "allocator without expandable_segments can"
            ) from error
        super().__init__(device, handle, nbytes, offset)
        # It returns the memory to torch with its storage: no process maps it any more, and none will.
        self.release: Callable[[], None] = functools.partial(cuda.decrement, counter, counter_offset)
