"""The check of collectives, for every row of the table, with members that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp

from torchft_like.errors import CollectiveMismatchError
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.collectives import BY_NAME, COLLECTIVES

from .checking_calls import assert_goes_on, checking
from .conftest import Party

pytestmark = pytest.mark.usefixtures("no_operator")

RANKS = 2


class Part:
    """What one rank does in a call: its group, its rank, and its tensors, root and reduction."""

    def __init__(
        self,
        group: Any,
        rank: int,
        *,
        scale: int = 1,
        dtype: torch.dtype = torch.float32,
        root: int = 1,
        op: Any = ReduceOp.SUM,
    ) -> None:
        self.group = group
        self.rank = rank
        self.root = root
        self.op = op
        self.tensors: list[Tensor] = []
        self._scale = scale
        self._dtype = dtype

    def tensor(self, length: int) -> Tensor:
        """A tensor of `length`, or of twice that where this rank errs."""
        self.tensors.append(self._filled(len(self.tensors), length * self._scale))
        return self.tensors[-1]

    def many(self, length: int) -> list[Tensor]:
        return [self.tensor(length) for _ in range(RANKS)]

    def on_root(self, length: int) -> list[list[Tensor]]:
        return [self.many(length)] if self.rank == self.root else []

    def assert_untouched(self) -> None:
        for number, tensor in enumerate(self.tensors):
            assert torch.equal(tensor, self._filled(number, len(tensor)))

    def _filled(self, number: int, length: int) -> Tensor:
        return torch.full((length,), 1.0 + self.rank + 10 * number, dtype=self._dtype)


def rooted(part: Part, options: Any) -> Any:
    options.rootRank = part.root
    return options


def reducing(part: Part, options: Any) -> Any:
    options.reduceOp = part.op
    return options


Act = Callable[[Part], Any]

# One right call of each row.
CALLS: dict[str, Act] = {
    "allreduce": lambda p: p.group.allreduce([p.tensor(4)], reducing(p, AllreduceOptions())),
    "allreduce_coalesced": lambda p: p.group.allreduce_coalesced([p.tensor(4), p.tensor(2)]),
    "broadcast": lambda p: p.group.broadcast([p.tensor(4)], rooted(p, BroadcastOptions())),
    "reduce": lambda p: p.group.reduce([p.tensor(4)], reducing(p, rooted(p, ReduceOptions()))),
    "allgather": lambda p: p.group.allgather([p.many(4)], [p.tensor(4)]),
    "allgather_coalesced": lambda p: p.group.allgather_coalesced(
        [[p.tensor(4), p.tensor(2)] for _ in range(RANKS)], [p.tensor(4), p.tensor(2)]
    ),
    "_allgather_base": lambda p: p.group._allgather_base(p.tensor(4 * RANKS), p.tensor(4)),
    "allgather_into_tensor_coalesced": lambda p: p.group.allgather_into_tensor_coalesced(
        [p.tensor(4 * RANKS), p.tensor(2 * RANKS)], [p.tensor(4), p.tensor(2)]
    ),
    "gather": lambda p: p.group.gather(p.on_root(4), [p.tensor(4)], rooted(p, GatherOptions())),
    "scatter": lambda p: p.group.scatter([p.tensor(4)], p.on_root(4), rooted(p, ScatterOptions())),
    "reduce_scatter": lambda p: p.group.reduce_scatter(
        [p.tensor(4)], [p.many(4)], reducing(p, ReduceScatterOptions())
    ),
    "_reduce_scatter_base": lambda p: p.group._reduce_scatter_base(
        p.tensor(4), p.tensor(4 * RANKS), reducing(p, ReduceScatterOptions())
    ),
    "reduce_scatter_tensor_coalesced": lambda p: p.group.reduce_scatter_tensor_coalesced(
        [p.tensor(4), p.tensor(2)], [p.tensor(4 * RANKS), p.tensor(2 * RANKS)]
    ),
    "alltoall": lambda p: p.group.alltoall(p.many(4), p.many(4)),
    "alltoall_base": lambda p: p.group.alltoall_base(p.tensor(8), p.tensor(8), [], []),
    "send": lambda p: p.group.send([p.tensor(4)], 1, 5) if p.rank == 0 else p.group.recv([p.tensor(4)], 0, 5),
    "recv": lambda p: p.group.recv([p.tensor(4)], 1, 0) if p.rank == 0 else p.group.send([p.tensor(4)], 0, 0),
    "recv_anysource": lambda p: (
        p.group.recv_anysource([p.tensor(4)], 3) if p.rank == 0 else p.group.send([p.tensor(4)], 0, 3)
    ),
    "barrier": lambda p: p.group.barrier(),
    "monitored_barrier": lambda p: p.group.monitored_barrier(),
}
WITH_TENSORS = [name for name in CALLS if "barrier" not in name]
COLLECTIVE = [name for name in CALLS if name not in ("send", "recv", "recv_anysource")]

# What rank 0 does otherwise, what both are told of it and of rank 1, and the operations in which it shows.
ODD: dict[str, tuple[dict[str, Any], str, str, Sequence[str]]] = {
    "shape": ({"scale": 2}, "float32[8]", "float32[4]", WITH_TENSORS),
    "dtype": ({"dtype": torch.int32}, "int32[4]", "float32[4]", WITH_TENSORS),
    "root": ({"root": 0}, "root 0", "root 1", ("broadcast", "reduce", "gather", "scatter")),
    "reduce op": (
        {"op": ReduceOp.MAX},
        "by MAX",
        "float32[4]",
        ("allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    ),
}


def finish(act: Act, part: Part) -> None:
    if (work := act(part)) is not None:
        work.wait()


def carried_out(party: Party, groups: list[ProcessGroup], *acts: Act) -> list[list[Tensor]]:
    """Every tensor of every rank after a right call."""
    parts = [Part(group, rank) for rank, group in enumerate(groups)]
    party.together(groups, lambda rank, _: finish(acts[rank % len(acts)], parts[rank]))
    return [part.tensors for part in parts]


def refused(
    party: Party, groups: list[ProcessGroup], *acts: Act, parts: list[Part] | None = None
) -> CollectiveMismatchError:
    """Each rank does its own: the error that all of them get. No tensor was touched, the group goes on."""
    parts = parts or [Part(group, rank) for rank, group in enumerate(groups)]

    def try_it(rank: int, _: Any) -> CollectiveMismatchError:
        with pytest.raises(CollectiveMismatchError) as raised:
            finish(acts[rank % len(acts)], parts[rank])
        parts[rank].assert_untouched()
        return raised.value

    errors = party.together(groups, try_it)
    assert len({str(error) for error in errors}) == 1
    assert all(group.errored() is None for group in groups)
    assert_goes_on(party, groups)
    assert [*errors[0].calls] == [*range(len(groups))]
    return errors[0]


def test_there_is_a_call_of_every_row() -> None:
    assert {row.name for row in COLLECTIVES} == {*CALLS}


@pytest.mark.parametrize(("aspect", "name"), [(aspect, name) for aspect in ODD for name in ODD[aspect][3]])
def test_a_rank_with_other_arguments_is_found(party: Party, aspect: str, name: str) -> None:
    groups = party.meet(RANKS, checking)
    odd, said_of_0, said_of_1, _ = ODD[aspect]
    error = refused(party, groups, CALLS[name], parts=[Part(groups[0], 0, **odd), Part(groups[1], 1)])
    assert error.aspect == aspect
    assert f"rank 0: {error.calls[0]}; rank 1: {error.calls[1]}" in str(error)
    assert said_of_0 in error.calls[0]
    assert said_of_1 in error.calls[1]


@pytest.mark.parametrize("name", COLLECTIVE)
def test_another_operation_is_found(party: Party, name: str) -> None:
    groups = party.meet(RANKS, checking)
    other = "monitored_barrier" if name == "barrier" else "barrier"
    error = refused(party, groups, CALLS[name], CALLS[other])
    assert error.aspect == "operation"
    assert error.calls[0].startswith(f"{name} #1")
    assert error.calls[1] == f"{other} #1"


def test_every_overload_is_read(party: Party) -> None:
    """The shorter ones say root and peer by position or by name; reductions are in test_collectives."""
    groups = party.meet(RANKS, checking)
    right: list[tuple[Act, Act]] = [
        (lambda p: p.group.broadcast(tensor=p.tensor(4), root=1), CALLS["broadcast"]),
        (
            lambda p: p.group.send(tensors=[p.tensor(4)], dstRank=1, tag=5),
            lambda p: p.group.recv(tensors=[p.tensor(4)], srcRank=0, tag=5),
        ),
    ]
    for acts in right:
        carried_out(party, groups, *acts)
    error = refused(party, groups, lambda p: p.group.broadcast(p.tensor(4), 0), CALLS["broadcast"])
    assert error.aspect == "root"


def test_every_name_of_a_row_is_checked(party: Party) -> None:
    groups = party.meet(RANKS, checking)
    for name in BY_NAME["_allgather_base"].names:
        act = partial(gather_as, name)
        error = refused(party, groups, act, parts=[Part(groups[0], 0), Part(groups[1], 1, scale=2)])
        assert error.aspect == "shape"


def gather_as(name: str, part: Part) -> Any:
    return getattr(part.group, name)(part.tensor(8), part.tensor(4))


# What is uneven and right stays right; what is uneven and wrong is found.


def test_uneven_shares_are_scattered(party: Party) -> None:
    def act(part: Part) -> Any:
        return part.group.reduce_scatter([part.tensor(2 + part.rank)], [[part.tensor(2), part.tensor(3)]])

    shares = carried_out(party, party.meet(RANKS, checking), act)
    assert [len(of_rank[0]) for of_rank in shares] == [2, 3]
    assert [of_rank[0].tolist() for of_rank in shares] == [[23.0, 23.0], [43.0] * 3]


def exchange(p: Part, output_sizes: list[int], input_sizes: list[int]) -> Any:
    return p.group.alltoall_base(
        p.tensor(sum(output_sizes)), p.tensor(sum(input_sizes)), output_sizes, input_sizes
    )


def test_parts_that_nobody_expects_are_found(party: Party) -> None:
    error = refused(
        party,
        party.meet(RANKS, checking),
        lambda p: exchange(p, [1, 2], [1, 3]),
        lambda p: exchange(p, [2, 2], [2, 2]),
    )
    assert error.aspect == "shape"
    assert error.calls[0] == "alltoall_base #1 float32[1], float32[3] into float32[1], float32[2]"


@pytest.mark.parametrize("sizes", [[], [2, 2]])
def test_a_tensor_that_one_rank_cannot_split_is_found_by_all(party: Party, sizes: list[int]) -> None:
    """The backend would say so to that rank alone, and the others would wait for it."""
    error = refused(
        party,
        party.meet(RANKS, checking),
        lambda p: p.group.alltoall_base(p.tensor(4), p.tensor(5), sizes, sizes),
        lambda p: p.group.alltoall_base(p.tensor(4), p.tensor(4), sizes, sizes),
    )
    assert error.calls[0] == "alltoall_base #1 float32[5] into float32[2] x2"


def broadcast_like(tensor: Tensor, _: int, group: ProcessGroup) -> None:
    group.broadcast_one(torch.ones_like(tensor), 0).wait()


def test_scalars_empty_and_strided_tensors_are_compared_by_their_shape(party: Party) -> None:
    groups = party.meet(RANKS, checking)
    strange = (
        torch.tensor(1.0),
        torch.empty(0, 3),
        torch.ones(4, 6)[:, ::2],
        torch.ones(3, dtype=torch.bfloat16),
    )
    for tensor in strange:
        party.together(groups, partial(broadcast_like, tensor))
    error = refused(
        party,
        groups,
        lambda p: p.group.allreduce([torch.empty(0, 3)]),
        lambda p: p.group.allreduce([torch.empty(0, 2)]),
    )
    assert error.calls == {0: "allreduce #5 float32[0, 3]", 1: "allreduce #5 float32[0, 2]"}
