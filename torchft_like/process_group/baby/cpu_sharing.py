"""CPU tensors that a subprocess sees: in place if they live in shared memory, copied into staging blocks if
not.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.baby import outcomes
from torchft_like.process_group.baby.blocks import Block
from torchft_like.process_group.baby.cpu_memory import (
    Exports,
    Segment,
    Staging,
    open_segment,
    require_dense,
)
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_sharing import Preamble
from torchft_like.process_group.baby.tensor_spec import TensorSpec, storage_of, tensor_at
from torchft_like.process_group.baby.work import Failures, RemoteOperation
from torchft_like.process_group.collectives import Call
from torchft_like.writing import writing_to

TENSORS_KEPT_MAX = 1024  # per storage; a tensor is a view and takes about a kilobyte


class CpuExporter:
    """A `tensor_sharing.Exporter` of CPU tensors.

    Args:
        staging: blocks for tensors that do not live in shared memory.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._exports = Exports()
        self._mapped: set[int] = set()
        # Each preamble comes with the object that keeps its descriptor open until it is sent.
        self._preambles: deque[tuple[Preamble, object]] = deque()
        self._on_its_way: tuple[Preamble, object] | None = None
        self._is_abandoned = False

    def export(self, call: Call) -> _CpuCallTensors:
        return _CpuCallTensors(call, self)

    def next_preamble(self) -> Preamble | None:
        for number in self._exports.take_dead():
            self._mapped.discard(number)
            self._preambles.append((((ToChild.UNMAP.value, UNASKED, number), ()), None))
        with contextlib.suppress(IndexError):  # `close` may drop the preambles at any time
            self._on_its_way = self._preambles.popleft()
            return self._on_its_way[0]
        return None

    def preamble_sent(self) -> None:
        self._on_its_way = None

    def greeting(self) -> None:
        """Return None: the subprocess has to know nothing beforehand."""

    def greeted(self, greeting: None) -> None:
        """Do nothing: the subprocess has nothing to tell beforehand."""

    def cut_off(self) -> int:
        """Return 0: an operation that has begun and is not over has not been answered, so its work fails
        anyway.
        """
        return 0

    def is_busy(self) -> bool:
        """Return False: an operation is answered when its results are there."""
        return False

    def abandon(self) -> None:
        self._is_abandoned = True

    def close(self) -> None:
        """Drop the exports and the preambles; the subprocess's view of the memory went with the process."""
        self._exports.close()
        self._preambles.clear()

    def find(self, tensor: Tensor) -> TensorSpec | None:
        """Return where a tensor in shared memory is; None for any other."""
        if (found := self._exports.find(tensor)) is None:
            return None
        self._note(found[0], tensor)
        return found[1]

    def stage(self, tensor: Tensor) -> tuple[Block[Segment], TensorSpec]:
        """Make room for a tensor."""
        block, spec = self._staging.stage(tensor)
        self._note(block.segment, block)
        return block, spec

    def give_back(self, blocks: Iterable[Block[Segment]]) -> None:
        """Take back the blocks of a request that is settled."""
        if not self._is_abandoned:
            self._staging.give_back(blocks)

    def _note(self, segment: Segment, keeper: object) -> None:
        if segment.number not in self._mapped:
            self._mapped.add(segment.number)
            message = (ToChild.MAP.value, UNASKED, segment.number, segment.nbytes)
            self._preambles.append(((message, (segment.descriptor,)), keeper))


class _CpuCallTensors:
    """A `tensor_sharing.CallTensors` of CPU tensors."""

    def __init__(self, call: Call, exporter: CpuExporter) -> None:
        self._call = call
        self._exporter = exporter
        self._located: dict[int, TensorSpec] = {}  # a tensor that is output and input is one for both sides
        self._blocks: list[Block[Segment]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    @functools.cached_property
    def _inputs(self) -> set[int]:
        return {id(tensor) for tensor in tensors_of(self._call.inputs)}

    @functools.cached_property
    def _outputs(self) -> set[int]:
        return {id(tensor) for tensor in tensors_of(self._call.outputs)}

    def locate(self, tensor: Tensor) -> TensorSpec:
        if (spec := self._located.get(id(tensor))) is None:
            require_dense(tensor)
            spec = self._located[id(tensor)] = self._exporter.find(tensor) or self._stage(tensor)
        return spec

    def context(self) -> None:
        return None

    def settle(self, request: Request) -> None:
        try:
            if request.outcome is Outcome.DONE:
                for tensor, staged in self._copies:
                    _copy(tensor, staged)
        except RuntimeError as error:  # an output that cannot be written to
            request.outcome, request.answer = Outcome.REFUSED, outcomes.answer_for(error)
        finally:
            blocks, self._blocks = self._blocks, []
            self._exporter.give_back(blocks)

    def operation(
        self, requests: Requests, request: Request, result: list[Any], failures: Failures
    ) -> RemoteOperation:
        return RemoteOperation(requests, request, result, failures)

    def _stage(self, tensor: Tensor) -> TensorSpec:
        block, spec = self._exporter.stage(tensor)
        self._blocks.append(block)
        staged = tensor_at(block.storage, spec)
        if id(tensor) in self._inputs:
            _copy(staged, tensor)
        if id(tensor) in self._outputs:
            self._copies.append((tensor, staged))
        return spec


_NOTHING = contextlib.nullcontext()


def _copy(target: Tensor, source: Tensor) -> None:
    with writing_to(target):
        target.copy_(source)


class CpuImporter:
    """A `tensor_sharing.Importer` of CPU tensors."""

    def __init__(self, _: None) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Per storage, as a job uses its tensors again.
        self._tensors: dict[int, dict[TensorSpec, Tensor]] = {}

    def greeting(self) -> None:
        """Return None: the trainer has to know nothing beforehand."""

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        number, nbytes = details
        (descriptor,) = descriptors
        self._storages[number] = open_segment(descriptor, nbytes)
        self._tensors[number] = {}
        os.close(descriptor)

    def unmap(self, storage: int) -> None:
        self._storages.pop(storage, None)
        self._tensors.pop(storage, None)

    def tensor(self, spec: TensorSpec) -> Tensor:
        storage = storage_of(spec)
        known = self._tensors[storage]
        if (tensor := known.get(spec)) is None:
            if len(known) >= TENSORS_KEPT_MAX:
                known.clear()
            tensor = known[spec] = tensor_at(self._storages[storage], spec)
        return tensor

    def entered(self, context: None) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NOTHING

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """Answer at once if there is no work; else leave the answer to the end, when the outputs are
        there.
        """
        return () if work is None else None
