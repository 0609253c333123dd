"""The replica group as one voice."""

from __future__ import annotations

from typing import Any

import pytest

from lighthouse.core.decisions import NO_STATE
from lighthouse.core.state_form import form_of_rows
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from torchft_like.core.assignment import NotAMemberError, QuorumResult, assign
from torchft_like.core.conversation import KEPT_MAX, UNCOUNTED_MAX, Conversation
from torchft_like.core.replica_group import (
    GroupAway,
    GroupHolds,
    GroupIdentity,
    GroupJoin,
    GroupLostNotice,
    HoldRanks,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    ReplicaGroup,
    StepLostNotice,
    SuspectNotice,
    Verdict,
)


def join(group_rank: int, **changes: Any) -> RankJoin:
    return RankJoin(
        group_rank, step=4, checkpoint_metadata=f"meta{group_rank}", commit_quorum_id=2, **changes
    )


def members(*replica_ids: str) -> list[pb.QuorumMember]:
    return [member(replica_id, 4, 2) for replica_id in replica_ids]


def test_the_round_of_the_last_quorum_is_remembered_also_where_its_id_is_kept() -> None:
    group = ReplicaGroup("a", 1)
    assert group.last_quorum_round == 0
    for round_number in (4, 5):
        group.rank_joined(join(0))
        group.quorum_formed(9, members("a"), round_number)
        assert (group.last_quorum_id, group.last_quorum_round) == (9, round_number)
    group.quorum_formed(9, members("a"), 6)  # nobody waited for this one: no rank has it
    assert group.last_quorum_round == 5


def test_others_that_wait_in_a_quorum_for_which_no_rank_waits_are_told_by_the_next_join() -> None:
    """A rank whose time was up asks again just as its first request is answered; both are answered. Its own
    quorum is over with the second answer: the lighthouse tells no more who is lost in it.
    """
    group = ReplicaGroup("a", 1)
    for late, broken in (((9, 1), 0), ((10, 2), 10), ((9, 2), 9)):  # the first is the answer again
        group.rank_joined(join(0))
        group.quorum_formed(9, members("a", "b"), 1)
        heard = group.quorum_formed(late[0], members("a", "b"), late[1])
        assert [(each.quorum_id, each.replica_id) for each in heard if isinstance(each, LossNotice)] == (
            [(9, "a")] if broken else []
        )
        (said,) = group.rank_joined(join(0))
        assert isinstance(said, GroupJoin)
        assert said.broken_quorum_id == broken


def test_an_answer_to_an_earlier_request_than_the_last_one_is_given_up() -> None:
    """A rank gave its request of the step before up, and asked for another step before the answer came."""
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    before = [member("a", 3, 2), member("b", 4, 2)]
    (said,) = group.quorum_formed(9, before, 1)
    assert isinstance(said, GroupJoin)
    assert (said.step, said.broken_quorum_id) == (4, 9)
    assert group.last_quorum_id == 0
    assert group.quorum_formed(10, members("a", "b"), 2)
    assert group.last_quorum_id == 10


def test_a_later_round_of_a_quorum_that_the_group_has_given_up_is_no_answer() -> None:
    """It answers a request that was made twice, before the lighthouse hears that the step was given up."""
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.quorum_formed(9, members("a", "b"), 1)
    (said,) = group.rank_joined(join(0, broken_quorum_id=9))
    assert group.quorum_formed(9, members("a", "b"), 2) == [said]
    assert [type(each) for each in group.quorum_formed(10, members("a", "b"), 3)] == [RankQuorum]


@pytest.mark.parametrize("commit_quorum_id", [0, NO_STATE], ids=["of torchft's", "not believed"])
def test_a_lighthouse_may_answer_without_the_quorum_of_the_commit(commit_quorum_id: int) -> None:
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.quorum_formed(9, [member("a", 4, commit_quorum_id), member("b", 4, 2)], 1)
    assert group.last_quorum_id == 9


def test_the_group_says_how_the_process_group_of_each_rank_is_reached() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(1))
    (said,) = group.rank_joined(join(0, reconfigure_handle="h0"))
    assert isinstance(said, GroupJoin)
    assert said.reconfigure_handles == ("h0", "")


def test_a_rank_that_asks_in_vain_hears_which_ranks_of_its_group_do_not() -> None:
    group = ReplicaGroup("a", 4)
    assert group.why_unasked(0) == ""  # it does not ask itself
    for rank in (0, 1):
        group.rank_registered(rank, bytes([rank]))
        group.rank_joined(join(rank))
    assert group.why_unasked(0).startswith(
        "ranks 2, 3 of this replica group did not come: start all 4 of its ranks"
    )
    group.rank_registered(3, b"3")
    assert group.why_unasked(0).startswith("rank 2 of this replica group did not come")
    group.rank_registered(2, b"2")
    assert group.why_unasked(0).startswith("ranks 2, 3 of this replica group did not ask for one")
    for rank in (2, 3):
        group.rank_joined(join(rank))
    assert group.why_unasked(0) == ""


def test_a_group_that_is_lost_before_all_have_come_says_who_was_awaited() -> None:
    """The rank that is gone waited for that one, and its own process does not know for whom."""
    group = ReplicaGroup("a", 3)
    for rank in (0, 1):
        group.rank_registered(rank, bytes([rank]))
    (notice,) = group.rank_lost(1, "the process has ended")
    assert isinstance(notice, GroupLostNotice)
    assert "is gone: the process has ended; rank 2 of this replica group did not come" in notice.reason


def test_of_a_group_that_was_in_a_quorum_nobody_is_said_not_to_have_come() -> None:
    """Ranks that call, as torchft's do, open no session."""
    group = ReplicaGroup("a", 2)
    for rank in (0, 1):
        group.rank_joined(join(rank))
    group.quorum_formed(9, members("a"), 1)
    group.rank_joined(join(0))
    assert group.why_unasked(0).startswith("rank 1 of this replica group did not ask for one")
    (notice,) = group.rank_lost(0, "the process has ended")
    assert isinstance(notice, GroupLostNotice)
    assert notice.reason.endswith("the process has ended")


@pytest.mark.parametrize("name", ["may_stand", "may_catch_up", "has_fetched", "takes_secret"])
def test_the_group_may_or_has_what_all_ranks_may_or_have(name: str) -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0, **{name: True}))
    for value in (False, True):
        (said,) = group.rank_joined(join(1, **{name: value}))
        assert getattr(said, name) is value


def test_the_group_says_which_of_its_ranks_has_failed_most_often_by_itself() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0, own_failure="no device", own_failures=1))
    said = [
        *group.rank_joined(join(1, own_failure="no memory", own_failures=2)),
        *ReplicaGroup("a", 1).rank_joined(join(0, own_failure="no device", own_failures=1)),
    ]
    assert [(each.own_failure, each.own_failures) for each in said if isinstance(each, GroupJoin)] == [
        ("rank 1: no memory", 2),
        ("no device", 1),
    ]


def test_the_group_says_what_its_state_is_like_once_all_ranks_have_looked() -> None:
    group, forms = ReplicaGroup("a", 2), [form_of_rows([("weight", size)]) for size in ("2", "3")]
    said = [group.rank_joined(join(rank, form=forms[rank])) for rank in (0, 1)]
    said += [group.rank_joined(join(rank)) for rank in (0, 1)]
    assert [[each.identity.forms for each in to if isinstance(each, GroupIdentity)] for to in said] == [
        [],
        [tuple(forms)],
        [],
        [],
    ]


@pytest.mark.progress
def test_a_rank_that_asked_again_before_it_heard_of_a_quorum_has_given_that_up() -> None:
    """Its time was up. The others of its group are in that quorum, where its peers wait for it."""
    group = ReplicaGroup("a", 2)
    for rank in (0, 1):
        group.rank_joined(join(rank, request=1))
    answers = group.quorum_formed(9, members("a"), 1)
    assert [e.result.request for e in answers if isinstance(e, RankQuorum)] == [1, 1]
    assert group.rank_joined(join(1, request=2)) == [StepLostNotice((0,), 9)]
    (said,) = group.rank_joined(join(0, request=2, answered=1))
    assert isinstance(said, GroupJoin)
    assert (said.broken_quorum_id, said.commit_failures) == (9, 1)
    group.quorum_formed(10, members("a"), 2)
    for rank in (0, 1):
        effects = group.rank_joined(join(rank, request=3, answered=2))
    assert [(e.broken_quorum_id, e.commit_failures) for e in effects if isinstance(e, GroupJoin)] == [(0, 0)]


@pytest.mark.progress
def test_a_no_for_want_of_other_replica_groups_releases_no_rank() -> None:
    """One that is released gives the quorum up, and with it the transfer of the state to a newcomer."""
    group = ReplicaGroup("a", 3)
    assert group.rank_voted(0, Verdict(4, False, went_well=True)) == []
    assert group.rank_voted(1, Verdict(4, False)) == [StepLostNotice((2,), group.last_quorum_id)]
    effects = group.rank_voted(2, Verdict(4, False, went_well=True))
    assert [e.verdict for e in effects if isinstance(e, RankVerdict)] == [Verdict(4, False)] * 3


@pytest.mark.agreement
def test_votes_on_different_steps_commit_nothing() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_voted(0, Verdict(4, True))
    effects = group.rank_voted(1, Verdict(5, True))
    assert [e.verdict.committed for e in effects if isinstance(e, RankVerdict)] == [False, False]


@pytest.mark.leave_together
def test_all_ranks_leave_where_one_that_was_asked_to_stop_has_waited_for_a_quorum_in_vain() -> None:
    group, stops = ReplicaGroup("a", 4), Verdict(4, False, stop=True)
    for rank in (0, 1):
        group.rank_joined(join(rank))
    assert group.rank_voted(2, Verdict(4, True)) == [RankVerdict(2, Verdict(4, False))]
    leaving = group.rank_voted(1, Verdict(4, False, stop=True))
    # Ranks 2 and 3, which have yet to begin the step, too: the one that was asked may be gone by then.
    assert leaving == [GroupAway(is_back=False), *[RankVerdict(rank, stops) for rank in range(4)]]
    assert group.rank_voted(0, Verdict(4, False)) == [RankVerdict(0, stops)]
    for rank in (2, 3):
        assert group.rank_joined(join(rank)) == [RankVerdict(rank, stops)]


@pytest.mark.leave_together
def test_a_rank_that_holds_leaves_with_the_one_that_was_asked_to_stop() -> None:
    group, stops = ReplicaGroup("a", 2), Verdict(4, False, stop=True)
    for rank in (0, 1):
        group.rank_joined(join(rank))
    group.quorum_formed(9, members("a"), 1, stands=True)
    group.hold(9, 1)
    for rank in (0, 1):
        group.rank_holds(rank, 9, 4)
    group.rank_joined(join(1))  # it holds no more, and asks in vain
    leaving = group.rank_voted(1, Verdict(4, False, stop=True))
    assert [e for e in leaving if isinstance(e, RankVerdict)] == [
        RankVerdict(0, stops),
        RankVerdict(1, stops),
    ]


@pytest.mark.leave_together
def test_a_rank_that_is_late_to_the_step_before_which_it_holds_hears_that_all_leave() -> None:
    group, stops = standing(3, waits_for_lighthouse=True), Verdict(4, False, stop=True)
    group.lighthouse_disconnected()
    for rank in (0, 1):
        group.rank_holds(rank, 9, 4)
    group.rank_joined(join(1))  # it has held in vain
    assert group.rank_voted(1, stops)[-3:] == [RankVerdict(rank, stops) for rank in range(3)]
    for rank in (0, 2):
        assert group.rank_joined(join(rank)) == [RankVerdict(rank, stops)]


@pytest.mark.leave_together
def test_a_rank_that_is_asked_to_stop_has_not_held_in_vain_as_long_as_it_votes_on_an_earlier_step() -> None:
    group = standing(2, waits_for_lighthouse=True)
    group.lighthouse_disconnected()
    for rank in (0, 1):
        group.rank_holds(rank, 9, 5)  # its votes on step 4 come later
    stops = Verdict(4, True, stop=True)
    assert group.rank_voted(1, stops) == []
    assert group.rank_voted(0, Verdict(4, True)) == [RankVerdict(0, stops), RankVerdict(1, stops)]


@pytest.mark.progress
def test_a_rank_that_holds_goes_on_to_the_step_that_another_one_has_begun_where_there_is_no_lighthouse() -> (
    None
):
    """The other one waits for its vote."""
    group = standing(2, waits_for_lighthouse=True)
    assert group.lighthouse_disconnected() == [HoldRanks((0, 1), 9)]
    assert group.rank_holds(0, 9, 4) == []
    assert group.rank_holds(1, 9, 5) == [ReleaseRanks((0, 1), 9, 5)]
    alike = standing(2, waits_for_lighthouse=True)
    alike.lighthouse_disconnected()
    alike.rank_holds(0, 9, 4)
    assert alike.rank_holds(1, 9, 4) == [GroupHolds(9, 1, 4)], "they wait for a lighthouse"
    there = standing(2, waits_for_lighthouse=True)
    there.hold(9, 1)
    there.rank_holds(0, 9, 4)
    assert there.rank_holds(1, 9, 5) == [GroupHolds(9, 1, 5)]
    assert there.lighthouse_disconnected() == [ReleaseRanks((0, 1), 9, 5)]


def standing(world_size: int, *, waits_for_lighthouse: bool) -> ReplicaGroup:
    """Return a group in quorum 9, which stands."""
    group = ReplicaGroup("a", world_size, waits_for_lighthouse)
    for rank in range(world_size):
        group.rank_joined(join(rank))
    group.quorum_formed(9, members("a", "b"), 1, True)
    assert group.last_quorum_stands
    return group


def test_a_group_that_leaves_without_a_quorum_takes_none_that_comes_late() -> None:
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.rank_voted(0, Verdict(4, False, stop=True))
    assert group.quorum_formed(9, members("a", "b"), 1) == []
    assert group.last_quorum_id == 0


@pytest.mark.no_zombie
def test_a_vote_given_before_a_quorum_does_not_count_in_it() -> None:
    group = ReplicaGroup("a", 2)
    for rank in (0, 1):
        group.rank_joined(join(rank))
    for rank in (0, 1):
        group.rank_withdrew(rank)  # the group's join stays open
    group.rank_voted(0, Verdict(4, True))
    group.quorum_formed(7, members("a"), 1)
    assert group.rank_voted(1, Verdict(4, True)) == []


@pytest.mark.one_quorum_per_step
@pytest.mark.parametrize("why", ["silent", "asked"])
def test_a_group_that_has_said_that_it_commits_nothing_more_in_a_quorum_does_not(why: str) -> None:
    group = standing(2, waits_for_lighthouse=True)
    if why == "silent":
        assert [effect.must_fail for effect in group.lease_ended() if isinstance(effect, LossNotice)] == [
            True
        ]
    else:
        assert GroupHolds(9, 1, 0, gives_up=True) in group.member_lost(9, "a", "", must_answer=True)
    effects = [*group.rank_voted(0, Verdict(4, True)), *group.rank_voted(1, Verdict(4, True))]
    assert effects == [RankVerdict(rank, Verdict(4, False)) for rank in (0, 1)]


def test_a_group_that_hears_of_its_own_loss_was_away_and_is_alive() -> None:
    group = ReplicaGroup("a", 1, last_quorum_id=3, last_quorum_replica_ids=("a", "b"))
    assert group.member_lost(3, "a", "it was away") == [LossNotice(3, "a", "it was away", is_alive=True)]
    assert group.member_lost(3, "b", "its connection ended") == [LossNotice(3, "b", "its connection ended")]


def test_ranks_of_different_steps_of_which_nobody_has_the_state_are_told_to_begin_from_one() -> None:
    group = ReplicaGroup("a", 2)
    for rank, step in enumerate((4, 3)):
        said = group.rank_joined(RankJoin(rank, step, "", commit_quorum_id=2, may_catch_up=True))
    (asks,) = (each for each in said if isinstance(each, GroupJoin))
    assert (asks.step, asks.commit_quorum_id, asks.may_catch_up) == (0, -1, False)
    (lost,) = group.quorum_formed(7, [member("a", 0, -1)], 1)
    assert isinstance(lost, GroupLostNotice)
    assert "let all of them take one of the same committed step" in lost.reason


@pytest.mark.heal_is_clean
def test_a_group_of_which_each_rank_has_a_part_of_a_peers_state_has_none() -> None:
    (said,) = ReplicaGroup("a", 1).rank_joined(RankJoin(0, 4, "", commit_quorum_id=NO_STATE))
    assert isinstance(said, GroupJoin)
    assert (said.step, said.commit_quorum_id) == (0, NO_STATE), "behind one that is yet to begin"


class TestSuspicion:
    """A rank is silent: the others go on without its group, which goes on when it answers."""

    @staticmethod
    def group_in_a_quorum() -> ReplicaGroup:
        group = ReplicaGroup("a", 2)
        for rank in (0, 1):
            group.rank_joined(RankJoin(rank, 3, "", commit_quorum_id=2))
        group.quorum_formed(7, [member("a", 3, 2), member("b", 3, 2)], 1, stands=True)
        return group

    def test_a_suspect_that_is_dead_ends_its_group_and_cannot_come_back(self) -> None:
        group = self.group_in_a_quorum()
        assert group.rank_registered(1, b"one")
        group.rank_suspected(1, "silent")
        assert [type(effect) for effect in group.rank_lost(1, "dead")] == [GroupLostNotice]
        assert group.rank_suspected(0, "silent") == group.rank_resumed(1) == []
        assert not group.rank_registered(1, b"one")

    def test_nothing_is_committed_while_a_rank_is_suspected(self) -> None:
        group = self.group_in_a_quorum()
        group.rank_suspected(1, "silent")
        assert group.rank_voted(0, Verdict(3, True)) == [RankVerdict(0, Verdict(3, False))]

    def test_a_suspect_that_answers_brings_no_group_back_that_leaves(self) -> None:
        group = self.group_in_a_quorum()
        group.rank_suspected(1, "silent")
        group.rank_joined(join(0))
        group.rank_voted(0, Verdict(4, False, stop=True))
        assert group.rank_resumed(1) == [SuspectNotice(1, "")]

    def test_the_lighthouse_is_not_asked_when_ranks_that_wait_for_a_suspect_may_go_on(self) -> None:
        group = self.group_in_a_quorum()
        group.rank_suspected(1, "silent")
        assert group.lighthouse_disconnected() == []
        assert group.rank_holds(0, 7, 4) == []
        assert group.lighthouse_connected() == []
        assert group.rank_holds(1, 7, 3) == [ReleaseRanks((0, 1), 7, 4)]


# What a quorum means for each rank.


def result_of(
    members: list[pb.QuorumMember], replica_id: str, group_rank: int = 0, init_sync: bool = True
) -> QuorumResult:
    return assign(7, members, replica_id, group_rank, init_sync)


def test_who_is_up_to_date_helps_the_source_of_who_heals() -> None:
    members = [member("a", 4, 3), *(member(name, 5, 3) for name in "bcdefg"), member("h", 4, 3)]
    results = {name: result_of(members, name, rank) for rank, name in enumerate("abcdefgh")}
    assert results["a"].source_ranks == (1, 2, 3, 4)
    assert results["a"].source_addresses == tuple(f"http://{name}:1" for name in "bcde")
    assert results["h"].source_ranks == (2, 3, 4, 5)
    helped = {name: result.helped_ranks for name, result in results.items() if result.helped_ranks}
    assert helped == {"c": (0,), "d": (0, 7), "e": (0, 7), "f": (7,)}
    assert [name for name, result in results.items() if result.recover_dst_replica_ranks] == [*"bc"]


def test_nobody_helps_the_source_of_who_heals_beside_the_steps() -> None:
    members = [member(name, 5, 3) for name in "bcd"]
    members += [member("a", 4, 3, may_catch_up=True), member("e", 4, 3)]
    results = {name: result_of(members, name) for name in "abcde"}
    assert (results["a"].source_ranks, results["a"].begins_to_catch_up) == ((1,), True)
    assert results["e"].source_ranks == (2, 3, 1)
    assert [name for name, result in results.items() if result.helped_ranks] == [*"bd"]


@pytest.mark.parametrize(("step", "expected"), [(5, [0, 1, 0]), (0, [0, 1, 2])])
def test_after_a_step_not_committed_the_source_is_another_one(step: int, expected: list[int]) -> None:
    """The last one may have refused."""
    for failures, source in enumerate(expected):
        members = [member("a", step, 0), member("b", step, 0), member("c", 0, 0, commit_failures=failures)]
        results = {name: result_of(members, name) for name in "abc"}
        healing = [r for r in results.values() if r.heal]
        assert {r.recover_src_replica_rank for r in healing} == {source}
        assert len(healing) == (1 if step else 2)


def test_a_rank_gets_the_handles_of_its_own_rank_in_each_group() -> None:
    handles = {"b": ("b0", "b1"), "c": (), "a": ("a0",)}
    members = [member(i, 5, 3, reconfigure_handles=given) for i, given in handles.items()]
    for group_rank, expected in enumerate([("a0", "b0", ""), ("", "b1", ""), ()]):
        assert {result_of(members, i, group_rank).reconfigure_handles for i in handles} == {expected}


def test_a_replica_outside_of_the_quorum_is_an_error_that_names_it() -> None:
    with pytest.raises(NotAMemberError, match="replica z is not in quorum 7: a"):
        result_of([member("a", 0, 0)], "z")


# What is said arrives once and in its order, over any number of connections that break.


def test_a_side_that_only_hears_owes_the_count_now_and_then() -> None:
    side = Conversation[int]()
    for _ in range(UNCOUNTED_MAX):
        assert not side.owes_count
        side.hear()
    assert side.owes_count
    assert side.tell_count() == UNCOUNTED_MAX
    assert not side.owes_count


def test_a_conversation_in_which_nothing_arrives_is_over_and_keeps_no_more() -> None:
    side = Conversation[int]()
    assert all(side.say(number) for number in range(KEPT_MAX))
    assert not side.say(KEPT_MAX)
    assert side.is_over
    assert len(side.to_repeat) == KEPT_MAX
    assert not side.arrived(1)  # nothing makes up for what was not kept


def test_a_count_of_messages_that_were_never_said_is_refused() -> None:
    side = Conversation[int]()
    side.say(1)
    assert not side.arrived(2)
    assert side.arrived(1)
    assert side.arrived(0)  # an older count says nothing
    assert side.to_repeat == ()
