"""The gangs of a job with several kinds of parallelism, and how they are made from one root.

The sizes decide which ranks are together (`topology`); the root gang, of any kind, makes the gangs. A part
that is the whole is the whole gang itself, and a part of one process is a FakeGang: neither costs a
connection.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from torchft_like.core import topology
from torchft_like.errors import GangError
from torchft_like.gang import current
from torchft_like.gang.base import Gang
from torchft_like.gang.fake import FakeGang


@dataclass(kw_only=True, eq=False)
class Gangs:
    """One gang for each kind of parallelism. In a `with` block they are the thread's current ones.

    Attributes:
        root: all processes.
        dp: data parallel: those that hold the same shard of the model.
        rdp: replicated data parallel, a part of `dp`: across nodes in hybrid sharding; for DDP.
        sdp: sharded data parallel, a part of `dp`: within a node in hybrid sharding; for FSDP.
        tp: tensor parallel.
        pp: pipeline parallel.

    Raises:
        ValueError: the caller is rank 0 of the root and not of all gangs: work that rank 0 does for each gang
          would be in another process than work that rank 0 does for the job.
    """

    root: Gang
    dp: Gang
    rdp: Gang
    sdp: Gang
    tp: Gang
    pp: Gang

    def __post_init__(self) -> None:
        with suppress(GangError):  # one of the gangs has no members yet: its first use will say so
            if self.root.rank == 0:
                parts = {name: getattr(self, name) for name in ("dp", "rdp", "sdp", "tp", "pp")}
                if others := {name: gang.rank for name, gang in parts.items() if gang.rank}:
                    raise ValueError(
                        f"rank 0 of the root gang must be rank 0 of every gang, and has the ranks {others}"
                    )

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the root makes itself."""
        return self.root.device

    def close(self) -> None:
        """Close every gang, the root last. Safe to call again."""
        with ExitStack() as all_of_them:  # even if one of them fails to close
            for gang in _unique(self.root, self.dp, self.rdp, self.sdp, self.tp, self.pp):
                all_of_them.callback(gang.close)

    def __enter__(self) -> Self:
        current.push(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.pop(self)


def create_parallel_gangs(root_gang: Gang, *, tp_size: int = 1) -> Gangs:
    """Split the root gang for tensor and data parallelism. All members of the root call this.

    Neighbours share a tensor parallel gang: put them on one host. A root of 8 with `tp_size=2` gives the
    tensor parallel gangs 01, 23, 45, 67 and the data parallel gangs 0246, 1357.

    Raises:
        TopologyError: `tp_size` does not divide the size of the root; it is a ValueError.
        GangError: the members could not meet.
    """
    tp_ranks = topology.tensor_parallel_ranks(root_gang.size, tp_size)
    dp_ranks = topology.data_parallel_ranks(root_gang.size, tp_size)
    alone = FakeGang(root_gang.device)
    tp = root_gang.of_all() if tp_size == root_gang.size else _part(root_gang, tp_ranks, alone)
    try:
        dp = _part(root_gang, dp_ranks, alone)
    except BaseException:
        if tp is not root_gang:
            tp.close()
        raise
    return Gangs(root=root_gang, dp=dp, rdp=dp, sdp=alone, tp=tp, pp=alone)


def create_fsdp_gangs(gangs: Gangs, intra_node_size: int | None = None) -> Gangs:
    """Set `gangs.sdp` and `gangs.rdp` for sharded data parallelism; return the same object.

    Those of an earlier call are closed.

    Args:
        gangs: what `create_parallel_gangs` made; all members of its data parallel gang call this.
        intra_node_size: how many neighbours shard the model between them. None shards it over the whole
            data parallel gang, and `rdp` is a fake gang of one. 4 for a data parallel gang of 8 gives
            the sharded gangs 0123, 4567 and the replicated gangs 04, 15, 26, 37.

    Raises:
        TopologyError: `intra_node_size` is less than 2, or does not divide the size of `gangs.dp`; it is a
            ValueError.
        GangError: the members could not meet.
    """
    dp = gangs.dp
    alone = FakeGang(dp.device)
    if intra_node_size is None:
        return _sharded(gangs, dp, alone)
    sdp_ranks = topology.sharded_ranks(dp.size, intra_node_size)
    rdp_ranks = topology.replicated_ranks(dp.size, intra_node_size)
    sdp = _part(dp, sdp_ranks, alone)
    try:
        rdp = _part(dp, rdp_ranks, alone)
    except BaseException:
        if sdp is not dp:
            sdp.close()
        raise
    return _sharded(gangs, sdp, rdp)


def _sharded(gangs: Gangs, sdp: Gang, rdp: Gang) -> Gangs:
    """Put these gangs in place of those that an earlier call has made, and close the latter."""
    before = gangs.sdp, gangs.rdp
    gangs.sdp, gangs.rdp = sdp, rdp
    kept = _unique(gangs.root, gangs.dp, gangs.tp, gangs.pp, sdp, rdp)
    for gang in _unique(*before):
        if all(gang is not other for other in kept):
            gang.close()
    return gangs


def create_fake_gangs(device: torch.device) -> Gangs:
    """Return gangs of one process: every one is a FakeGang of rank 0 and size 1."""
    alone = FakeGang(device)
    return Gangs(root=alone, dp=alone, rdp=alone, sdp=alone, tp=alone, pp=alone)


def _part(whole: Gang, partition: topology.Partition, alone: Gang) -> Gang:
    """Return the caller's part of a gang that is divided up completely, in the order of its ranks."""
    if len(partition) == 1:
        return whole
    if len(partition) == whole.size:
        return alone
    part = whole.split(partition)
    if part is None:
        raise RuntimeError(f"rank {whole.rank} is in none of {partition}")
    return part


def _unique(*gangs: Gang) -> list[Gang]:
    return list({id(gang): gang for gang in gangs}.values())
