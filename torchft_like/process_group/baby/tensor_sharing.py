"""How a subprocess comes to see the tensors of a call: what is common to each kind of memory, and CPU memory.

The trainer's side is an `Exporter`, the subprocess's an `Importer`. A segment is memory that both processes
see, named by a number. A tensor that does not lie in one is *staged*: copied into a block, which is cut out
of a segment and used again, and copied back if the operation writes it. `cuda_sharing` derives from these
classes, too; the two sides of the backend know no more than them.

A segment of CPU memory is a file in memory, whose descriptor the trainer sends to the subprocess once. A
tensor that lives in shared memory is a segment by itself and is never copied.

INVARIANTS
* A block is given back only when neither process can touch it any more.
* A segment's number never stands for two storages.
* Files in memory have no name: whichever process is killed, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.process_group.baby.messages import (
    UNASKED,
    Message,
    Outcome,
    TensorSpec,
    ToChild,
    answer_for,
    contiguous_spec,
    spec_of,
    storage_of,
    tensor_at,
)
from torchft_like.process_group.baby.requests import RemoteOperation, Request
from torchft_like.process_group.collectives import POINT_TO_POINT, Call, tensors_of
from torchft_like.shared_memory import Segment
from torchft_like.writing import writing_to

SLAB_BYTES_MAX = 1024 * 1024
SLAB_BLOCKS_MAX = 64
TENSORS_KEPT_MAX = 1024  # per storage; a tensor is a view and takes about a kilobyte

# Sends a message, with descriptors of which the receiver gets duplicates.
Send = Callable[[Message, tuple[int, ...]], None]
# Pairs of a tensor and the one that is copied to it.
Copies = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a segment. `life` identifies the blocks made between two calls of `Blocks.close`."""

    segment: Segment
    storage: torch.UntypedStorage
    start: int
    nbytes: int
    life: object


class Blocks(ABC):
    """A pool of blocks. Until `close` it keeps as many as were ever in use at once."""

    BLOCK_BYTES_MIN = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._life = object()

    def stage(self, tensor: Tensor) -> tuple[Block, TensorSpec]:
        """Return a block with room for the tensor's elements, in contiguous order, and its description."""
        block = self._take(tensor.numel() * tensor.element_size())
        return block, contiguous_spec(tensor, block.segment.number, block.start // tensor.element_size())

    def give_back(self, blocks: Iterable[Block]) -> None:
        with self._lock:
            for block in blocks:
                if block.life is self._life:
                    self._free[block.nbytes].append(block)

    def close(self) -> None:
        """Release the memory; that of a block in use is released when the block is dropped."""
        with self._lock:
            self._free.clear()
            self._life = object()

    @abstractmethod
    def _make_segment(self, nbytes: int) -> tuple[Segment, torch.UntypedStorage]:
        """Make a segment; return it, and the storage that it is in this process."""

    def _size(self, nbytes: int) -> int:
        return max(self.BLOCK_BYTES_MIN, 1 << (nbytes - 1).bit_length())

    def _take(self, nbytes: int) -> Block:
        size = self._size(nbytes)
        with self._lock:
            if not (free := self._free[size]):
                slab = max(size, min(SLAB_BLOCKS_MAX * size, SLAB_BYTES_MAX))
                segment, storage = self._make_segment(slab)
                free += [Block(segment, storage, start, size, self._life) for start in range(0, slab, size)]
            return free.pop()


class CallTensors(ABC):
    """The tensors of one call, which are kept alive while the subprocess may use them.

    One thread at a time makes and fills them.
    """

    def __init__(self, call: Call, exporter: Exporter) -> None:
        self._call: Call | None = call
        self._exporter = exporter
        self._located: dict[int, TensorSpec] = {}  # a tensor that is output and input is one for both sides
        self._blocks: list[Block] = []
        self._inputs: Copies = []
        self._outputs: Copies = []

    @functools.cached_property
    def _places(self) -> tuple[set[int], set[int]]:
        """The tensors that the subprocess writes to, and those of them whose values it does not need.

        It needs those of tensors that are sizes. A message may be shorter than the tensor that receives it.
        """
        if (call := self._call) is None:
            return set(), set()
        written = set(map(id, tensors_of(call.outputs)))
        if call.collective.name in POINT_TO_POINT:
            return written, set()
        return written, written.difference(map(id, tensors_of(call.inputs)))

    def locate(self, tensor: Tensor) -> TensorSpec:
        """Return where the subprocess finds the tensor, from now on until `settle`."""
        if (spec := self._located.get(id(tensor))) is not None:
            return spec
        if (spec := self._exporter.find(tensor)) is None:
            block, spec = self._exporter.stage(tensor)
            self._blocks.append(block)
            staged = tensor_at(block.storage, spec)
            written, only_written = self._places
            if id(tensor) not in only_written:
                self._inputs.append((staged, tensor))
            if id(tensor) in written:
                self._outputs.append((tensor, staged))
        self._located[id(tensor)] = spec
        return spec

    @abstractmethod
    def context(self) -> bytes | None:
        """Copy the inputs, once, after the last `locate`; return what the subprocess has to know besides."""

    @abstractmethod
    def settle(self, request: Request) -> None:
        """Give the tensors back to the caller: the request is over, or was never sent."""


def copy_all(copies: Copies) -> None:
    """Copy the second tensor of each pair to the first, and forget the pairs."""
    if not copies:
        return
    targets, sources = map(list, zip(*copies, strict=True))
    copies.clear()
    with writing_to(*targets):
        # torch copies no lists of views that negate or conjugate.
        if len(targets) == 1 or any(tensor.is_neg() or tensor.is_conj() for tensor in (*targets, *sources)):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, sources)


class Exporter(ABC):
    """The trainer's side of one subprocess's memory. `send`, which the backend sets, tells the subprocess
    what it has to know before a request.
    """

    # The class of the operations behind the caller's works.
    OPERATION: ClassVar[type[RemoteOperation]] = RemoteOperation

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._mapped: set[int] = set()
        self._is_abandoned = False
        self.send: Send = drop

    @abstractmethod
    def export(self, call: Call) -> CallTensors:
        """Return an object for the tensors of one call."""

    @abstractmethod
    def find(self, tensor: Tensor) -> TensorSpec | None:
        """Return where the subprocess sees the tensor itself; None if it has to be staged.

        Raises:
            NotSupportedError: the subprocess cannot be given the tensor; the text says why.
        """

    def stage(self, tensor: Tensor) -> tuple[Block, TensorSpec]:
        """Make room for a tensor, and tell the subprocess of its memory."""
        block, spec = self._blocks.stage(tensor)
        self._map(block.segment)
        return block, spec

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Take back the blocks of a request that is settled."""
        if not self._is_abandoned:
            self._blocks.give_back(blocks)

    def greeting(self) -> Any:  # noqa: B027 - not every kind of memory needs one
        """Return what the subprocess's side is made of, as plain data."""

    def greeted(self, greeting: Any) -> None:  # noqa: B027
        """Take the greeting of the subprocess's side, which it sent when it was made."""

    def cut_off(self) -> int:
        """Return how many operations that were answered may not be over, just before a kill.

        This must not block: a lock may be held by a thread whose wait only the kill ends.
        """
        return 0

    def is_busy(self) -> bool:
        """Return whether a device has yet to pass an answered operation, or the copies of its results."""
        return False

    def abandon(self) -> None:
        """Never use again what the subprocess may still touch, because it does not die."""
        self._is_abandoned = True

    @abstractmethod
    def close(self) -> None:
        """Take everything back: the subprocess is dead and reaped."""

    def _map(self, segment: Segment) -> None:
        """Let the subprocess map a segment, unless it has."""
        if segment.number not in self._mapped:
            self._mapped.add(segment.number)
            self.send((ToChild.MAP.value, UNASKED, segment.number, *segment.details), segment.descriptors)


def drop(message: Message, descriptors: tuple[int, ...]) -> None:
    """Send nothing: there is no subprocess yet, or no longer."""


class Importer:
    """The subprocess's side, made of the exporter's greeting; for the thread that reads requests."""

    def __init__(self, _: Any = None) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Per storage, as a job uses its tensors again.
        self._tensors: dict[int, dict[TensorSpec, Tensor]] = {}

    def greeting(self) -> Any:
        """Return the plain data for `Exporter.greeted`, once the backend is made."""

    def map(self, number: int, details: tuple[Any, ...], descriptors: list[int]) -> None:
        """Map a segment that later requests use."""
        self._storages[number] = self._open(details, descriptors)
        self._tensors[number] = {}

    def unmap(self, number: int) -> None:
        """Release a segment that no later request uses."""
        self._storages.pop(number, None)
        self._tensors.pop(number, None)

    def tensor(self, spec: TensorSpec) -> Tensor:
        number = storage_of(spec)
        known = self._tensors[number]
        if (tensor := known.get(spec)) is None:
            if len(known) >= TENSORS_KEPT_MAX:
                known.clear()
            tensor = known[spec] = tensor_at(self._storages[number], spec)
        return tensor

    def entered(self, context: bytes | None) -> AbstractContextManager[None]:
        """Return the context within which the operation of a request is started."""
        return _NOTHING

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """Return what to answer at once, within `entered`; None if the answer has to wait."""
        raise NotImplementedError

    def _open(self, details: tuple[Any, ...], descriptors: list[int]) -> torch.UntypedStorage:
        """Return a segment as a storage of this process."""
        raise NotImplementedError


_NOTHING = contextlib.nullcontext()


_maps = Path("/proc/self/maps")


class CpuExporter(Exporter):
    """The trainer's side; tensors that do not live in shared memory are staged in blocks of `staging`."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(staging)
        self._exports = Exports()

    def export(self, call: Call) -> _CpuCallTensors:
        for number in self._exports.take_dead():
            self._mapped.discard(number)
            self.send((ToChild.UNMAP.value, UNASKED, number), ())
        return _CpuCallTensors(call, self)

    def find(self, tensor: Tensor) -> TensorSpec | None:
        require_dense(tensor)
        if (found := self._exports.find(tensor)) is None:
            return None
        self._map(found[0])
        return found[1]

    def close(self) -> None:
        """Drop the exports; the subprocess's view of the memory went with the process."""
        self._exports.close()


class _CpuCallTensors(CallTensors):
    def context(self) -> None:
        copy_all(self._inputs)

    def settle(self, request: Request) -> None:
        try:
            if request.outcome is Outcome.DONE:
                copy_all(self._outputs)
        except RuntimeError as error:  # an output that cannot be written to
            request.outcome, request.answer = Outcome.REFUSED, answer_for(error)
        finally:
            blocks, self._blocks = self._blocks, []
            self._exporter.give_back(blocks)


class CpuImporter(Importer):
    """The subprocess's side."""

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """Answer at once only if there is no work: the outputs are there when it ends."""
        return () if work is None else None

    def _open(self, details: tuple[Any, ...], descriptors: list[int]) -> torch.UntypedStorage:
        (nbytes,), (descriptor,) = details, descriptors
        storage = open_segment(descriptor, nbytes)
        os.close(descriptor)
        return storage


def require_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized:
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        raise NotSupportedError(
            f"a {kind} tensor on {tensor.device} cannot be handed to the subprocess of a CPU group: only "
            "dense CPU tensors can"
        )


def open_segment(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map the file of a descriptor into this process as a storage."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(  # type: ignore[attr-defined] # the stub lacks it
        descriptor, nbytes
    )
    return storage


class Exports:
    """The trainer's storages that live in shared memory already; for one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, Segment] = {}
        self._watches: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._dead: deque[int] = deque()

    def find(self, tensor: Tensor) -> tuple[Segment, TensorSpec] | None:
        """Return where the tensor is; None if it must be staged."""
        storage = tensor.untyped_storage()
        if not storage.is_shared() or tensor.is_conj() or tensor.is_neg():
            return None
        segment = self._known.get(storage._cdata)
        if segment is None or segment.details != (storage.nbytes(),):
            segment = self._export(storage) if _is_nameless(storage) else None
        return None if segment is None else (segment, spec_of(tensor, segment.number))

    def take_dead(self) -> list[int]:
        """Return the numbers of the segments whose storages are gone, each once."""
        return [self._dead.popleft() for _ in range(len(self._dead))]

    def close(self) -> None:
        for watch in list(self._watches.values()):
            watch.detach()
        self._watches.clear()
        self._known.clear()

    def _export(self, storage: torch.UntypedStorage) -> Segment | None:
        descriptor, nbytes = storage._share_fd_cpu_()
        if descriptor < 0:  # torch has kept no descriptor of a file that was mapped and then unlinked
            return None
        segment = Segment(nbytes, descriptors=(descriptor,))
        key = storage._cdata
        self._known[key] = segment
        watch = self._watches[segment.number] = weakref.finalize(storage, self._forget, key, segment)
        watch.atexit = False
        return segment

    def _forget(self, key: int, segment: Segment) -> None:
        # The finalizer runs wherever the last reference is dropped, also within the methods of this object.
        self._watches.pop(segment.number, None)
        if self._known.get(key) is segment:
            del self._known[key]
        self._dead.append(segment.number)


def _is_nameless(storage: torch.UntypedStorage) -> bool:
    """Return whether the shared memory is of the nameless kind; torch would silently copy the other one."""
    address = storage.data_ptr()
    for line in _maps.read_text().splitlines():
        start, _, rest = line.partition("-")
        if int(start, 16) <= address < int(rest.partition(" ")[0], 16):
            return line.endswith("(deleted)")
    return False


class Staging(Blocks):
    """Blocks for tensors that do not live in shared memory."""

    def _make_segment(self, nbytes: int) -> tuple[Segment, torch.UntypedStorage]:
        descriptor = os.memfd_create("torchft-staging", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            cure = (
                "raise the limit of the size of files, which shared memory is to the system (ulimit -f)"
                if error.errno == errno.EFBIG
                else "use fewer or smaller tensors at a time, or tensors that live in shared memory "
                "(Tensor.share_memory_)"
            )
            raise ProcessGroupError(
                f"no shared memory left for {nbytes} bytes ({error.strerror}): {cure}"
            ) from error
        segment = Segment(nbytes, descriptors=(descriptor,))
        weakref.finalize(segment, os.close, descriptor)
        return segment, open_segment(descriptor, nbytes)
