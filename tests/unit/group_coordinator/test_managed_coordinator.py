"""A managed coordinator whose quorum changes between two calls, in threads of one process."""

from __future__ import annotations

import pytest
import torch

from tests.unit.process_group.conftest import Party
from tests.unit.process_group.failing import FakeManager
from tests.waiting import wait_for
from torchft_like.errors import (
    CollectiveMismatchError,
    GroupCoordinatorError,
    StaleEpochError,
    StillUnderWayError,
)
from torchft_like.group_coordinator import ManagedCoordinator
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

LIMIT_S = 30.0


@pytest.fixture
def groups(party: Party) -> list[ProcessGroup]:
    """Three, not configured yet."""
    return [party.own(ProcessGroupGloo(LIMIT_S)) for _ in range(3)]


def over(groups: list[ProcessGroup]) -> list[ManagedCoordinator]:
    return [ManagedCoordinator(FakeManager(group)) for group in groups]


def test_the_next_rank_is_that_of_the_quorum_of_the_call(party: Party, groups: list[ProcessGroup]) -> None:
    coordinators = over(groups)

    def hand_on(rank: int, coordinator: ManagedCoordinator) -> object:
        [sending] = coordinator.isend_tensor_dict({"from": rank})
        received = coordinator.recv_tensor_dict()
        sending.wait(LIMIT_S)
        return received and received["from"]

    for size in (2, 3, 2):  # of the quorum: the first call in it is one that leaves out the other rank
        party.configure(groups[:size])
        found = party.together(coordinators[:size], hand_on)
        assert found == [(rank - 1) % size for rank in range(size)]


def test_a_graph_entered_in_an_earlier_quorum_ends_for_all(party: Party, groups: list[ProcessGroup]) -> None:
    torch._dynamo.reset()
    coordinators = over(groups)

    def gather(_: int, coordinator: ManagedCoordinator) -> object:
        def function(row: torch.Tensor) -> torch.Tensor:
            return coordinator.all_gather(row, 0)

        try:
            return len(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(1)))
        except GroupCoordinatorError as error:
            return str(error)

    party.configure(groups[:2])
    party.together(coordinators[:2], lambda _, c: c.refresh())
    assert party.together(coordinators[:2], gather) == [2, 2]
    party.configure(groups)
    coordinators[2].refresh()
    found = party.together(coordinators, gather)
    assert ["entered with 2 members" in str(each) for each in found] == [True, True, False]
    assert all(coordinator._manager.errored() for coordinator in coordinators)
    party.configure(groups)
    for coordinator in coordinators:
        coordinator._manager.error = None  # type: ignore[attr-defined] # it is a FakeManager
    party.together(coordinators, lambda _, c: c.refresh())
    assert party.together(coordinators, gather) == [3, 3, 3]


def test_a_wait_whose_time_is_up_does_not_lose_the_step(party: Party, groups: list[ProcessGroup]) -> None:
    party.configure(groups[:2])
    sender, receiver = coordinators = over(groups[:2])
    _, [handle], _ = receiver.irecv_tensor_dict(0)
    with pytest.raises(StillUnderWayError):
        handle.wait(0.05)
    sender.send_tensor_dict({"a": torch.ones(1)}, 1)
    assert handle.wait(LIMIT_S) == {"a": torch.ones(1)}
    assert [coordinator._manager.errored() for coordinator in coordinators] == [None, None]


def test_what_one_rank_refuses_loses_the_step_of_all(party: Party, groups: list[ProcessGroup]) -> None:
    party.configure(groups[:2])
    coordinators = over(groups[:2])

    def gather(rank: int, coordinator: ManagedCoordinator) -> Exception:
        sizes = [9, 9] if rank else None
        with pytest.raises((ValueError, CollectiveMismatchError)) as caught:
            coordinator.all_gatherv(torch.ones(2, 3), sizes=sizes)
        return caught.value

    refused = party.together(coordinators, gather)
    assert [coordinator._manager.errored() for coordinator in coordinators] == refused
    assert isinstance(refused[0], CollectiveMismatchError)


def test_a_barrier_of_an_earlier_quorum_says_it_is_stale(party: Party, groups: list[ProcessGroup]) -> None:
    party.configure(groups[:2])
    waiting = over(groups[:2])[0]
    barrier = party.aside(waiting.barrier)
    wait_for(lambda: waiting._barriers and waiting._barriers._pending)
    party.configure(groups[:2])
    with pytest.raises(StaleEpochError):
        barrier.result(LIMIT_S)


def test_objects_do_not_take_the_queue_of_an_earlier_quorum(party: Party, groups: list[ProcessGroup]) -> None:
    party.configure(groups[:2])
    coordinators = over(groups[:2])

    def broadcast_through_a_queue(_: int, coordinator: ManagedCoordinator) -> object:
        coordinator.mq_broadcaster = coordinator.create_mq_broadcaster()
        return coordinator.broadcast_object("first")

    assert party.together(coordinators, broadcast_through_a_queue) == ["first"] * 2
    party.configure(groups[:2])
    assert party.together(coordinators, lambda _, c: c.broadcast_object("next")) == ["next"] * 2
