"""Two groups as one, compared with one plain group of as many ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.process_group.conftest import Party
from torchft_like.errors import NotSupportedError
from torchft_like.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup
from torchft_like.process_group.mesh import FlattenedProcessGroup

ACROSS, WITHIN = 2, 2
SIZE = ACROSS * WITHIN
LATE_S = 0.2
Groups = list[ProcessGroup]


def flattened(party: Party, inner_size: int) -> Groups:
    """In the order of their ranks. Place i of `within` and e across is rank e * 2 + i if the elastic
    dimension is the outer one, else i * 2 + e."""
    within = [party.meet(WITHIN) for _ in range(ACROSS)]
    across = [party.meet(ACROSS) for _ in range(WITHIN)]
    groups: Groups = [
        FlattenedProcessGroup(within[e][i], across[i][e], inner_size)
        for e in range(ACROSS)
        for i in range(WITHIN)
    ]
    return sorted(groups, key=lambda group: group.rank())


@pytest.fixture(params=[WITHIN, 1], ids=["elastic-first", "elastic-last"])
def groups(party: Party, request: pytest.FixtureRequest) -> Groups:
    return flattened(party, request.param)


def assert_same_as_plain(party: Party, groups: Groups, act: Callable[[int, ProcessGroup], Any]) -> None:
    assert party.together(groups, act) == party.together(party.meet(SIZE), act)


@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
def test_it_reduces_as_one_group_does(party: Party, groups: Groups, name: str) -> None:
    def reduce(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.tensor([rank + 1.0, 2.0 ** (3 - rank)])
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)
        values: list[float] = tensor.tolist()
        return values

    assert_same_as_plain(party, groups, reduce)


def test_it_reduces_coalesced_tensors_one_by_one(party: Party, groups: Groups) -> None:
    def reduce(rank: int, group: ProcessGroup) -> list[list[float]]:
        tensors = [torch.tensor([rank + 1.0]), torch.tensor([2.0, 10.0 * rank])]
        group.allreduce_coalesced(tensors).wait()
        return [tensor.tolist() for tensor in tensors]

    assert_same_as_plain(party, groups, reduce)


@pytest.mark.parametrize("root", range(SIZE))
def test_it_broadcasts_from_every_rank(party: Party, groups: Groups, root: int) -> None:
    def broadcast(rank: int, group: ProcessGroup) -> float:
        tensor = torch.tensor([float(rank)])
        group.broadcast_one(tensor, root).wait()
        return tensor.item()

    assert party.together(groups, broadcast) == [root] * SIZE


def test_it_gathers_in_the_order_of_ranks(party: Party, groups: Groups) -> None:
    def gather(rank: int, group: ProcessGroup) -> list[list[float]]:
        mine = torch.tensor([float(rank), -float(rank)])
        parts = [torch.empty(2) for _ in range(SIZE)]
        group.allgather([parts], [mine]).wait()
        whole = torch.empty(SIZE * 2)
        group._allgather_base(whole, mine).wait()
        return [torch.cat(parts).tolist(), whole.tolist()]

    assert_same_as_plain(party, groups, gather)


def test_a_reduction_is_asynchronous_and_has_a_future(party: Party, groups: Groups) -> None:
    def reduce(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.ones(1)
        (result,) = group.allreduce([tensor]).get_future().wait()
        return [tensor.item(), result.item()]

    assert party.together(groups, reduce) == [[SIZE, SIZE]] * SIZE


def test_nobody_leaves_a_barrier_before_the_last_has_come(party: Party, groups: Groups) -> None:
    arrived: list[int] = []

    def meet(rank: int, group: ProcessGroup) -> int:
        if rank == SIZE - 1:
            time.sleep(LATE_S)  # a barrier that does not wait is found out in that time
        arrived.append(rank)
        group.barrier().wait()
        return len(arrived)

    assert party.together(groups, meet) == [SIZE] * SIZE


def test_what_it_cannot_do_is_a_typed_error(groups: Groups) -> None:
    with pytest.raises(NotSupportedError, match="one by one"):
        groups[0].reduce_scatter([torch.empty(1)], [[torch.empty(1)] * SIZE])
    for name in ("allreduce", "broadcast"):
        with pytest.raises(NotSupportedError, match="of 2 tensors"):
            getattr(groups[0], name)([torch.ones(1), torch.ones(1)])


def test_a_wrong_number_of_outputs_is_a_value_error(groups: Groups) -> None:
    with pytest.raises(ValueError, match="3 output tensors"):
        groups[0].allgather([[torch.empty(1)] * 3], [torch.empty(1)])
    with pytest.raises(ValueError, match="7 elements"):
        groups[0]._allgather_base(torch.empty(7), torch.empty(2))


def test_an_error_across_goes_where_the_elastic_group_sends_it(party: Party) -> None:
    within, across = party.meet(WITHIN), [ErrorSwallowingProcessGroupWrapper(g) for g in party.meet(ACROSS)]
    groups: Groups = [FlattenedProcessGroup(within[i], across[i], WITHIN) for i in range(WITHIN)]
    groups[0].abort("a replica is lost")
    groups[1].abort("a replica is lost")

    def reduce(rank: int, group: ProcessGroup) -> float:
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    assert party.together(groups, reduce) == [WITHIN] * WITHIN  # within it goes on
    assert all("a replica is lost" in str(group.error()) for group in across)
