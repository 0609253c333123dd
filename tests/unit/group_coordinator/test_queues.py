"""Queues of coordinators whose members live in threads of one process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.message_queue.queues import wait_for
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.errors import (
    CollectiveMismatchError,
    GroupCoordinatorError,
    QueueClosedError,
    QueueMemoryError,
)
from torchft_like.group_coordinator import GroupCoordinator, queues
from torchft_like.message_queue import MessageQueue
from torchft_like.message_queue.remote_audience import RemoteAudience

__all__ = ["party", "store"]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member on a machine of its own, as far as the coordinators know."""
    places = queues._places

    def apart(*arguments: object) -> list[bytes]:
        return [b"%d" % rank for rank, _ in enumerate(places(*arguments))]  # type: ignore[arg-type]

    monkeypatch.setattr(queues, "_places", apart)


def together(
    party: Party, coordinators: list[GroupCoordinator], act: Callable[[int, GroupCoordinator], MessageQueue]
) -> list[MessageQueue]:
    return party.together(coordinators, act)  # type: ignore[arg-type]


@pytest.mark.usefixtures("far")
def test_groups_that_are_broken_off_wait_for_no_reader(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []
    close = RemoteAudience.close

    def heard(audience: RemoteAudience, patience_s: float = 0.0) -> None:
        patience.append(patience_s)
        close(audience, patience_s)

    monkeypatch.setattr(RemoteAudience, "close", heard)
    coordinators = over(party.meet(2, gloo))
    writer, reader = together(party, coordinators, lambda _, c: c.create_mq_broadcaster())
    writer.enqueue("nobody reads this", LIMIT_S)
    coordinators[0]._current().break_off("a test")
    assert patience == [0]
    with pytest.raises(QueueClosedError):
        writer.enqueue("too late")
    assert reader.dequeue(LIMIT_S) == "nobody reads this"
    with pytest.raises(QueueClosedError):
        reader.dequeue(LIMIT_S)
    for coordinator in coordinators:
        coordinator.destroy()


def test_a_queue_that_was_handed_over_outlives_a_refusal(party: Party) -> None:
    given = MessageQueue(1, 1, local_reader_ranks=[7])
    coordinators = over(party.meet(2, gloo))
    found = errors(party, coordinators, lambda rank, c: c.create_mq_broadcaster(0, None if rank else given))
    assert [type(error) for error in found] == [CollectiveMismatchError, ValueError]
    with MessageQueue.create_from_handle(given.export_handle(), 7) as reader:
        given.wait_until_ready(LIMIT_S)
        given.enqueue("still the caller's", LIMIT_S)
        assert reader.dequeue(LIMIT_S) == "still the caller's"
    given.shutdown()


def _hand_over(given: dict[int, Any], rank: int, coordinator: GroupCoordinator) -> object:
    return coordinator.create_mq_broadcaster(0, given.get(rank))


def test_only_the_writers_end_of_a_queue_can_be_handed_over(party: Party) -> None:
    with MessageQueue(1, 1) as writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        coordinators = over(party.meet(2, gloo))
        for given in ({0: reader}, {0: "a queue"}):
            found = errors(party, coordinators, partial(_hand_over, given))
            assert [type(error) for error in found] == [TypeError, CollectiveMismatchError]
        party.together(coordinators, lambda _, c: c.barrier())  # type: ignore[arg-type]


def test_a_queue_that_was_handed_over_ends_with_the_groups(party: Party) -> None:
    given = MessageQueue(1, 1, local_reader_ranks=[1])
    coordinators = over(party.meet(2, gloo))
    _, read = together(
        party, coordinators, lambda rank, c: c.create_mq_broadcaster(0, None if rank else given)
    )
    given.enqueue("written before", LIMIT_S)
    coordinators[0]._current().break_off("a test")
    assert read.dequeue(LIMIT_S) == "written before"
    with pytest.raises(QueueClosedError):
        read.dequeue(LIMIT_S)


def test_who_wants_to_join_a_queue_that_was_handed_over_hears_that_the_groups_are_gone(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader knocks when the first, and so the writer's call, has failed."""
    given = MessageQueue(2, 2, local_reader_ranks=[1, 2])
    coordinators = over(party.meet(3, gloo))
    writer_has_failed = threading.Event()
    join = MessageQueue.create_from_handle

    def knock(handle: object, rank: int) -> MessageQueue:
        if rank == 1:
            coordinators[1]._current().break_off("a test")
            raise GroupCoordinatorError("a test")
        assert writer_has_failed.wait(LIMIT_S)
        return join(handle, rank)

    def create(rank: int, coordinator: GroupCoordinator) -> None:
        try:
            coordinator.create_mq_broadcaster(0, None if rank else given)
        finally:
            if rank == 0:
                writer_has_failed.set()

    monkeypatch.setattr(MessageQueue, "create_from_handle", knock)
    assert [type(error) for error in errors(party, coordinators, create)] == [GroupCoordinatorError] * 3
    wait_for(lambda: given.left_readers == [2])
    given.shutdown()


def test_a_reader_that_has_no_memory_for_an_object_does_not_take_it_for_the_next_one(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators = over(party.meet(2, gloo))
    ends = together(party, coordinators, lambda _, c: c.create_mq_broadcaster())

    def broadcast(rank: int, coordinator: GroupCoordinator) -> object:
        return queues.broadcast_object(coordinator._current(), ends[rank], "large")

    def fail(*_: object) -> object:
        raise QueueMemoryError("a copy of the message", 2, 1)

    with monkeypatch.context() as patch:
        patch.setattr(MessageQueue, "dequeue", fail)
        assert broadcast(0, coordinators[0]) == "large"
        with pytest.raises(GroupCoordinatorError, match="could not be read") as caught:
            broadcast(1, coordinators[1])
        assert isinstance(caught.value.__cause__, QueueMemoryError)
    with pytest.raises(GroupCoordinatorError):
        broadcast(1, coordinators[1])
    wait_for(lambda: ends[0].left_readers == [1])
    ends[0].shutdown()


def over_torchs_own(party: Party, store: TCPStore) -> list[GroupCoordinator]:
    place = uuid.uuid4().hex  # in the store, which serves all tests of this module

    def make(rank: int, _: object) -> GroupCoordinator:
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        group = TorchGloo(PrefixStore(f"bare/{place}", client), rank, 2, timedelta(seconds=LIMIT_S))
        return GroupCoordinator.from_groups(group, store=PrefixStore(f"roll/{place}", client))

    return party.together([None, None], make)  # type: ignore[list-item]


def test_a_group_that_does_not_tell_where_it_met_carries_no_queue_to_another_machine(
    party: Party, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_places", lambda *_: [b"here/net/0", b"there/net/0"])
    coordinators = over_torchs_own(party, store)
    for create in (
        GroupCoordinator.create_mq_broadcaster,
        GroupCoordinator.create_single_reader_mq_broadcasters,
    ):
        found = errors(party, coordinators, lambda _, c, create=create: create(c))  # type: ignore[misc]
        assert sorted(type(error).__name__ for error in found) == [
            "CollectiveMismatchError",
            "NotSupportedError",
        ]
        assert all("other machines" in str(error) for error in found)


def test_a_group_that_does_not_tell_where_it_met_carries_a_queue_to_another_user(
    party: Party, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_places", lambda *_: [b"here/net/0", b"here/net/1"])
    coordinators = over_torchs_own(party, store)
    writer, reader = together(party, coordinators, lambda _, c: c.create_mq_broadcaster())
    writer.enqueue("through the loopback interface", LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "through the loopback interface"
    for coordinator in coordinators:
        coordinator.destroy()
