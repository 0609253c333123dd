"""The search for links that do not work: whom to probe, how long the join waits, what is reported."""

from __future__ import annotations

import pytest

from lighthouse.admission import TEXT_MAX, about_links
from lighthouse.links import REPORTED_MAX
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.test_group import join, members
from torchft_like.manager.group import (
    BrokenLinks,
    Effect,
    GroupJoin,
    LeftOutNotice,
    LossNotice,
    ReplicaGroup,
)
from torchft_like.manager.peer_links import Probe

ADDRESS = "http://h:1"
BOTH = Probe((("b", ADDRESS), ("c", ADDRESS)))
AGAIN = Probe((("b", ADDRESS),), is_repeated=True)


def in_quorum(*others: str) -> ReplicaGroup:
    """A group that has been answered with a quorum."""
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.quorum_formed(7, members("a", *(others or ("b", "c"))), 1)
    return group


def of_kind(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def after_a_failure(*others: str) -> ReplicaGroup:
    group = in_quorum(*others)
    group.rank_joined(join(0, commit_failures=1))
    return group


def test_a_join_after_a_good_step_is_said_at_once() -> None:
    assert [type(effect) for effect in in_quorum().rank_joined(join(0))] == [GroupJoin]


def test_a_join_after_a_failed_step_waits_until_the_others_were_probed() -> None:
    group = in_quorum()
    assert group.rank_joined(join(0, commit_failures=1)) == [BOTH]
    assert group.lighthouse_connected() == []
    assert [type(effect) for effect in group.probed(BOTH, ())] == [GroupJoin]


def test_who_gives_no_answer_is_reported_before_the_join_and_probed_again() -> None:
    effects = after_a_failure().probed(BOTH, {"b"})
    assert effects[:2] == [BrokenLinks(("b",)), AGAIN]
    assert [type(effect) for effect in effects[2:]] == [GroupJoin]


def test_a_death_explains_a_failed_step() -> None:
    group = in_quorum()
    group.member_lost(7, "c", "gone")
    assert [type(effect) for effect in group.rank_joined(join(0, commit_failures=1))] == [GroupJoin]


def test_a_member_that_gave_the_quorum_up_explains_nothing() -> None:
    group = in_quorum()
    group.member_lost(7, "c", "broke", is_alive=True)
    assert group.rank_joined(join(0, commit_failures=1)) == [BOTH]


def test_the_join_does_not_wait_for_a_member_that_is_lost_meanwhile() -> None:
    group = after_a_failure("b")
    effects = group.member_lost(7, "b", "gone")
    assert [type(effect) for effect in effects] == [LossNotice, GroupJoin]
    assert group.probed(Probe((("b", ADDRESS),)), {"b"}) == []


def test_the_link_to_a_member_that_is_lost_is_probed_on() -> None:
    group = after_a_failure()
    group.probed(BOTH, {"b"})
    assert [type(effect) for effect in group.member_lost(7, "b", "its session broke")] == [LossNotice]
    assert group.probed(AGAIN, {"b"}) == [AGAIN]


def test_who_answers_again_is_reported_no_more_and_probed_no_more() -> None:
    group = after_a_failure()
    group.probed(BOTH, {"b"})
    assert group.probed(AGAIN, {"b"}) == [AGAIN]
    assert group.probed(AGAIN, ()) == [BrokenLinks(())]


def test_a_report_is_repeated_after_a_reconnect_before_the_join() -> None:
    group = after_a_failure()
    group.probed(BOTH, {"b"})
    assert [type(effect) for effect in group.lighthouse_connected()] == [BrokenLinks, GroupJoin]


def test_who_is_known_to_be_unreachable_holds_up_no_join() -> None:
    group = after_a_failure("b")
    group.probed(Probe((("b", ADDRESS),)), {"b"})
    group.quorum_formed(8, members("a", "b"), 2)
    assert [type(effect) for effect in group.rank_joined(join(0, commit_failures=2))] == [GroupJoin]


def test_at_most_one_probe_is_repeated_at_a_time() -> None:
    group = after_a_failure()
    group.probed(BOTH, {"b"})
    group.quorum_formed(8, members("a", "c", "d"), 2)
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    effects = group.probed(probe, {"d"})
    assert of_kind(effects, Probe) == []
    [again] = of_kind(group.probed(AGAIN, {"b"}), Probe)
    assert again == Probe((("b", ADDRESS), ("d", ADDRESS)), is_repeated=True)


def test_reports_are_bounded() -> None:
    names = [f"{n:03}" for n in range(2 * REPORTED_MAX)]
    group = in_quorum(*names)
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    [report] = of_kind(group.probed(probe, names), BrokenLinks)
    assert report == BrokenLinks(tuple(names[-REPORTED_MAX:]))


@pytest.mark.parametrize("length", [300, TEXT_MAX])
def test_the_lighthouse_takes_every_report(length: int) -> None:
    names = [f"{n:03}".ljust(length, "x") for n in range(REPORTED_MAX - 4)]
    group = in_quorum(*names)
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    [report] = of_kind(group.probed(probe, names), BrokenLinks)
    assert isinstance(report, BrokenLinks)
    assert report.unreachable == tuple(names[-len(report.unreachable) :])
    assert about_links(pb.BrokenLinks(unreachable_replica_ids=report.unreachable)) is None
    more = pb.BrokenLinks(unreachable_replica_ids=names[-len(report.unreachable) - 1 :])
    assert about_links(more) is not None, "no more is kept back than has to be"


def test_being_left_out_is_told_while_the_join_is_open() -> None:
    group = after_a_failure()
    assert group.left_out(8, ["b"]) == [LeftOutNotice(8, "a", ("b",))]
    group.quorum_formed(9, members("a", "b"), 3)
    assert group.left_out(8, ["b"]) == []


def test_a_lost_group_says_nothing_of_links() -> None:
    group = after_a_failure()
    group.rank_lost(0, "gone")
    assert group.probed(BOTH, {"b"}) == []


STALLED = Probe(BOTH.peers, stalled_quorum_id=7)


def stalled(*others: str) -> ReplicaGroup:
    """A group with a step that does not get on, and that has begun to probe."""
    group = in_quorum(*others)
    assert len(group.step_stalled(7)) == 1
    return group


def test_a_step_that_does_not_get_on_has_everybody_probed_once_at_a_time() -> None:
    group = in_quorum()
    assert group.step_stalled(7) == [STALLED]
    assert group.step_stalled(7) == []
    assert group.probed(STALLED, ()) == []
    assert group.step_stalled(7) == [STALLED]


def test_a_step_that_waits_for_whom_it_cannot_reach_is_given_up() -> None:
    report, again, notice = stalled().probed(STALLED, {"b"})
    assert (report, again) == (BrokenLinks(("b",)), AGAIN)
    assert isinstance(notice, LossNotice)
    assert (notice.quorum_id, notice.replica_id, notice.is_alive) == (7, "a", True)
    assert "cannot reach b" in notice.reason


def test_a_join_after_a_good_step_waits_for_no_probe() -> None:
    assert [type(effect) for effect in stalled().rank_joined(join(0))] == [GroupJoin]


def test_a_join_after_a_failed_step_waits_for_the_probe_that_is_under_way() -> None:
    group = stalled()
    assert group.rank_joined(join(0, commit_failures=1)) == []
    effects = group.probed(STALLED, {"b"})
    assert [type(effect) for effect in effects] == [BrokenLinks, Probe, GroupJoin, LossNotice]


def test_a_step_in_a_later_quorum_is_not_given_up_for_an_earlier_probe() -> None:
    group = stalled()
    group.rank_joined(join(0))
    group.quorum_formed(8, members("a", "b", "c"), 2)
    assert of_kind(group.probed(STALLED, {"b"}), LossNotice) == []


def test_a_link_that_was_known_to_be_bad_when_the_quorum_was_formed_loses_no_step() -> None:
    group = after_a_failure("b")
    group.probed(Probe((("b", ADDRESS),)), {"b"})
    group.quorum_formed(8, members("a", "b"), 2)
    assert group.step_stalled(8) == []


@pytest.mark.parametrize("quorum_id", [6, 8])
def test_a_stall_in_another_quorum_is_of_no_interest(quorum_id: int) -> None:
    assert in_quorum().step_stalled(quorum_id) == []


def test_nobody_is_probed_for_a_step_that_is_over_or_explained_or_of_a_lost_group() -> None:
    over, explained, lost = in_quorum(), in_quorum(), in_quorum()
    over.rank_joined(join(1))
    explained.member_lost(7, "b", "gone")
    lost.rank_lost(0, "gone")
    assert [group.step_stalled(7) for group in (over, explained, lost)] == [[]] * 3


def test_a_lost_group_gives_nothing_up() -> None:
    group = stalled()
    group.rank_lost(0, "gone")
    assert group.probed(STALLED, {"b"}) == []
