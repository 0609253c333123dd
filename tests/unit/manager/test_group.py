"""The replica group as one voice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lighthouse.core.decisions import NO_STATE
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from torchft_like.core.replica_group import (
    Effect,
    GroupAway,
    GroupJoin,
    GroupLeftNotice,
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


def kinds(effects: Sequence[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_the_group_joins_when_its_last_rank_does() -> None:
    group = ReplicaGroup("a", 2)
    assert group.rank_joined(join(1, commit_failures=1)) == []
    assert group.rank_joined(join(0, shrink_only=True)) == [
        GroupJoin(step=4, shrink_only=True, commit_failures=1, commit_quorum_id=2)
    ]


def test_the_group_says_how_the_process_group_of_each_rank_is_reached() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(1))
    assert group.rank_joined(join(0, reconfigure_handle="h0")) == [
        GroupJoin(4, False, 0, commit_quorum_id=2, reconfigure_handles=("h0", ""))
    ]


def test_a_quorum_answers_every_rank_once() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0))
    group.rank_joined(join(1))
    effects = group.quorum_formed(9, members("b", "a"), 1)
    assert [e.group_rank for e in effects if isinstance(e, RankQuorum)] == [0, 1]
    assert group.quorum_formed(9, members("b", "a"), 1) == []
    assert (group.last_quorum_id, group.last_quorum_replica_ids) == (9, ("a", "b"))


def test_the_round_of_the_last_quorum_is_remembered_also_where_its_id_is_kept() -> None:
    group = ReplicaGroup("a", 1)
    assert group.last_quorum_round == 0
    for round_number in (4, 5):
        group.rank_joined(join(0))
        group.quorum_formed(9, members("a"), round_number)
        assert (group.last_quorum_id, group.last_quorum_round) == (9, round_number)
    group.quorum_formed(9, members("a"), 6)  # nobody waited for this one: no rank has it
    assert group.last_quorum_round == 5


def test_a_quorum_without_this_group_leaves_the_join_open() -> None:
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    assert group.quorum_formed(9, members("b"), 1) == []
    assert kinds(group.quorum_formed(10, members("a", "b"), 1)) == [RankQuorum]


@pytest.mark.agreement
@pytest.mark.progress
def test_the_first_no_releases_those_who_have_not_voted() -> None:
    group = ReplicaGroup("a", 4, last_quorum_id=9)
    assert group.rank_voted(2, Verdict(4, True)) == []
    assert group.rank_voted(1, Verdict(4, False)) == [StepLostNotice((0, 3), 9)]
    assert group.rank_voted(0, Verdict(4, False)) == [], "they know"
    assert kinds(group.rank_voted(3, Verdict(4, True))) == [RankVerdict] * 4


@pytest.mark.progress
def test_ranks_at_other_steps_are_released_too() -> None:
    """One rank has healed, the other could not."""
    group = ReplicaGroup("a", 2)
    for rank, step in enumerate((1, 0)):
        group.rank_joined(join(rank)._replace(step=step))
    group.quorum_formed(10, [member("a", 4, 2), member("b", 9, 2)], 1)
    assert group.rank_voted(1, Verdict(0, False)) == [StepLostNotice((0,), 10)]


@pytest.mark.progress
def test_ranks_that_ask_after_a_death_between_two_steps_lose_none() -> None:
    group = ReplicaGroup("a", 2)
    for rank in range(2):
        group.rank_joined(join(rank))
    group.quorum_formed(9, members("a", "b"), 1, stands=True)
    group.member_lost(9, "b", "gone")
    asks = {"commit_failures": 1, "broken_quorum_id": 9}
    assert group.rank_joined(join(0, **asks)) == []


@pytest.mark.agreement
def test_votes_on_different_steps_commit_nothing() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_voted(0, Verdict(4, True))
    effects = group.rank_voted(1, Verdict(5, True))
    assert [e.verdict.committed for e in effects if isinstance(e, RankVerdict)] == [False, False]


@pytest.mark.no_zombie
def test_votes_of_an_attempt_that_was_given_up_do_not_count_for_the_next() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_voted(0, Verdict(4, True))
    group.rank_joined(join(0))
    group.rank_joined(join(1))
    group.quorum_formed(9, members("a"), 1)
    assert group.rank_voted(1, Verdict(4, True)) == []


@pytest.mark.no_zombie
def test_only_losses_in_the_current_quorum_are_passed_on() -> None:
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.quorum_formed(9, members("a", "b"), 1)
    assert group.member_lost(8, "b", "old") == []
    assert group.member_lost(9, "b", "gone") == [LossNotice(9, "b", "gone")]


def test_a_lost_rank_is_the_end_of_the_group() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0))
    [notice] = group.rank_lost(1, "its session ended")
    assert isinstance(notice, GroupLostNotice)
    assert "rank 1 of replica group a" in notice.reason
    assert group.rank_lost(0, "too") == []
    assert group.rank_joined(join(0)) == [GroupLeftNotice((0,), notice.reason)]
    assert group.rank_voted(0, Verdict(4, True)) == [GroupLeftNotice((0,), notice.reason)]
    assert group.lighthouse_connected() == []


def test_when_a_rank_leaves_one_that_has_begun_another_step_is_told() -> None:
    group = ReplicaGroup("a", 3)
    group.rank_joined(join(2))
    [notice] = group.rank_left(1, "shutdown")
    assert isinstance(notice, GroupLeftNotice)
    assert notice.group_ranks == (2,)
    assert "rank 1 of replica group a has left: shutdown" in notice.reason
    assert group.rank_left(0, "shutdown") == []
    assert group.rank_joined(join(0)) == [GroupLeftNotice((0,), notice.reason)]


def test_checkpoint_metadata_is_each_ranks_own() -> None:
    group = ReplicaGroup("a", 2)
    assert group.checkpoint_metadata(1) is None
    group.rank_joined(join(1))
    assert group.checkpoint_metadata(1) == "meta1"


@pytest.mark.heal_is_clean
def test_a_group_with_a_part_of_a_peers_state_is_behind_one_that_has_yet_to_begin() -> None:
    group = ReplicaGroup("a", 1)
    [asked] = group.rank_joined(RankJoin(0, step=0, checkpoint_metadata="", commit_quorum_id=NO_STATE))
    assert isinstance(asked, GroupJoin)
    members = [member("a", 0, asked.commit_quorum_id), member("b", 0, 0)]
    [answer] = group.quorum_formed(9, members, 1)
    assert isinstance(answer, RankQuorum)
    assert answer.result.heal
    group.rank_joined(RankJoin(0, step=0, checkpoint_metadata="", commit_quorum_id=NO_STATE))
    assert kinds(group.quorum_formed(10, members[:1], 2)) == [GroupLostNotice]


def test_a_group_tells_of_the_quorum_that_broke_for_one_of_its_ranks() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0))
    [asked] = group.rank_joined(join(1, broken_quorum_id=8, commit_failures=1))
    assert isinstance(asked, GroupJoin)
    assert asked.broken_quorum_id == 8


def test_a_group_that_hears_of_its_own_loss_was_away_and_is_alive() -> None:
    group = ReplicaGroup("a", 1, last_quorum_id=3, last_quorum_replica_ids=("a", "b"))
    assert group.member_lost(3, "a", "it was away") == [LossNotice(3, "a", "it was away", is_alive=True)]
    assert group.member_lost(3, "b", "its connection ended") == [LossNotice(3, "b", "its connection ended")]


class TestSuspicion:
    """A rank is silent: the others go on without its group, which goes on when it answers."""

    @staticmethod
    def group_in_a_quorum() -> ReplicaGroup:
        group = ReplicaGroup("a", 2)
        for rank in (0, 1):
            group.rank_joined(RankJoin(rank, 3, ""))
        group.quorum_formed(7, [member("a", 3, 2), member("b", 3, 2)], 1, stands=True)
        return group

    def test_votes_are_refused_and_the_group_goes_away_until_the_rank_answers(self) -> None:
        group = self.group_in_a_quorum()
        assert not any(isinstance(e, RankVerdict) for e in group.rank_voted(1, Verdict(3, True)))
        away, notice, refused, hold = group.rank_suspected(1, "its session ended")
        assert away == GroupAway(is_back=False)
        assert isinstance(notice, SuspectNotice)
        assert refused == RankVerdict(1, Verdict(3, False))
        assert hold == HoldRanks((0, 1), 7)
        assert group.rank_voted(0, Verdict(3, True)) == [RankVerdict(0, Verdict(3, False))]
        assert group.rank_resumed(1) == [SuspectNotice(1, ""), GroupAway(is_back=True)]
        assert group.lost_reason is None

    def test_a_group_is_back_when_its_last_suspect_answers(self) -> None:
        group = ReplicaGroup("a", 3)
        assert GroupAway(is_back=False) in group.rank_suspected(1, "silent")
        assert GroupAway(is_back=False) not in group.rank_suspected(2, "silent")
        assert GroupAway(is_back=True) not in group.rank_resumed(1)
        assert GroupAway(is_back=True) in group.rank_resumed(2)
        assert group.rank_resumed(2) == []  # it was not suspected

    def test_a_suspect_that_is_dead_ends_its_group_and_cannot_come_back(self) -> None:
        group = self.group_in_a_quorum()
        assert group.rank_registered(1, b"one")
        group.rank_suspected(1, "silent")
        assert [type(effect) for effect in group.rank_lost(1, "dead")] == [GroupLostNotice]
        assert group.rank_suspected(0, "silent") == group.rank_resumed(1) == []
        assert not group.rank_registered(1, b"one")

    def test_the_lighthouse_is_not_asked_when_ranks_that_wait_for_a_suspect_may_go_on(self) -> None:
        group = self.group_in_a_quorum()
        group.rank_suspected(1, "silent")
        assert group.lighthouse_disconnected() == []
        assert group.rank_holds(0, 7, 4) == []
        assert group.lighthouse_connected() == []
        assert group.rank_holds(1, 7, 3) == [ReleaseRanks((0, 1), 7, 4)]
