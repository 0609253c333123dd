"""Group coordinators of real processes: every method in groups of one to four; members that are killed."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.integration import coordinator_job as job
from tests.integration.coordinator_cases import CASES
from tests.stores import serve_store
from torchft_like.testing.ranks import Rank, Ranks, running

pytestmark = pytest.mark.integration
_prefixes = itertools.count()
HOLDS = [None] * 4  # what failed in a case, by rank


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return serve_store()


@pytest.fixture(scope="module")
def ranks(store: TCPStore) -> Iterator[Ranks]:
    """Four ranks of one job, each in a coordinator of every size."""
    with running(4) as ranks:
        assert ranks.ask(job.init, store.port) == [
            [[0, 1, 2, 3], [0, 1, 2], [0, 2], [0]],
            [[0, 1, 2, 3], [0, 1, 2], job.OTHERS, [1]],
            [[0, 1, 2, 3], [0, 1, 2], [0, 2], [2]],
            [[0, 1, 2, 3], [3], job.OTHERS, [3]],
        ]
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_in_groups_of_every_size(ranks: Ranks, case: str) -> None:
    for size in job.SHARES:
        assert ranks.ask(job.run, case, str(size)) == HOLDS


OVER_ANY_GROUP = (
    "all_reduce_adds",
    "all_gatherv_joins_what_the_ranks_have",
    "reduce_scatter_adds_and_shares_out",
    "gather_joins_on_one_rank",
    "objects_are_broadcast",
    "tensor_dicts_are_sent",
    "a_barrier_names_who_is_missing",
    "a_wrong_argument_of_one_rank_is_an_error_on_all",
)


@pytest.mark.parametrize("case", OVER_ANY_GROUP)
def test_over_a_group_of_torchs_own(ranks: Ranks, case: str) -> None:
    assert ranks.ask(job.run, case, "torch's own") == HOLDS


def test_tensors_that_are_replicated_are_sent_in_slices(ranks: Ranks) -> None:
    shared = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    found = ranks.ask(job.slices, True, True)
    assert found == [None, [shared, [0], "from 0"], None, [shared, [2], "from 2"]]


def test_slices_of_tensors_that_differ_are_refused_by_all_their_receivers(ranks: Ranks) -> None:
    found = ranks.ask(job.slices, False, True)
    for text in (found[1], found[3]):
        assert "CollectiveMismatchError" in text
        assert "shared" in text


@pytest.mark.parametrize("by_handle", [False, True])
def test_a_slice_that_is_not_sent_is_an_error_for_all_receivers(ranks: Ranks, by_handle: bool) -> None:
    found = ranks.ask(job.slices_without_one, by_handle)
    assert [total for _, total in found] == [2.0] * 4
    sent, missed, refused, unsent = (text for text, _ in found)
    assert sent == "no error: None"
    assert refused.startswith("ValueError: all_gather_tensors names 'shared'")
    for text in (missed, unsent):
        assert text.startswith("CollectiveMismatchError")
        assert "all_gather_tensors names 'shared'" in text


def test_tensors_that_are_not_declared_are_sent_whole(ranks: Ranks) -> None:
    found = ranks.ask(job.slices, False, False)
    assert [found[1][0][0], found[3][0][0]] == [[0, 1, 2], [2, 3, 4]]


def test_rank_0_broadcasts_objects_through_a_queue_until_the_coordinator_is_destroyed(ranks: Ranks) -> None:
    assert ranks.ask(job.run, "objects_are_broadcast", "queue") == HOLDS
    for outcome in ranks.ask(job.destroy):
        assert outcome[0] == "1 groups"
        assert all("GroupCoordinatorError" in text and "was destroyed" in text for text in outcome[1:])


def test_a_compiled_function_is_one_graph(ranks: Ranks) -> None:
    pair = Ranks([ranks[0], ranks[2]])
    assert pair.ask(job.compiled) == [(1, [5.0, 5.0])] * 2


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[0, 1], [2]], "leaves out ranks of the default group: [3]"),
        ([[0, 1], [1, 2, 3]], "more than once: [1]"),
        ([[0, 1, 2, 3, 4]], "that the default group has not: [4]"),
        ([[0, 1, 2, 3], []], "empty group"),
    ],
)
def test_groups_that_do_not_make_up_the_job_are_refused(ranks: Ranks, groups: object, said: str) -> None:
    for text in ranks.ask(job.make, groups, 0, "gloo", True):
        assert text.startswith("ValueError")
        assert said in text


WHOLE = [[0, 1, 2, 3]]
RIGHT: list[Any] = [WHOLE, 0, "gloo", True, False, "tp"]
DIFFERENT: dict[str, list[Any]] = {
    "group_ranks": [[[0, 1], [2, 3]], *RIGHT[1:]],
    "torch_distributed_backend": [WHOLE, 0, "torchft-baby-gloo", *RIGHT[3:]],
    "use_device_communicator": [*RIGHT[:3], False, *RIGHT[4:]],
    "use_message_queue_broadcaster": [*RIGHT[:4], True, "tp"],
    "group_name": [*RIGHT[:5], "pp"],
    "timeout": [*RIGHT, {"timeout": 6}],
    "check_collectives": [*RIGHT, {"check_collectives": True}],
    "message_bytes_max": [*RIGHT, {"message_bytes_max": 7}],
}


@pytest.mark.parametrize("argument", DIFFERENT)
def test_a_coordinator_one_rank_makes_differently_is_an_error_on_all(ranks: Ranks, argument: str) -> None:
    for text in ranks.ask(job.make_with, [RIGHT, RIGHT, DIFFERENT[argument], RIGHT]):
        assert text.startswith(f"CollectiveMismatchError: the ranks do not agree on the {argument}: ranks")
        assert "rank 2: " in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([WHOLE, -1, *RIGHT[2:]], "local_rank is -1"),
        ([*RIGHT[:5], "p" * 101], "group_name has 101 characters"),
    ],
)
def test_a_coordinator_one_rank_cannot_make_fails_on_all(ranks: Ranks, wrong: list[Any], said: str) -> None:
    texts = ranks.ask(job.make_with, [RIGHT, RIGHT, wrong, RIGHT])
    assert texts.pop(2).startswith(f"ValueError: {said}")
    for text in texts:
        assert text.startswith("CollectiveMismatchError")
        assert f"rank 2: GroupCoordinator: ValueError: {said}" in text


@pytest.fixture
def pair(store: TCPStore) -> Iterator[Ranks]:
    """Two ranks of a job of their own."""
    with running(2) as ranks:
        ranks.ask(job.start, store.port, f"pair/{next(_prefixes)}", 2)
        yield ranks


def test_a_rank_that_is_late_to_make_a_coordinator_is_named_and_the_next_one_is_made(pair: Ranks) -> None:
    texts = [
        rank.ask(job.make, number, [[0, 1]], 0, "gloo", True, False, "early", {"timeout": 0.5})
        for number, rank in enumerate(pair)
    ]
    for text in texts:
        assert text.startswith("CollectiveTimeoutError: timed out after 0.5 s: rank 1 did not come")
    for text in pair.ask(job.make, [[0, 1]], 0, "gloo", True):
        assert text.startswith("no error")


def test_coordinators_that_only_some_ranks_have_do_not_count(pair: Ranks) -> None:
    pair[0].ask(job.make_some_alone, 0)
    for text in pair.ask(job.make, [[0, 1]], 0, "gloo", True):
        assert text.startswith("no error")


def test_coordinators_of_a_default_group_that_was_there_before_do_not_count(pair: Ranks) -> None:
    pair[0].ask(job.make, 0, [[0], [1]], 0, "gloo", True, False, None, {"timeout": 0.5})
    pair.ask(job.start_again, f"pair/{next(_prefixes)}")
    for text in pair.ask(job.make, [[0, 1]], 0, "gloo", True):
        assert text.startswith("no error")


# ------------------------------------------------------------------------- faults


@pytest.fixture
def victim() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.end()


def meet(store: TCPStore, members: Ranks, swallows: bool = False) -> None:
    """A group for one fault."""
    address = f"127.0.0.1:{store.port}/faults/{next(_prefixes)}"
    members.ask(job.meet, address, swallows)


def with_a_queue(store: TCPStore, ranks: Sequence[Rank], *size: int) -> Ranks:
    """A group through whose queue one object has gone."""
    meet(store, members := Ranks(ranks))
    assert members.ask(job.use_a_queue, *size) == [["first"]] * 3
    return members


# Where a rank may have given, or got, all that it has to before it can hear: it hears with its next call.
MAY_SUCCEED_FOR_SOME = ("broadcast", "gather", "reduce_scatter")


def run_into_a_death(
    store: TCPStore, ranks: Ranks, victim: Rank, name: str, swallows: bool = False
) -> list[str]:
    """Rank 2 is killed inside a call in which rank 1 waits, too; then rank 0 comes. How it ends for both."""
    late, waiting = ranks[0], ranks[1]
    meet(store, Ranks([late, waiting, victim]), swallows)
    for rank in (victim, waiting):
        rank.ask(job.begin, 0, name)
    assert waiting.ask(job.is_blocked, 0)
    assert victim.ask(job.is_blocked, 0)
    victim.kill()
    survivors = Ranks([late, waiting])
    late.ask(job.begin, 0, name)
    texts = survivors.ask(job.end)
    if name in MAY_SUCCEED_FOR_SOME:
        assert all(text.startswith(("GroupCoordinatorError", "no error")) for text in texts), texts
        survivors.ask(job.begin, "all_reduce")
        texts = survivors.ask(job.end)
    return texts


@pytest.mark.parametrize("name", job.CALLS)
def test_all_hear_of_a_member_killed_inside(store: TCPStore, ranks: Ranks, victim: Rank, name: str) -> None:
    for text in run_into_a_death(store, ranks, victim, name):
        assert text.startswith("GroupCoordinatorError"), text


@pytest.mark.parametrize("name", ["all_reduce", "recv_object", "broadcast_tensor_dict"])
def test_a_group_cannot_hide_its_errors_here(store: TCPStore, ranks: Ranks, victim: Rank, name: str) -> None:
    for text in run_into_a_death(store, ranks, victim, name, swallows=True):
        assert text.startswith("GroupCoordinatorError"), text


def test_readers_of_a_queue_hear_of_its_writers_death(store: TCPStore, ranks: Ranks, victim: Rank) -> None:
    members = with_a_queue(store, [victim, ranks[0], ranks[1]])
    for rank in members[1:]:
        rank.tell(job.broadcast_object, 1)
    victim.kill()
    for rank in members[1:]:
        assert rank.answer().startswith("GroupCoordinatorError")


def test_the_writer_of_a_queue_hears_of_a_readers_death(store: TCPStore, ranks: Ranks, victim: Rank) -> None:
    with_a_queue(store, [ranks[0], ranks[1], victim])
    victim.kill()
    assert "ranks [2] do not read" in ranks[0].ask(job.broadcast_object, 0)
    assert "second" in ranks[1].ask(job.broadcast_object, 1)  # it was written before the writer knew


@pytest.mark.parametrize(
    ("limit", "error"),
    [(resource.RLIMIT_FSIZE, "QueueMemoryError"), (resource.RLIMIT_NOFILE, "QueueDescriptorsError")],
    ids=["memory", "descriptors"],
)
def test_an_object_without_room_is_an_error(store: TCPStore, ranks: Ranks, limit: int, error: str) -> None:
    members = with_a_queue(store, ranks[:3])
    writer, *readers = members.ask(job.broadcast_beyond_a_limit, 20 << 20, limit)
    assert writer[0].startswith(error)
    for refused, _ in readers:
        assert refused.startswith("CollectiveMismatchError")
        assert "a message of 20971" in refused
    assert [found for _, found in (writer, *readers)] == ["no error: ['second']"] * 3


def test_readers_whom_nobody_can_tell_that_nothing_comes_are_released(store: TCPStore, ranks: Ranks) -> None:
    members = with_a_queue(store, ranks[:3], 256, 1)  # what is told does not fit into this ring either
    for refused, after in members.ask(job.broadcast_beyond_a_limit, 5000):
        assert refused.startswith("GroupCoordinatorError")
        assert after.startswith("GroupCoordinatorError")
        assert "timed out" not in refused + after


SHUT_DOWN = "the writer has shut the queue down"


@pytest.mark.parametrize("heard_in", ["broadcast_object", "all_reduce"])
def test_the_groups_end_releases_a_reader(store: TCPStore, ranks: Ranks, victim: Rank, heard_in: str) -> None:
    with_a_queue(store, [ranks[0], ranks[1], victim])
    victim.kill()
    ranks[0].ask(job.begin, 0, heard_in)
    assert ranks[0].ask(job.end, 0).startswith("GroupCoordinatorError")
    if heard_in == "broadcast_object":  # it was written before the writer knew
        ranks[1].ask(job.broadcast_object, 1)
    text = ranks[1].ask(job.broadcast_object, 1)
    assert text.startswith("GroupCoordinatorError")
    assert SHUT_DOWN in text


@pytest.mark.parametrize("how", ["destroys", "breaks off"])
def test_a_reader_that_has_left_is_an_error_for_the_others(store: TCPStore, ranks: Ranks, how: str) -> None:
    with_a_queue(store, ranks[:3])
    ranks[1].ask(job.give_up, 1, how)
    assert "ranks [1] do not read" in ranks[0].ask(job.broadcast_object, 0)
    assert "second" in ranks[2].ask(job.broadcast_object, 2)
    assert SHUT_DOWN in ranks[2].ask(job.broadcast_object, 2)


@pytest.mark.parametrize("fails", ["create_from_handle", "wait_until_ready"])
@pytest.mark.parametrize("local", [[1, 2], [1]], ids=["local", "remote"])
def test_a_queue_one_cannot_join_fails(store: TCPStore, ranks: Ranks, fails: str, local: list[int]) -> None:
    members = Ranks(ranks[:3])
    meet(store, members)
    for text in members.ask(job.make_a_queue_in_vain, local, fails):
        assert text.startswith(("CollectiveMismatchError", "GroupCoordinatorError")), text
        assert "timed out" not in text


def test_a_queue_that_was_made_for_other_ranks_is_refused_on_all(store: TCPStore, ranks: Ranks) -> None:
    members = Ranks(ranks[:3])
    meet(store, members)
    first, second, stranger = members.ask(job.read_another_writers_queue, [0, 1, 5])
    assert stranger.startswith("ValueError")
    for text in (first, second):
        assert text.startswith("CollectiveMismatchError")
        assert "rank 2 is no local reader" in text
    assert members.ask(job.use_a_queue) == [["first"]] * 3


def test_what_does_not_travel_through_a_queue_is_named_by_its_place(store: TCPStore, ranks: Ranks) -> None:
    members = with_a_queue(store, ranks[:3])
    writer, *readers = members.ask(job.broadcast_a_set)
    assert writer.startswith("PlainDataError: a is a set")
    assert all("broadcast_object: a is a set" in text for text in readers)
    assert "second" in members.ask(job.broadcast_object)[2]
