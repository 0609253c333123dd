"""A quorum that stands, on the trainers' side: the step protocol of a rank, and the ranks of a group."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

from tests.unit.manager.test_group import join, members
from tests.unit.manager.test_step import protocol, quorum
from torchft_like.core.replica_group import (
    GroupHolds,
    GroupJoin,
    GroupLeftNotice,
    HoldRanks,
    LossNotice,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    ReplicaGroup,
    Verdict,
)
from torchft_like.core.step import StepProtocol

ERROR = ValueError("the script says so")


def standing(**rules: Any) -> StepProtocol:
    """A rank at the end of its first step in quorum 1, which stands."""
    p = protocol(**rules)
    p.begin()
    p.agreed(quorum(stands=True), allow_heal=True)
    p.configured(1)
    p.bind()
    p.decide(committed=True)
    return p


def going_on(p: StepProtocol) -> StepProtocol:
    """The same rank in an attempt for which it has not asked, and which it has not entered."""
    assert p.goes_on
    p.begin()
    p.stand()
    return p


class TestRank:
    def test_it_never_may_with_a_synchronous_quorum(self) -> None:
        assert not standing(use_async_quorum=False).begin().may_stand

    def test_an_error_is_not_forgotten_when_the_attempt_asks(self) -> None:
        p = going_on(standing())
        p.fail_current(ERROR)
        p.hold(1)
        p.released(1, 1)
        assert p.ask_instead()
        p.agreed(quorum(2), allow_heal=True)
        p.bind()
        assert p.failure is ERROR
        assert not p.vote()

    def test_an_error_that_came_before_the_attempt_is_none_of_it_and_what_it_broke_stays_broken(self) -> None:
        p = standing()
        p.fail(1, ERROR)
        going_on(p)
        assert not p.can_communicate
        assert not p.vote()
        assert p.ask_instead()
        p.agreed(quorum(2), allow_heal=True)
        p.bind()
        assert p.vote()

    def test_what_is_lost_need_not_be_asked_for(self) -> None:
        p = going_on(standing())
        p.enter()
        p.group_broke(1)
        assert not p.needs_asking
        assert not p.vote()

    def test_a_step_that_was_given_up_before_it_was_entered_breaks_nothing(self) -> None:
        p = going_on(standing())
        assert p.begin().broken_quorum_id == 0
        p = going_on(standing())
        p.enter()
        assert p.begin().broken_quorum_id == 1

    def test_other_quorums_do_not_concern_it(self) -> None:
        p = going_on(standing())
        p.hold(7)
        assert p.released(7, 0)
        assert p.enter()


def formed(size: int, *, waits_for_lighthouse: bool = False) -> ReplicaGroup:
    """A group of so many ranks in quorum 9, which stands."""
    group = ReplicaGroup("a", size, waits_for_lighthouse)
    for rank in range(size):
        group.rank_joined(join(rank, may_stand=True))
    effects = group.quorum_formed(9, members("a", "b"), 1, stands=True)
    assert all(isinstance(effect, RankQuorum) and effect.result.stands for effect in effects)
    return group


class TestGroup:
    def test_it_may_stand_if_all_ranks_may(self) -> None:
        group = ReplicaGroup("a", 2)
        group.rank_joined(join(0, may_stand=True))
        assert group.rank_joined(join(1)) == [GroupJoin(4, False, 0, 2)]
        assert group.rank_joined(join(1, may_stand=True)) == [GroupJoin(4, False, 0, 2, may_stand=True)]

    def test_requests_of_other_quorums_and_rounds_are_old(self) -> None:
        group = formed(1)
        assert group.hold(8, 1) == group.hold(9, 2) == group.released(9, 2, 5) == []

    def test_its_join_is_an_answer(self) -> None:
        group = formed(1)
        assert group.rank_joined(join(0)) == [GroupJoin(4, False, 0, 2)]
        assert group.hold(9, 1) == []

    def test_a_rank_that_asks_for_a_step_which_another_has_begun_breaks_the_quorum(self) -> None:
        group = formed(3)
        group.rank_joined(join(1))
        group.rank_holds(2, 9, 4)
        notice, released = group.rank_holds(0, 9, 5)
        assert isinstance(notice, LossNotice)
        assert notice.is_alive
        assert released == ReleaseRanks((0, 2), 9, None), (
            "a rank that holds before step 4 would hold for ever"
        )
        assert group.rank_voted(0, Verdict(4, committed=True)) == [
            RankVerdict(0, Verdict(4, committed=False))
        ]

    def test_who_was_told_a_step_holds_for_a_lighthouse_that_does_not_know_it(self) -> None:
        group = formed(1)
        group.hold(9, 1)
        group.rank_holds(0, 9, 5)
        group.released(9, 1, 6)
        assert group.lighthouse_disconnected() == group.lighthouse_connected() == []
        assert group.hold(9, 1) == [HoldRanks((0,), 9)]
        assert group.rank_holds(0, 9, 5) == [GroupHolds(9, 1, 5)]
        assert group.released(9, 1, 6) == [ReleaseRanks((0,), 9, 6)]

    def test_a_rank_that_leaves_after_a_loss_ends_those_that_hold(self) -> None:
        group = formed(3)
        group.member_lost(9, "b", "gone")
        group.rank_holds(0, 9, 5)
        assert group.rank_left(1, "done") == [GroupLeftNotice((0, 2), ANY)], (
            "nobody will tell them the step at which they ask"
        )

    def test_a_rank_that_asks_with_a_state_of_a_later_step_breaks_the_quorum(self) -> None:
        group = formed(2)
        group.rank_joined(join(1)._replace(step=30))
        notice, released = group.rank_holds(0, 9, 4)
        assert isinstance(notice, LossNotice)
        assert released == ReleaseRanks((0,), 9, None), (
            "step 30 never comes: rank 1 takes no part in the steps before"
        )
        (asked,) = group.rank_joined(join(0, may_stand=True))
        assert isinstance(asked, GroupJoin)
        assert not asked.may_stand

    def test_an_answer_to_an_earlier_request_to_hold_does_not_count(self) -> None:
        group = formed(2)
        group.hold(9, 1)
        group.rank_holds(0, 9, 4)
        assert group.lighthouse_disconnected() == [ReleaseRanks((0, 1), 9, None)]
        group.hold(9, 1)
        assert group.rank_holds(0, 9, 4) == []
        assert group.rank_holds(1, 9, 4) == []  # of the first request; then it went on
        assert group.rank_holds(1, 9, 5) == [GroupHolds(9, 1, 5)]

    def test_a_step_that_waits_for_too_long_is_given_up(self) -> None:
        group = formed(1)
        (notice,) = group.step_overdue(9, 60.0)
        assert isinstance(notice, LossNotice)
        assert notice.is_alive
        assert group.step_overdue(8, 60.0) == []
