"""A gang of one process that behaves as if all the others held the same tensors.

It serves tests, scripts that run alone, and topologies: `create_parallel_gangs` over a fake root shows which
ranks would be together. It checks its arguments as a real gang does, so that a script that runs on a fake
gang does not fail on a real one for its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import torch
from torch import Tensor

from torchft_like import plain_data
from torchft_like.errors import NotSupportedError
from torchft_like.gang.base import (
    Gang,
    ReduceOperation,
    check_dense,
    check_gather,
    check_partition,
    check_reduction,
    check_source,
    dense,
    effective,
    reducible,
)


@final
class FakeGang(Gang):
    """Collectives without communication: each has the result of `size` members with the caller's tensors.

    A SUM multiplies by `size`, a PRODUCT is a power, MEAN, MIN and MAX change nothing.

    Args:
        device: the device of the script's tensors.
        rank, size: the rank and the size that the gang reports.

    Raises:
        ValueError: `rank` is not within `[0, size)`, or the device is meta, whose tensors have no numbers.
    """

    supports_process_group = False

    def __init__(self, device: torch.device, *, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not within a gang of {size}")
        self._device = torch.device(device)
        if self._device.type == "meta":
            raise ValueError("a gang is of cpu or cuda devices, not meta: its tensors have no numbers")
        self._rank = rank
        self._size = size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def create_gang(self, ranks: Sequence[int]) -> FakeGang | None:
        return self.split([ranks])

    def split(self, partition: Sequence[Sequence[int]]) -> FakeGang | None:
        for ranks in check_partition(partition, self._size):
            if self._rank in ranks:
                return FakeGang(self._device, rank=ranks.index(self._rank), size=len(ranks))
        return None

    def as_process_group(self) -> NoReturn:
        raise NotSupportedError("a FakeGang has no process group: use a ProcessGroupGang")

    def barrier(self) -> None:
        """Return at once: there is no other member to wait for."""

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        check_reduction(tensor, op)
        with dense(tensor, writes=True) as without_gaps, reducible(without_gaps, op) as numbers:
            if (carried_out := effective(op, tensor)) is ReduceOperation.SUM:
                numbers.mul_(self._size)
            elif carried_out is ReduceOperation.PRODUCT:
                numbers.pow_(self._size)

    @torch.no_grad()
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        check_gather(output_tensor, input_tensor, self._size)
        source = input_tensor.clone()  # the input may be a part of the output
        output_tensor.detach().view(self._size, *input_tensor.shape).copy_(source)

    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        source = check_source(source_rank, self._size)
        check_dense(tensor, writes=self._rank != source)

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        if check_source(source_rank, self._size) == self._rank:
            plain_data.dissect(list(objects))

    def __repr__(self) -> str:
        return f"<FakeGang: rank {self._rank} of {self._size} on {self._device}>"
