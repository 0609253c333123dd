"""Group coordinators whose tensors are on a GPU.

NCCL refuses two ranks on one device in one process. So the members of a group of two, which live in threads
here, have no device group, and their tensors go through memory of the CPU; and a group with NCCL has one
member. test_ranks has a device group of three, in processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import GatherOptions, ReduceScatterOptions

from tests.unit.process_group.conftest import LIMIT_S, Party
from torchft_like.errors import CollectiveMismatchError
from torchft_like.group_coordinator import CoordinatorOptions, GroupCoordinator
from torchft_like.process_group import ProcessGroupGloo, ProcessGroupNCCL

pytestmark = pytest.mark.usefixtures("no_operator")

CHECKED = CoordinatorOptions(check_collectives=True)


@pytest.fixture
def pair(party: Party) -> list[GroupCoordinator]:
    """Two members on one device."""
    groups = party.meet(2, lambda: ProcessGroupGloo(LIMIT_S, check_collectives=False))
    return [GroupCoordinator.from_groups(group, device="cuda:0", options=CHECKED) for group in groups]


@pytest.fixture
def alone(party: Party) -> Iterator[GroupCoordinator]:
    """One member with a device group."""
    gloo, nccl = ProcessGroupGloo(LIMIT_S), ProcessGroupNCCL(LIMIT_S)
    gloo.configure(party.prefix(), 0, 1)
    nccl.configure(party.prefix(), 0, 1)
    yield GroupCoordinator.from_groups(gloo, nccl, device="cuda:0")
    nccl.shutdown()
    gloo.shutdown()
    torch.cuda.synchronize()


def ones(*shape: int, times: float = 1.0) -> Tensor:
    return torch.full(shape, times, device="cuda:0")


def assert_same(found: Any, expected: Tensor) -> None:
    assert found.device == torch.device("cuda:0")
    assert torch.equal(found, expected)


def test_tensors_of_a_device_without_a_group_come_back_to_it(party: Party, pair: list[Any]) -> None:
    def talk(rank: int, c: GroupCoordinator) -> None:
        mine = ones(2, 3, times=rank + 1)
        assert_same(c.all_reduce(mine), ones(2, 3, times=3))
        assert_same(c.all_gather(mine, 0), torch.cat([ones(2, 3), ones(2, 3, times=2)]))
        assert_same(c.all_gatherv(ones(rank, 3)), ones(1, 3))
        assert_same(c.reduce_scatter(mine, 0), ones(1, 3, times=3))
        assert_same(c.reduce_scatterv(mine, 1, [3, 0]), ones(2, 0 if rank else 3, times=3))
        assert_same(c.broadcast(mine, 1), ones(2, 3, times=2))
        gathered = c.gather(mine, 1, 0)
        if rank == 1:
            assert_same(gathered, ones(4, 3, times=2))

    party.together(pair, talk)


def test_messages_keep_the_kind_of_device(party: Party, pair: list[Any]) -> None:
    value = {"there": ones(4), "here": torch.ones(4), "many": ones(1 << 18)}

    def check(found: Any) -> None:
        assert_same(found["there"], ones(4))
        assert_same(found["many"], ones(1 << 18))
        assert found["here"].device.type == "cpu"

    def talk(rank: int, c: GroupCoordinator) -> None:
        check(c.broadcast_tensor_dict(value if rank == 0 else None))
        check(c.ibroadcast_tensor_dict(value if rank == 0 else None).wait(LIMIT_S))
        _, [coming], _ = c.irecv_tensor_dict()
        [going] = c.isend_tensor_dict(value)
        check(coming.wait(LIMIT_S))
        going.wait(LIMIT_S)
        if rank == 0:
            c.send(ones(3))
        else:
            assert_same(c.recv((3,), torch.float32), ones(3))
        hidden, logits = c.dispatch(ones(rank, 4), ones(rank, 2))
        assert_same(logits, ones(1, 2))
        assert_same(c.combine(hidden), ones(rank, 4, times=2))

    party.together(pair, talk)


def test_a_wrong_tensor_of_one_rank_is_an_error_on_both(party: Party, pair: list[Any]) -> None:
    def talk(rank: int, c: GroupCoordinator) -> None:
        with pytest.raises(CollectiveMismatchError):
            c.all_reduce(ones(2 + rank))

    party.together(pair, talk)


def test_a_group_of_one_with_nccl(alone: GroupCoordinator) -> None:
    mine = ones(2, 3)
    for found in (
        alone.all_reduce(mine),
        alone.all_gather(mine),
        alone.all_gatherv(mine),
        alone.reduce_scatter(mine),
        alone.reduce_scatterv(mine),
        alone.gather(mine),
        alone.broadcast(mine),
    ):
        assert_same(found, mine)
    assert_same(alone.recv((2, 3), torch.float32), ones(2, 3, times=0))
    alone.barrier()


def test_nccl_moves_what_the_communicator_gives_it(alone: GroupCoordinator) -> None:
    """The calls that a larger group makes, with the dtypes and shapes in which it makes them."""
    communicator = alone._current()
    data, target = torch.arange(8, dtype=torch.uint8, device="cuda:0"), ones(8).to(torch.uint8)
    communicator.broadcast(data, 0).wait()
    channel = communicator.channels["cuda"]
    channel.start("_allgather_base", target, data).wait()
    assert torch.equal(target, data)
    target.zero_()
    channel.start("gather", [[target]], [data], GatherOptions()).wait()
    assert torch.equal(target, data)
    own, rows = ones(2), 3 * ones(2)
    channel.start("_reduce_scatter_base", own, rows, ReduceScatterOptions()).wait()
    assert torch.equal(own, rows)
    target.zero_()
    channel.start("alltoall_base", target, data, [8], [8]).wait()
    assert torch.equal(target, data)


def test_a_graph_is_captured_on_a_stream_of_its_own(alone: GroupCoordinator) -> None:
    value, doubled = ones(4), ones(4, times=0)
    outer = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with alone.graph_capture() as context:
        assert context.stream == torch.cuda.current_stream() != outer
        with alone.graph_capture(context) as inner:
            assert inner is context
            with torch.cuda.graph(graph, stream=context.stream):
                doubled.copy_(alone.all_reduce(value) * 2)
    assert torch.cuda.current_stream() == outer
    value.fill_(3.0)
    graph.replay()
    assert_same(doubled, ones(4, times=6))


def test_the_outer_stream_waits_for_what_was_done_on_the_other(alone: GroupCoordinator) -> None:
    target = ones(1 << 20, times=0)
    with alone.graph_capture():
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        target.fill_(1.0)
    assert_same(target + 0, ones(1 << 20))
