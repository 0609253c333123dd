"""Gangs of CUDA devices, of one member each in the process of the test; test_ranks has one of three."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.process_group.conftest import LIMIT_S, Party
from torchft_like.gang import (
    FakeGang,
    ProcessGroupGang,
    ReduceOperation,
    all_sum,
    broadcast_flag,
    create_parallel_gangs,
)
from torchft_like.process_group import ProcessGroupNCCL

CUDA = torch.device("cuda")


@pytest.fixture
def gang(party: Party) -> Iterator[ProcessGroupGang]:
    group = ProcessGroupNCCL(LIMIT_S)
    group.configure(party.prefix(), 0, 1)
    yield ProcessGroupGang(group, CUDA)
    group.shutdown()
    torch.cuda.synchronize()


def test_a_device_without_a_number_is_the_current_one(gang: ProcessGroupGang) -> None:
    assert gang.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_every_function_on_the_device(gang: ProcessGroupGang, dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, device=CUDA).to(dtype).t()
    before = tensor.clone()
    gang.all_reduce(tensor, ReduceOperation.SUM)
    gang.broadcast(tensor)
    stacked = torch.zeros(1, 3, 2, dtype=dtype, device=CUDA)
    gang.all_gather(stacked, tensor)
    listed = [torch.zeros(3, 2, dtype=dtype, device=CUDA)]
    gang.all_gather_to_list(listed, tensor)
    gang.barrier()
    assert all(torch.equal(found, before) for found in (tensor, stacked[0], listed[0]))


def test_objects_and_scalars_go_over_the_device(gang: ProcessGroupGang) -> None:
    objects: list[Any] = [{"cpu": torch.arange(3), "cuda": torch.arange(3, device=CUDA)}, "text"]
    gang.broadcast_objects(objects)
    assert [objects[0]["cpu"].device.type, objects[0]["cuda"].device.type] == ["cpu", "cuda"]
    assert broadcast_flag(gang, True)
    total = all_sum(gang, 2.5)
    assert (total.item(), total.device) == (2.5, gang.device)


def test_a_tensor_on_the_cpu_is_refused(gang: ProcessGroupGang) -> None:
    with pytest.raises(ValueError, match="moves cuda tensors"):
        gang.all_reduce(torch.ones(1), ReduceOperation.SUM)


def test_a_part_is_over_nccl_on_the_same_device(gang: ProcessGroupGang) -> None:
    part = gang.create_gang([0])
    assert part is not None
    assert part.device == gang.device
    assert isinstance(part.as_process_group(), ProcessGroupNCCL)
    assert all_sum(part, 1).item() == 1
    part.close()
    assert create_parallel_gangs(gang).root is gang


def test_a_fake_gang_works_on_the_device() -> None:
    gang = FakeGang(CUDA, size=4)
    assert all_sum(gang, 2).item() == 8
    output = torch.zeros(4, 2, device=CUDA)
    gang.all_gather(output, torch.ones(2, device=CUDA))
    assert output.sum().item() == 8
