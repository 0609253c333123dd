"""Objects that a gang broadcasts, over real Gloo groups whose members are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gang.conftest import MakeCrew
from torchft_like.gang import GangError, ProcessGroupGang, all_sum, broadcast_flag


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_of_the_source_replace_those_of_the_others(crew: MakeCrew, size: int) -> None:
    source = size - 1
    sent = [
        {"a": [1, 2.5, None, True, "text", b"bytes"], ("b", 3): (torch.arange(3), torch.zeros(0, 2))},
        np.arange(4, dtype=np.int16).reshape(2, 2),
        torch.tensor(True),
        torch.arange(6.0).view(2, 3).t(),
    ]

    def act(gang: ProcessGroupGang) -> list[Any]:
        objects: list[Any] = list(sent) if gang.rank == source else [None] * len(sent)
        gang.broadcast_objects(objects, source)
        return objects

    for first, array, flag, turned in crew(size).together(act):
        assert first["a"] == sent[0]["a"]  # type: ignore[index]
        assert torch.equal(first["b", 3][0], torch.arange(3))
        assert first["b", 3][1].shape == (0, 2)
        assert array.tolist() == [[0, 1], [2, 3]]
        assert array.dtype == np.int16
        assert flag.item() is True
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t())


def test_lists_of_unequal_length_are_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(3)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([0] * (1 + (gang.rank == 1))))
    assert len({str(error) for error in found}) == 1
    assert "length 1; rank 1: broadcast_objects src 0 length 2" in str(found[0])
    assert all(isinstance(error, ValueError) for error in found)
    assert gangs.together(lambda gang: broadcast_flag(gang, gang.rank == 2, 2)) == [True] * 3


def test_something_else_than_a_list_is_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(2)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([1] if gang.rank == 0 else (None,)))  # type: ignore[arg-type]
    assert all(isinstance(error, ValueError) for error in found)
    assert "rank 1: broadcast_objects src 0 length of no list" in str(found[0])
    assert str(found[1]) == "objects are given in a list, not in a tuple"
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [2, 2]


def test_an_object_that_does_not_fit_into_memory_is_an_error_on_every_member(crew: MakeCrew) -> None:
    gangs = crew(2)
    found = gangs.outcomes(lambda gang: gang.broadcast_objects([torch.zeros(1).expand(2**46)]))
    assert "memory" in str(found[0])
    assert isinstance(found[1], GangError)
    assert "cannot send its objects" in str(found[1])
    assert gangs.together(lambda gang: all_sum(gang, 1).item()) == [2, 2]
