"""CPU tensors that a subprocess sees: in place if they live in shared memory, staged if not.

A segment is a file in memory, whose descriptor the trainer sends to the subprocess once. A tensor that lives
in shared memory is a segment by itself and is never copied.

INVARIANTS
* A segment's number never stands for two storages.
* Files in memory have no name: whichever process is killed, nothing is left behind.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.process_group.baby.arguments import TensorSpec, spec_of
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild, answer_for
from torchft_like.process_group.baby.requests import Request
from torchft_like.process_group.baby.tensor_sharing import (
    Block,
    Blocks,
    CallTensors,
    Exporter,
    Importer,
    Preamble,
    copy_all,
)
from torchft_like.process_group.collectives import Call

_numbers = itertools.count(1)
_maps = Path("/proc/self/maps")


@dataclass(frozen=True, eq=False)
class Segment:
    """A file in memory: its number, and its descriptor in this process."""

    number: int
    descriptor: int
    nbytes: int


class CpuExporter(Exporter[Segment]):
    """The trainer's side.

    Args:
        staging: blocks for tensors that do not live in shared memory.
    """

    def __init__(self, staging: Staging) -> None:
        super().__init__()
        self._staging = staging
        self._exports = Exports()
        self._is_abandoned = False

    def export(self, call: Call) -> _CpuCallTensors:
        return _CpuCallTensors(call, self)

    def find(self, tensor: Tensor) -> TensorSpec | None:
        require_dense(tensor)
        if (found := self._exports.find(tensor)) is None:
            return None
        self._map_segment(found[0], tensor)
        return found[1]

    def stage(self, tensor: Tensor) -> tuple[Block[Segment], TensorSpec]:
        block, spec = self._staging.stage(tensor)
        self._map_segment(block.segment, block)
        return block, spec

    def preambles(self) -> Iterator[Preamble]:
        for number in self._exports.take_dead():
            self._mapped.discard(number)
            self._preambles.append((((ToChild.UNMAP.value, UNASKED, number), ()), None))
        return super().preambles()

    def abandon(self) -> None:
        self._is_abandoned = True

    def close(self) -> None:
        """Drop the exports and the preambles; the subprocess's view of the memory went with the process."""
        self._exports.close()
        self._preambles.clear()

    def give_back(self, blocks: Iterable[Block[Segment]]) -> None:
        """Take back the blocks of a request that is settled."""
        if not self._is_abandoned:
            self._staging.give_back(blocks)

    def _map_segment(self, segment: Segment, keeper: object) -> None:
        """Let the subprocess map a segment; `keeper` keeps its descriptor open until it is sent."""
        self._map(segment.number, segment.nbytes, descriptors=(segment.descriptor,), needs=keeper)


class _CpuCallTensors(CallTensors[Segment]):
    _exporter: CpuExporter

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

    def __init__(self, _: None) -> None:
        super().__init__()

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """Answer at once only if there is no work: the outputs are there when it ends."""
        return () if work is None else None

    def _open(self, details: tuple[Any, ...], descriptors: list[int]) -> torch.UntypedStorage:
        (nbytes,), (descriptor,) = details, descriptors
        storage = open_segment(descriptor, nbytes)
        os.close(descriptor)
        return storage


def require_dense(tensor: Tensor) -> None:
    """Refuse a tensor that is not a dense one in CPU memory.

    Raises:
        NotSupportedError: the tensor is sparse, quantized or on another device.
    """
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
        if segment is None or segment.nbytes != storage.nbytes():
            segment = self._export(storage) if _is_nameless(storage) else None
        return None if segment is None else (segment, spec_of(tensor, segment.number))

    def take_dead(self) -> list[int]:
        """Return the numbers of the segments whose storages are gone, each once."""
        return [self._dead.popleft() for _ in range(len(self._dead))]

    def close(self) -> None:
        """Stop watching all storages."""
        for watch in list(self._watches.values()):
            watch.detach()
        self._watches.clear()
        self._known.clear()

    def _export(self, storage: torch.UntypedStorage) -> Segment | None:
        descriptor, nbytes = storage._share_fd_cpu_()
        if descriptor < 0:  # torch has kept no descriptor of a file that was mapped and then unlinked
            return None
        segment = Segment(next(_numbers), descriptor, nbytes)
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


class Staging(Blocks[Segment]):
    """Blocks for tensors that do not live in shared memory."""

    def _make_segment(self, nbytes: int) -> tuple[Segment, torch.UntypedStorage]:
        segment = _make_segment(nbytes)
        return segment, open_segment(segment.descriptor, segment.nbytes)


def _make_segment(nbytes: int) -> Segment:
    descriptor = os.memfd_create("torchft-staging", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise ProcessGroupError(
            f"no shared memory left for {nbytes} bytes ({error.strerror}): use fewer or smaller tensors at a "
            "time, or tensors that live in shared memory (Tensor.share_memory_)"
        ) from error
    segment = Segment(next(_numbers), descriptor, nbytes)
    weakref.finalize(segment, os.close, descriptor)
    return segment
