"""Whether tensors share memory, and what is divided in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from torchft_like.writing import divide, share_memory

WHOLE = torch.arange(24.0)
VIEWS = {
    "nothing": WHOLE[3:3],
    "the first half": WHOLE[:12],
    "the second half": WHOLE[12:],
    "the middle": WHOLE[6:18],
    "even": WHOLE[::2],
    "odd": WHOLE[1::2],
    "a column": WHOLE.view(4, 6)[:, 2],
    "two columns": WHOLE.view(4, 6)[:, 1:3],
    "a column turned": WHOLE.view(4, 6).t()[5],
    "one repeated": WHOLE[7:8].expand(3),
    "a scalar": WHOLE[11],
    "another memory": torch.arange(24.0),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.product(VIEWS, repeat=2)))
def test_memory_is_shared_where_an_element_of_the_one_is_one_of_the_other(one: str, other: str) -> None:
    assert share_memory(VIEWS[one], VIEWS[other]) == bool(places(VIEWS[one]) & places(VIEWS[other]))


def places(tensor: Tensor) -> set[int]:
    start = tensor.data_ptr()
    steps = itertools.product(*map(range, tensor.shape))
    offsets = (sum(map(int.__mul__, step, tensor.stride())) for step in steps)
    return {start + offset * tensor.itemsize for offset in offsets}


def test_memory_that_is_seen_as_another_dtype_is_shared() -> None:
    assert share_memory(WHOLE[:4], WHOLE.view(torch.int32)[3:])
    assert not share_memory(WHOLE[:4], WHOLE.view(torch.int32)[4:])


def test_sparse_tensors_are_not_looked_into() -> None:
    sparse = torch.eye(3).to_sparse()
    assert not share_memory(sparse, sparse)


def test_sparse_tensors_are_divided_once_too() -> None:
    sparse = torch.eye(3).to_sparse()
    divide([sparse, sparse], 2)
    assert sparse.to_dense().diagonal().tolist() == [0.5] * 3
