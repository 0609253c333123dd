"""A quorum that stands, on the trainers' side: the step protocol of a rank, and the ranks of a group."""

from __future__ import annotations

from typing import Any

from tests.unit.manager.test_group import join, members
from tests.unit.manager.test_step import protocol, quorum
from torchft_like.core.replica_group import (
    GroupHolds,
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
    p.is_bound = True
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
        p.is_bound = True
        assert p.failure is ERROR
        assert not p.vote()

    def test_what_ended_the_quorum_before_it_was_entered_fails_no_attempt_in_the_next(self) -> None:
        p = going_on(standing())
        p.hold(1)
        p.fail(1, ERROR)
        p.released(1, 1)
        assert p.ask_instead()
        p.agreed(quorum(2), allow_heal=True)
        assert p.failure is None

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


def formed(size: int, *, waits_for_lighthouse: bool = False) -> ReplicaGroup:
    """A group of so many ranks in quorum 9, which stands."""
    group = ReplicaGroup("a", size, waits_for_lighthouse)
    for rank in range(size):
        group.rank_joined(join(rank, may_stand=True))
    effects = group.quorum_formed(9, members("a", "b"), 1, stands=True)
    assert all(isinstance(effect, RankQuorum) and effect.result.stands for effect in effects)
    return group


class TestGroup:
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
