"""Every collective as a method; wrong calls; groups that change; several threads."""

from __future__ import annotations

import pytest
import torch

from torchft_like.process_group.collectives import BY_NAME, POINT_TO_POINT

from .fleet import Fleet
from .methods import METHODS, THREADED, WRONG
from .scene import CONJUGATED, PLAIN, Kind
from .subjects import WORLD_MAX, Subject

pytestmark = pytest.mark.integration

# After a change of members: one operation of every sort, through Python and through C++.
SAMPLE = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter_tensor",
    "all_gather_object",
    "isend and irecv",
    "functional all_reduce",
    "get_rank, get_world_size and so on",
)


def test_every_row_of_the_table_is_called() -> None:
    rows = {BY_NAME[name].name for name in METHODS}
    assert rows == {row.name for row in BY_NAME.values()} - POINT_TO_POINT


@pytest.mark.parametrize("name", METHODS)
def test_methods_give_what_torchs_methods_give(fleet: Fleet, subject: Subject, world: int, name: str) -> None:
    """Functions of `torch.distributed` call the same methods with every other dtype and layout."""
    kinds = subject.kinds([PLAIN, Kind(dtype=torch.bfloat16), Kind(layout="strided"), CONJUGATED])
    fleet.assert_like_torch(subject.name, world, f"method {name}", kinds)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_raises_what_torch_raises(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    spoilt = fleet.assert_like_torch(subject.name, world, case)
    assert not spoilt or subject.swallows
    fleet.assert_like_torch(subject.name, world, "all_reduce")


@pytest.mark.parametrize("case", THREADED)
def test_threads_can_share_a_group(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    fleet.assert_like_torch(subject.name, world, case)


def test_members_can_become_fewer_more_and_others(fleet: Fleet, subject: Subject, world: int) -> None:
    if world == 1:
        pytest.skip("it has one member")
    for members in (world, world - 1, WORLD_MAX, WORLD_MAX, 1, world):
        fleet.renew(subject.name, members)
        for case in SAMPLE:
            fleet.assert_like_torch(subject.name, members, case)
