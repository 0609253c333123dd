"""One group over two: the ranks of a replica group, and their counterparts in the other ones.

A mesh that is flattened over an elastic dimension gives such a group: all ranks that share the data, over
which a script averages its loss or counts its tokens. There are no connections between all these ranks, nor
could they be kept over the death of a replica group. So an operation runs within the replica group first, and
then across.

This module knows nothing of meshes, and of the two groups no more than that both are process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from torchft_like.errors import NotSupportedError
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.collectives import JOINING, Call, Collective
from torchft_like.process_group.work import finished_work
from torchft_like.process_group.wrapper import ProcessGroupWrapper

Handler = Callable[[Call], Work]


class FlattenedProcessGroup(ProcessGroupWrapper):
    """A group of the ranks of `within` times the members of `across`.

    It has the reductions to all, broadcast, gathering to all and the barrier. The first half of an
    operation is waited for before the second begins, so only the second is asynchronous.

    INVARIANT: what is done within does not depend on the elastic group, whose error one rank of a replica
    group may know of before another does: all of them do the same, and none waits for one that does not.

    Args:
        within: torch's group of the ranks of this replica group.
        across: the elastic group of this rank and its counterparts, to which `configure`, `abort` and
          `shutdown` are passed on.
        inner_size: how many consecutive ranks have the same place in `across`. All of `within` if its
            dimension is the outer one; a divisor if the elastic one stands between two others.
    """

    def __init__(self, within: dist.ProcessGroup, across: ProcessGroup, inner_size: int) -> None:
        super().__init__(pg=across)
        self._within = within
        self._inner_size = inner_size
        self._handlers: Mapping[str, Handler] = {
            "allreduce": self._within_then_across,
            "allreduce_coalesced": self._within_then_across,
            "broadcast": self._broadcast,
            "allgather": self._gather,
            "_allgather_base": self._gather,
            "barrier": self._within_then_across,
        }

    def size(self) -> int:
        """Return the number of ranks of the replica group times the number of members across."""
        return int(self._within.size() * self._across_size())

    def rank(self) -> int:
        """Return the caller's place in row-major order of the dimensions that were flattened."""
        across_rank = min(self.parent.rank(), self._across_size() - 1)  # a healing rank may have a higher one
        return self._rank_of(across_rank, self._within.rank())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the operations across; those within keep the timeout that torch was given."""
        self.parent.set_timeout(timeout)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if (handler := self._handlers.get(collective.name)) is None:
            raise NotSupportedError(
                f"a flattened group has no {collective.name}; use the groups of the dimensions one by one"
            )
        call = collective.bind(args, kwargs)
        if collective.name in JOINING and len(call.outputs) > 1:
            raise NotSupportedError(
                f"{collective.name} of {len(call.outputs)} tensors joins tensors and ranks in one, which "
                "a flattened group cannot do in two halves; pass one tensor, or use allreduce_coalesced"
            )
        return handler(call)

    def _within_then_across(self, call: Call) -> Work:
        """Run the collective within the replica group, then across.

        Averages are right, as replica groups are equally large. A rank that has met its counterparts across
        knows that all ranks have met within.
        """
        name = call.collective.name
        getattr(self._within, name)(*call.args, **call.kwargs).wait()
        work: Work = getattr(self.parent, name)(*call.args, **call.kwargs)
        return work

    def _broadcast(self, call: Call) -> Work:
        """Broadcast within every replica group, then across, from every rank of the root's group."""
        across_root, within_root = self._split(call.root)
        (tensor,) = call.outputs
        self._within.broadcast(tensor, within_root).wait()
        work: Work = self.parent.broadcast_one(tensor, across_root)
        return work

    def _gather(self, call: Call) -> Work:
        for source, outputs in _gathered(call, self.size()):
            mine = torch.stack(self._gather_in(self._within, source))
            for across_rank, rows in enumerate(self._gather_in(self.parent, mine)):
                for within_rank, row in enumerate(rows):
                    outputs[self._rank_of(across_rank, within_rank)].copy_(row)
        return finished_work(call.result)

    @staticmethod
    def _gather_in(group: dist.ProcessGroup, source: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(source) for _ in range(group.size())]
        group.allgather([parts], [source]).wait()
        return parts

    def _across_size(self) -> int:
        """Return the number of members across; 1 while none is known."""
        return max(1, int(self.parent.size()))

    def _rank_of(self, across_rank: int, within_rank: int) -> int:
        outer, inner = divmod(within_rank, self._inner_size)
        return (outer * self._across_size() + across_rank) * self._inner_size + inner

    def _split(self, rank: int) -> tuple[int, int]:
        """Return the ranks across and within, of a rank of this group."""
        outside, inner = divmod(rank, self._inner_size)
        outer, across_rank = divmod(outside, self._across_size())
        return across_rank, outer * self._inner_size + inner


def _gathered(call: Call, size: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each tensor to be gathered with the tensors that take it, in the order of ranks.

    Raises:
        ValueError: there are fewer or more outputs than ranks.
    """
    if call.collective.name == "_allgather_base":
        source = call.inputs
        if call.outputs.numel() != size * source.numel():
            numbers = f"{call.outputs.numel()} elements for {size} times {source.numel()}"
            raise ValueError(f"an output of {numbers}")
        return [(source, list(call.outputs.view(size, *source.shape)))]
    for outputs in call.outputs:
        if len(outputs) != size:
            raise ValueError(f"{len(outputs)} output tensors for a group of {size}")
    return list(zip(call.inputs, call.outputs, strict=True))
