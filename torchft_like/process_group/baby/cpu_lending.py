"""CPU tensors for a subprocess: where they are if they live in shared memory, staged if not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.process_group.baby import outcomes
from torchft_like.process_group.baby.cpu_memory import Block, Exports, Segment, Staging, open_segment
from torchft_like.process_group.baby.lending import Letter
from torchft_like.process_group.baby.protocol import UNASKED, Outcome, ToChild
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_spec import TensorSpec, tensor_at
from torchft_like.process_group.baby.work import BabyWork, Failures
from torchft_like.process_group.collectives import Call, tensors_of


class CpuLender:
    """See lending.Lender.

    Args:
        staging: room for tensors that do not live in shared memory.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._exports = Exports()
        self._mapped: set[int] = set()
        self._new: list[Segment] = []

    def lend(self, call: Call) -> _CpuLoan:
        """See lending.Lender."""
        return _CpuLoan(call, self)

    def letters(self) -> Iterable[Letter]:
        """See lending.Lender."""
        new, self._new = self._new, []
        for segment in new:
            yield (ToChild.MAP.value, UNASKED, segment.number, segment.nbytes), (segment.descriptor,)
        for number in self._exports.take_dead():
            self._mapped.discard(number)
            yield (ToChild.UNMAP.value, UNASKED, number), ()

    def greeting(self) -> None:
        """Nothing has to be known."""

    def greeted(self, greeting: None) -> None:
        """Nothing has to be known."""

    def cut_off(self) -> int:
        """None: what has begun and is not over has not been answered either, and its work fails."""
        return 0

    def close(self) -> None:
        """There is nothing to take back: the memory went with the process."""

    def find(self, tensor: Tensor) -> TensorSpec | None:
        """Where a tensor in shared memory is; None for any other."""
        if (found := self._exports.find(tensor)) is None:
            return None
        self._note(found[0])
        return found[1]

    def stage(self, tensor: Tensor) -> tuple[Block, TensorSpec]:
        """Room for a tensor."""
        block, spec = self._staging.stage(tensor)
        self._note(block.segment)
        return block, spec

    def give_back(self, blocks: Iterable[Block]) -> None:
        """The subprocess cannot touch them any more."""
        self._staging.give_back(blocks)

    def _note(self, segment: Segment) -> None:
        if segment.number not in self._mapped:
            self._mapped.add(segment.number)
            self._new.append(segment)


class _CpuLoan:
    """See lending.Loan."""

    def __init__(self, call: Call, lender: CpuLender) -> None:
        self._call = call
        self._lender = lender
        self._blocks: list[Block] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def locate(self, tensor: Tensor) -> TensorSpec:
        return self._lender.find(tensor) or self._stage(tensor)

    def context(self) -> None:
        return None

    def settle(self, request: Request) -> None:
        if request.outcome is Outcome.DONE and self._copies:
            try:
                with torch.no_grad():
                    for tensor, staged in self._copies:
                        tensor.copy_(staged)
            except RuntimeError as error:
                request.outcome, request.answer = Outcome.REFUSED, outcomes.answer_for(error)
        self._lender.give_back(self._blocks)

    def work(self, requests: Requests, request: Request, result: list[Any], failures: Failures) -> BabyWork:
        return BabyWork(requests, request, result, failures)

    def _stage(self, tensor: Tensor) -> TensorSpec:
        block, spec = self._lender.stage(tensor)
        self._blocks.append(block)
        staged = tensor_at(block.storage, spec)
        if any(tensor is own for own in tensors_of(self._call.inputs)):
            with torch.no_grad():
                staged.copy_(tensor)
        if any(tensor is own for own in tensors_of(self._call.outputs)):
            self._copies.append((tensor, staged))
        return spec


class CpuBorrower:
    """See lending.Borrower."""

    def __init__(self, _: None) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def greeting(self) -> None:
        """Nothing has to be known."""

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        """See lending.Borrower."""
        number, nbytes = details
        (descriptor,) = descriptors
        self._storages[number] = open_segment(descriptor, nbytes)
        os.close(descriptor)

    def unmap(self, storage: int) -> None:
        """See lending.Borrower."""
        self._storages.pop(storage, None)

    def tensor(self, spec: TensorSpec) -> Tensor:
        """See lending.Borrower."""
        return tensor_at(self._storages[spec[0]], spec)

    @contextlib.contextmanager
    def entered(self, context: None) -> Iterator[None]:
        """Nothing is special."""
        yield

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """The answer says that the outputs are there."""
        return () if work is None else None
