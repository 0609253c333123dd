"""What becomes of groups and queues when a coordinator is destroyed."""

from __future__ import annotations

import pytest
import torch

from tests.faults import raising
from tests.unit.group_coordinator.elastic_crew import LIMIT_S, Crew
from tests.unit.group_coordinator.test_coordinator import gloo, over
from tests.unit.process_group.conftest import Party
from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator import coordinator as coordinator_module
from torchft_like.message_queue import MessageQueue


def test_a_destroyed_coordinator_says_so_and_leaves_given_groups_alone(party: Party) -> None:
    groups = party.meet(2, gloo)
    for coordinator in over(groups):
        coordinator.destroy()
        coordinator.destroy()
        for act in (lambda c=coordinator: c.all_reduce(torch.ones(1)), coordinator.barrier):
            with pytest.raises(GroupCoordinatorError, match="was destroyed"):
                act()
        assert "destroyed" in repr(coordinator)
    assert party.together(groups, lambda _, g: g.allreduce([torch.ones(1)]).wait()) == [True, True]


def test_an_interrupted_farewell_gives_groups_back(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[object] = []
    [coordinator] = over(party.meet(1, gloo))
    coordinator.create_mq_broadcaster()
    coordinator._owns_groups = True
    monkeypatch.setattr(coordinator_module, "destroy_group", given_back.append)
    with monkeypatch.context() as patched:
        patched.setattr(MessageQueue, "shutdown", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            coordinator.destroy()
    assert given_back == [coordinator.cpu_group]


def test_a_farewell_that_is_interrupted_keeps_no_group(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.change("ab")
    crew.together("ab", lambda c: c.create_mq_broadcaster())
    waiting = crew.aside(crew["b"].all_reduce, torch.ones(1))
    with monkeypatch.context() as patched:
        communicator = crew["a"]._communicator
        assert communicator is not None
        patched.setattr(communicator._queues[0], "shutdown", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            crew["a"].destroy()
    assert crew["a"].membership is None
    with pytest.raises(GroupCoordinatorError):
        waiting.result(LIMIT_S)


def test_queues_that_were_shut_down_are_let_go_of(party: Party) -> None:
    coordinators = over(party.meet(2, gloo))
    for _ in range(3):
        for queue in party.together(coordinators, lambda _, c: c.create_mq_broadcaster()):
            queue.shutdown()
    for coordinator in coordinators:
        assert coordinator._communicator is not None
        assert len(coordinator._communicator._queues) == 1


def test_who_has_left_counts_nobody(crew: Crew) -> None:
    with pytest.raises(GroupCoordinatorError, match="no members"):
        _ = crew["a"].next_rank
    crew.change("ab")
    crew.change("b", leaving="a")
    left = crew["a"]
    assert (left.ranks, left.world_size, left.rank_in_group, left.is_first_rank) == ([], 0, -1, False)
    assert not left.is_last_rank
    with pytest.raises(GroupCoordinatorError, match="no members"):
        _ = left.first_rank


def test_an_interrupted_switch_releases_the_others(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.change("ab")
    with monkeypatch.context() as patched:
        patched.setattr(crew["b"], "_end_present", raising(MemoryError))
        assert crew.complete(crew.begin("abc")) == ["", "MemoryError", ""]
    assert crew["b"].membership is None
    assert "GroupCoordinatorError" in crew.outcomes("a", lambda c: c.all_reduce(torch.ones(1)))[0]
    assert {m.members for m in crew.together("abc", lambda c: c.follow())} == {("a", "b", "c")}
    assert crew.sums("abc") == [3, 3, 3]
