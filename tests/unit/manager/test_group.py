"""The replica group as one voice."""

from __future__ import annotations

from typing import Any

import pytest

from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from torchft_like.core.replica_group import (
    GroupJoin,
    GroupLostNotice,
    LossNotice,
    RankJoin,
    RankVerdict,
    ReleaseRanks,
    ReplicaGroup,
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


def test_the_group_says_how_the_process_group_of_each_rank_is_reached() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(1))
    (said,) = group.rank_joined(join(0, reconfigure_handle="h0"))
    assert isinstance(said, GroupJoin)
    assert said.reconfigure_handles == ("h0", "")


def test_a_quorum_may_stand_if_all_ranks_may() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_joined(join(0, may_stand=True))
    for may_stand in (False, True):
        (said,) = group.rank_joined(join(1, may_stand=may_stand))
        assert isinstance(said, GroupJoin)
        assert said.may_stand is may_stand


@pytest.mark.agreement
def test_votes_on_different_steps_commit_nothing() -> None:
    group = ReplicaGroup("a", 2)
    group.rank_voted(0, Verdict(4, True))
    effects = group.rank_voted(1, Verdict(5, True))
    assert [e.verdict.committed for e in effects if isinstance(e, RankVerdict)] == [False, False]


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
