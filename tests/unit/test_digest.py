"""The digest tells states apart bit by bit and refuses what it cannot read."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchft_like.digest import state_digest
from torchft_like.plain_data import dissect


def test_digest_is_the_sha256_of_the_sorted_structure_and_of_the_bytes_of_its_leaves() -> None:
    state = {"ww": torch.tensor([1, 2], dtype=torch.int16), "b": (0.5, None)}
    structure = dissect({"b": state["b"], "ww": state["ww"]})[0]
    assert state_digest(state) == hashlib.sha256(structure + struct.pack("<hh", 1, 2)).hexdigest()


def test_order_of_a_dict_does_not_count() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert state_digest({"a": one, "b": two}) == state_digest({"b": two, "a": one})


def test_strides_and_grad_do_not_count() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    transposed = values.t().contiguous().t()
    assert transposed.stride() != values.stride()
    assert state_digest({"w": nn.Parameter(transposed)}) == state_digest({"w": values})


def test_scalar_tensors_and_conjugate_views_are_read() -> None:
    value = torch.tensor([1 + 2j])
    assert state_digest({"x": value.conj()}) == state_digest({"x": torch.tensor([1 - 2j])})
    assert state_digest({"x": torch.tensor(1.0)}) != state_digest({"x": torch.tensor(2.0)})


@pytest.mark.parametrize(
    "make",
    [
        object,
        set,
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: {("tuple",): 1},
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"^outer\[0\]"):
        state_digest({"outer": [make()]})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: dict[str, object] = {}
    loop["again"] = loop
    with pytest.raises(ValueError, match="deeper than 64"):
        state_digest(loop)
