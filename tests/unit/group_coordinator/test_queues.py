"""Queues of coordinators whose members live in threads of one process."""

from __future__ import annotations

import uuid
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from tests.faults import raising
from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.process_group.conftest import Party
from tests.waiting import wait_for
from torchft_like.errors import (
    CollectiveMismatchError,
    GroupCoordinatorError,
    QueueClosedError,
    QueueMemoryError,
)
from torchft_like.group_coordinator import CoordinatorOptions, GroupCoordinator
from torchft_like.message_queue import MessageQueue, members
from torchft_like.message_queue.remote import RemoteReaders
from torchft_like.runtime.hosts import own_host


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member on a machine of its own, as far as the coordinators know."""
    places = members._places

    def apart(*arguments: object) -> list[bytes]:
        return [b"%d" % rank for rank, _ in enumerate(places(*arguments))]  # type: ignore[arg-type]

    monkeypatch.setattr(members, "_places", apart)


@pytest.mark.usefixtures("far")
def test_groups_that_are_broken_off_wait_for_no_reader(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    lingered: list[float] = []
    close = RemoteReaders.close

    def heard(readers: RemoteReaders, linger_s: float = 0.0) -> None:
        lingered.append(linger_s)
        close(readers, linger_s)

    monkeypatch.setattr(RemoteReaders, "close", heard)
    coordinators = over(party.meet(2, gloo))
    writer, reader = party.together(coordinators, lambda _, c: c.create_mq_broadcaster())
    writer.enqueue("nobody reads this", LIMIT_S)
    coordinators[0]._current().break_off("a test")
    assert lingered == [0]
    with pytest.raises(QueueClosedError):
        writer.enqueue("too late")
    assert reader.dequeue(LIMIT_S) == "nobody reads this"
    with pytest.raises(QueueClosedError):
        reader.dequeue(LIMIT_S)
    for coordinator in coordinators:
        coordinator.destroy()


def test_all_members_read_a_queue_whose_writer_is_outside_the_group(party: Party) -> None:
    with MessageQueue(2, 2) as outside:
        handles = [outside.export_handle(), None]  # one member has it
        coordinators = over(party.meet(2, gloo))
        read = party.together(
            coordinators, lambda rank, c: c.create_mq_broadcaster(0, handles[rank], blocking=False)
        )
        outside.wait_until_ready(LIMIT_S)
        assert outside.readers == [0, 1]
        outside.enqueue("to all members", LIMIT_S)
        assert [end.dequeue(LIMIT_S) for end in read] == ["to all members"] * 2
        coordinators[1]._current().break_off("a test")
        with pytest.raises(QueueClosedError):
            read[1].dequeue(LIMIT_S)
        outside.enqueue("to the one whose groups have not ended", LIMIT_S)
        assert outside.left_readers == [1]


def test_a_queue_whose_writer_is_outside_outlives_a_refusal(party: Party) -> None:
    with MessageQueue(1, 1, local_reader_ranks=[7]) as outside:
        handle = outside.export_handle()
        coordinators = over(party.meet(2, gloo))
        found = errors(party, coordinators, lambda _, c: c.create_mq_broadcaster(0, handle))
        assert [type(error) for error in found] == [ValueError] * 2
        with MessageQueue.create_from_handle(handle, 7) as reader:
            outside.wait_until_ready(LIMIT_S)
            outside.enqueue("still there", LIMIT_S)
            assert reader.dequeue(LIMIT_S) == "still there"


def _hand_over(given: object, rank: int, coordinator: GroupCoordinator) -> object:
    return coordinator.create_mq_broadcaster(0, None if rank else given)


def test_only_the_handle_of_a_queue_can_be_handed_over_and_no_error_tells_its_secrets(party: Party) -> None:
    with MessageQueue(1, 1) as queue:
        handle = queue.export_handle()
        token = repr(handle["token"])[2:14]
        coordinators = over(party.meet(2, gloo))
        for given in (queue, "a queue", [handle], handle["token"], {**handle, "version": handle["token"]}):
            found = errors(party, coordinators, partial(_hand_over, given))
            assert [type(error) for error in found] == [ValueError, CollectiveMismatchError]
            assert not [error for error in found if token in f"{error!r} {error.__cause__!r}"]
        party.together(coordinators, lambda _, c: c.barrier())


def test_the_size_of_a_coordinators_queues_is_one_of_its_options(party: Party) -> None:
    options = CoordinatorOptions(max_chunk_bytes=4096, max_chunks=3)
    coordinators = [GroupCoordinator.from_groups(pg, options=options) for pg in party.meet(2, gloo)]
    for end in party.together(coordinators, lambda _, c: c.create_mq_broadcaster()):
        assert "3 x 4096 bytes" in repr(end)


def test_a_process_group_alone_is_enough_for_queues(party: Party, store: TCPStore) -> None:
    groups: list[Any] = party.meet(2, gloo)
    for pair in (groups, [c.cpu_group for c in over_torchs_own(party, store)]):

        def make(rank: int, pg: Any) -> tuple[MessageQueue, MessageQueue, list[object]]:
            one = MessageQueue.create_from_process_group(pg, 4096, 3, 1)
            return one, *MessageQueue.create_from_process_group_single_reader(pg, 4096, 3, 1)

        (reader, own, _), (writer, _, handles) = party.together(pair, make)
        writer.broadcast_object({"from": 1})
        assert reader.broadcast_object() == {"from": 1}
        with MessageQueue.create_from_handle(handles[0], 0) as end:
            own.wait_until_ready(LIMIT_S)
            own.enqueue("back", LIMIT_S)
            assert end.dequeue(LIMIT_S) == "back"
        assert "3 x 4096 bytes" in repr(own)
    with pytest.raises(TypeError, match="a process group of torch's or of ours was expected, not a str"):
        MessageQueue.create_from_process_group("world")


def _of_one_reader(rank: int, pg: Any) -> object:
    return MessageQueue.create_from_process_group_single_reader(pg, reader_rank=5 if rank else 0)


def _blocking_on_the_reader(rank: int, pg: Any) -> object:
    return MessageQueue.create_from_process_group(pg, blocking=rank == 1)


def test_a_wrong_argument_of_one_member_is_an_error_on_all(party: Party) -> None:
    groups: list[Any] = party.meet(2, gloo)
    found = errors(party, groups, _of_one_reader)
    assert [type(error) for error in found] == [CollectiveMismatchError, ValueError]
    assert "rank 5 of the job is not in the group" in str(found[1])
    found = errors(party, groups, _blocking_on_the_reader)  # who would wait for a writer that does not
    assert [type(error) for error in found] == [CollectiveMismatchError] * 2


def test_a_kept_error_keeps_nothing_of_a_queue(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member dies when the writer has made its queue, and before it can say so."""
    coordinators = over(party.meet(2, gloo))
    made: list[MessageQueue] = []
    export = MessageQueue.export_handle

    def last_words(queue: MessageQueue) -> dict[str, object]:
        made.append(queue)
        coordinators[1]._current().break_off("a test")
        return export(queue)

    monkeypatch.setattr(MessageQueue, "export_handle", last_words)
    kept = errors(party, coordinators, lambda _, c: c.create_mq_broadcaster())
    assert [type(error) for error in kept] == [GroupCoordinatorError] * 2
    assert made[0].is_closed


def test_an_object_without_memory_is_not_the_next_one(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinators = over(party.meet(2, gloo))
    ends = party.together(coordinators, lambda _, c: c.create_mq_broadcaster())

    def broadcast(rank: int, coordinator: GroupCoordinator) -> object:
        return members.broadcast_object(coordinator._current(), ends[rank], "large")

    with monkeypatch.context() as patch:
        patch.setattr(MessageQueue, "dequeue", raising(QueueMemoryError("a copy of the message", 2, 1)))
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

    return party.together([None, None], make)


@pytest.mark.parametrize("place", [b"there/net/0", b"here/net/1"], ids=["another machine", "another user"])
def test_a_group_that_does_not_tell_where_it_met_carries_a_queue_to(
    party: Party, store: TCPStore, monkeypatch: pytest.MonkeyPatch, place: bytes
) -> None:
    """To another machine by the address of this host's name, which is all that is known."""
    monkeypatch.setattr(members, "_places", lambda *_: [b"here/net/0", place])
    coordinators = over_torchs_own(party, store)
    writer, reader = party.together(coordinators, lambda _, c: c.create_mq_broadcaster())
    assert place == b"here/net/1" or own_host(others_ask=True) in str(writer.export_handle()["address"])
    writer.enqueue("through the network", LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "through the network"
    for coordinator in coordinators:
        coordinator.destroy()
