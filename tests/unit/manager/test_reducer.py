"""Averages that the backend divides itself, and those that it would divide by something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp, Work

from tests.unit.manager.test_step import quorum
from torchft_like.core.step import StepProtocol, StepRules
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.managed_work import Reduction, options_for
from torchft_like.manager.reducer import Reducer
from torchft_like.process_group import ProcessGroupDummy, ProcessGroupWrapper
from torchft_like.process_group.collectives import Collective
from torchft_like.process_group.work import finished_work

LIMIT_S = 60.0


class Dividing(ProcessGroupDummy):
    """Remembers what it was asked for; a sum is that of as many equal tensors as there are members."""

    def __init__(self, members: int, divides: bool) -> None:
        super().__init__(0, 1)
        self._members = members
        self.divides = divides
        self.asked: list[str] = []

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        tensors, options = args
        self.asked.append("AVG" if options.reduceOp == ReduceOp.AVG else "SUM")
        if options.reduceOp == ReduceOp.SUM:
            tensors[0].mul_(self._members)
        return finished_work(tensors)


class Driver:
    fatal = None

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt


def average(
    members: int, participants: int, dtype: torch.dtype, *, divides: bool = True
) -> tuple[str, float]:
    """What the group of a step is asked for, and the result where every member has a six."""
    dividing = Dividing(members, divides)
    protocol = StepProtocol(StepRules(1))
    group = ManagedGroup(ProcessGroupWrapper(pg=dividing), protocol, lambda *_, **__: None)
    attempt = Attempt(True, LIMIT_S)
    protocol.begin()
    result = quorum(max_world_size=participants, replica_world_size=members)
    group.agree(result, allow_heal=True)
    protocol.configured(result.quorum_id)
    attempt.agree(result)
    attempt.open_configured()
    driver: Any = Driver(attempt)
    tensor = torch.full((4,), 6.0, dtype=dtype)
    Reducer(protocol, group, driver).start([tensor], options_for(ReduceOp.AVG), Reduction).wait()
    assert protocol.failure is None
    return dividing.asked[0], tensor[0].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("members", [1, 2, 4])
def test_a_backend_that_divides_is_left_to_it(members: int, dtype: torch.dtype) -> None:
    assert average(members, members, dtype) == ("AVG", 6.0)


def test_wide_numbers_are_divided_by_any_number_of_members() -> None:
    assert average(3, 3, torch.float32) == ("AVG", 6.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_factor_that_is_not_exact_is_not_used(dtype: torch.dtype) -> None:
    assert average(3, 3, dtype) == ("SUM", 6.0)


@pytest.mark.no_zombie
@pytest.mark.heal_is_clean
def test_where_somebody_heals_the_participants_count_and_not_the_members() -> None:
    operation, result = average(4, 2, torch.float32)
    assert (operation, result) == ("SUM", 12.0)


def test_another_backend_adds_and_the_result_is_divided() -> None:
    assert average(2, 2, torch.float32, divides=False) == ("SUM", 6.0)
