"""FakeGang: as if every member held the caller's tensors."""

from __future__ import annotations

import pytest
import torch

from torchft_like.errors import NotSupportedError, PlainDataError
from torchft_like.gang import FakeGang, ReduceOperation, all_sum

CPU = torch.device("cpu")


@pytest.fixture
def gang() -> FakeGang:
    return FakeGang(CPU, rank=2, size=4)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOperation.SUM, [8.0, 12.0]),
        (ReduceOperation.PRODUCT, [16.0, 81.0]),
        (ReduceOperation.MEAN, [2.0, 3.0]),
        (ReduceOperation.MIN, [2.0, 3.0]),
        (ReduceOperation.MAX, [2.0, 3.0]),
    ],
)
def test_a_reduction_is_of_equal_tensors(gang: FakeGang, op: ReduceOperation, expected: list[float]) -> None:
    tensor = torch.tensor([2.0, 3.0])
    gang.all_reduce(tensor, op)
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint16, torch.uint32, torch.int64, torch.bfloat16, torch.complex64]
)
def test_a_sum_multiplies_by_the_size_whatever_the_dtype(gang: FakeGang, dtype: torch.dtype) -> None:
    tensor = torch.tensor([3, 1]).to(dtype)
    gang.all_reduce(tensor, ReduceOperation.SUM)
    assert tensor.tolist() == [12, 4]


def test_a_tensor_with_gaps_is_reduced_in_its_place(gang: FakeGang) -> None:
    whole = torch.ones(3, 2)
    gang.all_reduce(whole[:, 0], ReduceOperation.SUM)
    assert whole.tolist() == [[4.0, 1.0]] * 3


def test_numbers_are_added_up_on_the_gangs_device(gang: FakeGang) -> None:
    with torch.device("meta"):
        total = all_sum(gang, 3)
    assert total.device == CPU
    assert total.item() == 12


@pytest.mark.parametrize("shape", [(4, 2, 3), (8, 3)])
def test_a_gather_repeats_the_callers_tensor_in_either_shape(gang: FakeGang, shape: tuple[int, ...]) -> None:
    source, output = torch.arange(3.0).expand(2, 3), torch.zeros(shape)
    gang.all_gather(output, source)
    assert torch.equal(output.view(4, 2, 3), source.expand(4, 2, 3))


def test_a_gather_takes_the_callers_place_in_the_output(gang: FakeGang) -> None:
    output = torch.arange(8.0).view(4, 2)
    gang.all_gather(output, output[1])
    assert output.tolist() == [[2.0, 3.0]] * 4
    outputs = [torch.full((2,), float(rank)) for rank in range(4)]
    gang.all_gather_to_list(outputs, outputs[2])
    assert [one.tolist() for one in outputs] == [[2.0, 2.0]] * 4


def test_objects_that_a_real_gang_refuses_are_refused(gang: FakeGang) -> None:
    gang.broadcast_objects([{"a": [1, torch.ones(1)]}], source_rank=2)
    gang.broadcast_objects([object()], source_rank=0)  # another's: this one is only a place for it
    with pytest.raises(PlainDataError):
        gang.broadcast_objects([object()], source_rank=2)


def test_a_part_has_the_ranks_in_the_order_in_which_they_are_given(gang: FakeGang) -> None:
    part = gang.create_gang([3, 2, 0])
    assert part is not None
    assert (part.rank, part.size) == (1, 3)
    inner = part.create_gang([1])
    assert inner is not None
    assert (inner.rank, inner.size) == (0, 1)
    assert gang.create_gang([0, 1]) is None


def test_there_is_no_process_group(gang: FakeGang) -> None:
    with pytest.raises(NotSupportedError, match="ProcessGroupGang"):
        gang.as_process_group()


def test_a_gang_of_tensors_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="not meta"):
        FakeGang(torch.device("meta"))


def test_a_rank_outside_of_the_gang_is_refused() -> None:
    with pytest.raises(ValueError, match="gang of 2"):
        FakeGang(CPU, rank=2, size=2)
