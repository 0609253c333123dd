"""What the documentation of gangs shows, as programs."""

from __future__ import annotations

import pytest
import torch

from tests.unit.gang.conftest import CPU, MakeCrew
from torchft_like.gang import (
    FakeGang,
    Gangs,
    ProcessGroupGang,
    ReduceOperation,
    all_sum,
    broadcast_flag,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
    maybe_get_current_gangs,
)


def test_a_sub_gang_with_specific_processes(crew: MakeCrew) -> None:
    def act(root_gang: ProcessGroupGang) -> tuple[int, int] | None:
        sub_gang = root_gang.create_gang([0, 2, 4])
        return None if sub_gang is None else (sub_gang.rank, sub_gang.size)

    assert crew(6).together(act) == [(0, 3), None, (1, 3), None, (2, 3), None]


def test_a_sum_across_all_processes(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> float:
        tensor = torch.tensor([gang.rank], dtype=torch.float32)
        gang.all_reduce(tensor, ReduceOperation.SUM)
        return tensor.item()

    assert crew(3).together(act) == [3.0] * 3


def test_tensors_gathered_from_all_processes(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> list[list[float]]:
        input_tensor = torch.tensor([gang.rank * 10], dtype=torch.float32)
        output_tensor = torch.empty([gang.size, 1], dtype=torch.float32)
        gang.all_gather(output_tensor, input_tensor)
        return output_tensor.tolist()

    assert crew(3).together(act) == [[[0.0], [10.0], [20.0]]] * 3


def test_a_collective_operation_is_simulated() -> None:
    gang = FakeGang(CPU, rank=0, size=8)
    tensor = torch.tensor([gang.rank + 1], dtype=torch.float32)
    gang.all_reduce(tensor, ReduceOperation.SUM)
    assert tensor.item() == 8.0


def test_fake_gangs_for_a_single_process() -> None:
    gangs = create_fake_gangs(CPU)
    tensor = torch.tensor([gangs.dp.rank + 3], dtype=torch.float32)
    gangs.dp.all_reduce(tensor, ReduceOperation.SUM)
    assert tensor.item() == 3.0


def test_the_current_gangs() -> None:
    gang = FakeGang(CPU)
    gangs = Gangs(root=gang, dp=gang, rdp=gang, sdp=gang, tp=gang, pp=gang)
    with gangs:
        assert maybe_get_current_gangs() is gangs
    assert maybe_get_current_gangs() is None


def test_a_decision_is_broadcast(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> bool:
        should_continue = gang.rank == 0
        return broadcast_flag(gang, should_continue, source_rank=0)

    assert crew(2).together(act) == [True, True]


def test_the_total_loss_across_processes(crew: MakeCrew) -> None:
    def act(gang: ProcessGroupGang) -> float:
        local_loss = 1.5 + gang.rank
        total_loss = all_sum(gang, local_loss)
        return (total_loss / gang.size).item()

    assert crew(2).together(act) == [2.0, 2.0]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_two_dimensions_over_four_processes(crew: MakeCrew, tp_size: int) -> None:
    def act(root_gang: ProcessGroupGang) -> tuple[float, float, float]:
        gangs = create_fsdp_gangs(create_parallel_gangs(root_gang, tp_size=tp_size))
        found = tuple(all_sum(gang, 1.0).item() for gang in (gangs.tp, gangs.dp, gangs.sdp))
        gangs.close()
        return found  # type: ignore[return-value]

    assert crew(4).together(act) == [(tp_size, 4 / tp_size, 4 / tp_size)] * 4
