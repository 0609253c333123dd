"""The host's memory that states pass through: buffers between a device and the host, and that of a snapshot.

A device copies at its full speed where the host's memory is pinned, so a few pinned buffers are used in turn.
While one is copied by the device, on a stream of its own, the processor moves what the one before has
brought, or fills the next.

The memory of a whole snapshot is not pinned: the kernel has to make and lock each page of it first, which
takes longer than to copy the bytes once more within the host, and it could not be marked as free afterwards
(`KeptMemory`). torch keeps the buffers for the next copy.

INVARIANTS
* A buffer is used again when all that was begun with it is over, and so is the memory of a source.
* When a block of `ToHost` or `ToDevice` is left, also by an error, nothing of it is under way.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from torchft_like.devices import beside_captures
from torchft_like.dtypes import as_bytes
from torchft_like.plain_data import settled
from torchft_like.writing import writing_to

TO_HOST_BYTES, TO_HOST_BUFFERS = 32 * 1024 * 1024, 2
TO_DEVICE_BUFFERS = 4  # of a piece each, for each thread that receives

Act = Callable[[], object]


class TorchDevices:
    """The calls of torch that this module needs; tests replace them."""

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies on a device that copies beside the processor."""
        return tensor.is_cuda

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy between a buffer and a device, on the thread's current stream."""
        target.copy_(source, non_blocking=True)

    def stream_after_current(self, device: torch.device) -> torch.cuda.Stream:
        """Make a stream that comes after all that the thread's current one has to do."""
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> Act:
        """Return a function that waits until the stream has passed the point at which it is now."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event.synchronize

    def synchronize(self, device: torch.device) -> None:
        """Wait for all that the thread's current stream has to do."""
        with beside_captures(device):
            torch.cuda.current_stream(device).synchronize()


devices: TorchDevices = TorchDevices()


class _Staging:
    """A block of copies through buffers that are used in turn, at whose end all copies that were begun in it
    are over; for one thread, which it keeps from spoiling captures meanwhile.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._count = count
        self._block = ExitStack()
        self._free: list[Tensor] = []
        self._under_way: deque[tuple[Tensor, list[Act], list[Act]]] = deque()
        self._streams: dict[torch.device, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with self._block:
                for wait in [devices.mark(stream) for stream in self._streams.values()]:
                    wait()
                self._under_way.clear()

    def _take(self) -> Tensor:
        """Return a buffer with which nothing is under way any more."""
        if not self._free and len(self._under_way) < self._count:
            return devices.buffer(self._nbytes)
        if not self._free:
            self._settle()
        return self._free.pop()

    def _use(self, device: torch.device) -> None:
        """Make ready for copies from or to a device; the first call comes before all others."""
        if not self._streams:
            self._block.enter_context(beside_captures(device))
        if device not in self._streams:
            self._streams[device] = devices.stream_after_current(device)

    def _begin(self, device: torch.device, target: Tensor, source: Tensor) -> None:
        """Begin to copy between a buffer and a device's tensor."""
        with devices.on(self._streams[device]), writing_to(target):
            devices.copy(target, source)

    def _pass_on(self, buffer: Tensor, then: list[Act]) -> None:
        """Have the buffer used again when what was begun is over and `then` was called."""
        waits = [devices.mark(stream) for stream in self._streams.values()]
        self._under_way.append((buffer, waits, then))

    def _settle(self) -> None:
        buffer, waits, then = self._under_way.popleft()
        for act in (*waits, *then):
            act()
        self._free.append(buffer)

    def _finish(self) -> None:
        """Wait for all that is under way, and call what is to be called then."""
        while self._under_way:
            self._settle()


class ToHost(_Staging):
    """A block in which tensors of devices are copied to the host, and other things done, in one order.

    Args:
        nbytes: the bytes of all tensors, or more.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(min(nbytes, TO_HOST_BYTES), TO_HOST_BUFFERS)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._then: list[Act] = []

    def copy(self, tensor: Tensor, place: memoryview) -> None:
        """Copy the elements of a device's tensor, in contiguous order, to a place of as many bytes."""
        self._use(tensor.device)
        with devices.on(self._streams[tensor.device]):
            source = as_bytes(settled(tensor.detach()))
        target = torch.frombuffer(place, dtype=torch.uint8)
        at = 0
        while at < len(source):
            if self._used == len(self._buffer):
                self._empty()
                self._buffer, self._used = self._take(), 0
            count = min(len(source) - at, len(self._buffer) - self._used)
            part = self._buffer[self._used : self._used + count]
            self._begin(tensor.device, part, piece := source[at : at + count])
            self._then.append(partial(_move, target[at : at + count], part, piece))
            at, self._used = at + count, self._used + count

    def then(self, act: Act) -> None:
        """Call a function when all before it is done."""
        if self._streams:
            self._then.append(act)
        else:
            act()

    def _empty(self) -> None:
        if self._then:
            self._pass_on(self._buffer, self._then)
            self._then = []

    def _finish(self) -> None:
        self._empty()
        super()._finish()


def _move(target: Tensor, buffer: Tensor, source: Tensor) -> None:
    """Move what has come in a buffer; the device's memory was kept until now."""
    target.copy_(buffer)


class ToDevice(_Staging):
    """A block in which pieces come to the host one after the other, and go on to a device's tensors."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(piece_bytes, TO_DEVICE_BUFFERS)

    def window(self, target: Tensor) -> Iterator[memoryview]:
        """Yield memory for the bytes of a tensor of uint8 on a device; resume when they are in it."""
        self._use(target.device)
        buffer = self._take()
        part = buffer[: len(target)]
        yield part.numpy().data
        self._begin(target.device, target, part)
        self._pass_on(buffer, [])


HUGE_FROM = 4 * 1024 * 1024  # bytes of memory that is worth huge pages
FOLD_MAX = 2  # kept memory that is larger than what is wanted by more than this is given back


class KeptMemory:
    """A lender of memory, which keeps one piece of what was given back.

    Fresh memory costs more than all that is done with it: the kernel zeroes each page that it gives, which
    takes longer than to fill that page and to send it. So the memory of the last snapshot is kept, marked as
    free (MADV_FREE): the kernel takes pages of it where a process needs some, and the next snapshot finds the
    others as they were. The pages are huge where the system allows it: a page fault for each small one would
    take as long as the zeros.
    """

    def __init__(self) -> None:
        # A deque needs no lock, which the garbage collector might take while it is held.
        self._kept: deque[mmap.mmap] = deque(maxlen=1)

    def lend(self, nbytes: int, borrower: object) -> memoryview:
        """Return so many bytes of memory, which are the borrower's until it is garbage.

        They hold anything: zeros, or what an earlier borrower has written.
        """
        memory = self._fitting(max(nbytes, 1))
        weakref.finalize(borrower, self._keep, memory).atexit = False
        return memoryview(memory)[:nbytes]

    def _fitting(self, nbytes: int) -> mmap.mmap:
        with suppress(IndexError):
            if nbytes <= len(memory := self._kept.pop()) <= FOLD_MAX * nbytes:
                return memory
        return fresh_memory(nbytes)

    def _keep(self, memory: mmap.mmap) -> None:
        memory.madvise(mmap.MADV_FREE)
        self._kept.append(memory)


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Return memory of huge pages, if the kernel has some."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
