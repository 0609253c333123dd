"""The search for links that do not work: whom to probe, how long the join waits, what is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from lighthouse.admission import TEXT_MAX, about_links
from lighthouse.core.left_out import REPORTED_MAX
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.test_group import join, members
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import BrokenLinks, Effect, GroupJoin, LossNotice, ReplicaGroup

pytestmark = pytest.mark.progress

BOTH = Probe((("b", "http://b:1"), ("c", "http://c:1")), must_listen=frozenset("bc"))
AGAIN = Probe((("b", "http://b:1"),), is_repeated=True, must_listen=frozenset("b"))


def in_quorum(*others: str) -> ReplicaGroup:
    """A group that has been answered with a quorum."""
    group = ReplicaGroup("a", 1)
    group.rank_joined(join(0))
    group.quorum_formed(7, members("a", *(others or ("b", "c"))), 1)
    return group


def of_kind(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


class Asking(NamedTuple):
    """A group, and the probe that it waits for."""

    group: ReplicaGroup
    probe: Probe

    def answered(self, *silent: str) -> list[Effect]:
        """By all but the silent ones."""
        return self.group.probed(self.probe, silent)


def asking(group: ReplicaGroup, effects: list[Effect]) -> Asking:
    [probe] = of_kind(effects, Probe)
    assert isinstance(probe, Probe)
    return Asking(group, probe)


def after_a_failure(*others: str) -> Asking:
    group = in_quorum(*others)
    return asking(group, group.rank_joined(join(0, commit_failures=1)))


def test_a_death_explains_a_failed_step() -> None:
    group = in_quorum()
    group.member_lost(7, "c", "gone")
    assert [type(effect) for effect in group.rank_joined(join(0, commit_failures=1))] == [GroupJoin]


def test_one_that_is_alive_and_gave_the_quorum_up_explains_no_failed_step() -> None:
    """It may have for a link that does not work, of which this group has to find the other end."""
    group = in_quorum()
    group.member_lost(7, "b", "it waits, and cannot reach c", is_alive=True)
    assert group.rank_joined(join(0, commit_failures=1)) == [replace(BOTH, must_listen=frozenset())]


@pytest.mark.parametrize(("address", "must_listen"), [("http://b:1", "bc"), ("http://elsewhere:1", "c")])
def test_who_refuses_after_a_failed_step_must_listen_where_the_next_one_fails_with_it_too(
    address: str, must_listen: str
) -> None:
    """The host of a process that has left, or died, refuses as a firewall does, and is no member then."""
    failed = after_a_failure("b", "c")
    assert failed.probe.must_listen == frozenset()
    assert [type(effect) for effect in failed.answered()] == [GroupJoin]
    again = members("a", "b", "c", "new")
    again[1].address = address
    failed.group.quorum_formed(8, again, 2)
    [probe] = failed.group.rank_joined(join(0, commit_failures=2))
    assert isinstance(probe, Probe)
    assert probe.must_listen == frozenset(must_listen)
    failed.group.probed(probe, ())
    failed.group.quorum_formed(9, again, 3)
    [probe] = failed.group.rank_joined(join(0, commit_failures=3))
    assert isinstance(probe, Probe)
    assert probe.must_listen == frozenset(("b", "c", "new"))


def test_the_join_does_not_wait_for_a_member_that_is_lost_meanwhile() -> None:
    asking = after_a_failure("b")
    effects = asking.group.member_lost(7, "b", "gone")
    assert [type(effect) for effect in effects] == [LossNotice, GroupJoin]
    assert asking.answered("b") == []


def test_nor_for_the_end_of_the_probe_once_the_others_have_answered() -> None:
    """The host of the one that is lost may refuse until then."""
    asking = after_a_failure("b", "c")
    assert asking.group.answered(asking.probe, "c") == []
    effects = asking.group.member_lost(7, "b", "gone")
    assert [type(effect) for effect in effects] == [LossNotice, GroupJoin]

    asking = after_a_failure("b", "c")
    asking.group.member_lost(7, "b", "gone")
    effects = [*asking.group.answered(asking.probe, "c")]
    assert [type(effect) for effect in effects] == [GroupJoin]
    assert asking.answered("b") == []


@pytest.mark.parametrize(
    ("length", "count"), [(3, 2 * REPORTED_MAX), (300, REPORTED_MAX - 4), (TEXT_MAX, REPORTED_MAX - 4)]
)
def test_reports_are_bounded_and_the_lighthouse_takes_them(length: int, count: int) -> None:
    names = [f"{n:03}".ljust(length, "x") for n in range(count)]
    group = in_quorum(*names)
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    [report] = of_kind(group.probed(probe, names), BrokenLinks)
    assert isinstance(report, BrokenLinks)
    assert report.unreachable == tuple(names[-len(report.unreachable) :])
    assert about_links(pb.BrokenLinks(unreachable_replica_ids=report.unreachable)) is None
    more = pb.BrokenLinks(unreachable_replica_ids=names[-len(report.unreachable) - 1 :])
    assert about_links(more) is not None, "no more is kept back than has to be"


def test_a_lost_group_says_nothing_of_links() -> None:
    asking = after_a_failure()
    asking.group.rank_lost(0, "gone")
    assert asking.answered("b") == []


def stalled(*others: str) -> Asking:
    """A group with a step that does not get on, and that has begun to probe."""
    group = in_quorum(*others)
    return asking(group, group.step_stalled(7))


def test_the_answers_to_a_suspicion_that_is_settled_are_not_those_to_the_next() -> None:
    old = stalled()
    old.group.rank_joined(join(1))
    old.group.quorum_formed(7, members("a", "b", "c"), 2)
    new = asking(old.group, old.group.step_stalled(7))
    assert old.answered("b") == []
    assert [type(effect) for effect in new.answered("b")] == [BrokenLinks, Probe, LossNotice]


def test_a_join_after_a_failed_step_waits_for_the_probe_that_is_under_way() -> None:
    asking = stalled()
    assert asking.group.rank_joined(join(0, commit_failures=1)) == []
    assert [type(effect) for effect in asking.answered("b")] == [BrokenLinks, Probe, GroupJoin]


def test_a_link_that_was_known_to_be_bad_when_the_quorum_was_formed_loses_no_step() -> None:
    asking = after_a_failure("b", "c")
    asking.answered("b")
    asking.group.quorum_formed(8, members("a", "b", "c"), 2)
    [probe] = asking.group.step_stalled(8)
    assert probe == Probe((("c", "http://c:1"),), must_listen=frozenset("c"))
    assert asking.group.probed(AGAIN, {"b"}) == [AGAIN]
    assert isinstance(probe, Probe)
    assert asking.group.probed(probe, ()) == []


def test_one_that_cannot_be_reached_and_is_a_member_nevertheless_is_reported_again() -> None:
    """The lighthouse has taken it for another process."""
    asking = after_a_failure("b", "c")
    asking.answered("b")
    effects = asking.group.quorum_formed(8, members("a", "b", "c"), 2)
    assert of_kind(effects, BrokenLinks) == [BrokenLinks(("b",))]
    asking.group.rank_joined(join(0))
    assert of_kind(asking.group.quorum_formed(9, members("a", "c"), 3), BrokenLinks) == []


def test_of_a_process_that_serves_elsewhere_nothing_is_known() -> None:
    asking = after_a_failure("b", "c")
    asking.answered("b")
    moved = members("a", "b", "c")
    moved[1].address = "http://elsewhere:1"
    assert of_kind(asking.group.quorum_formed(8, moved, 2), BrokenLinks) == [BrokenLinks(())]
    [probe] = asking.group.step_stalled(8)
    assert probe == replace(BOTH, peers=(("b", "http://elsewhere:1"), ("c", "http://c:1")))


def test_a_link_that_worked_again_and_does_not_any_more_is_another_matter() -> None:
    known = after_a_failure("b", "c")
    known.answered("b")
    group = known.group
    group.quorum_formed(8, members("a", "b", "c"), 2)
    group.probed(AGAIN, ())
    assert of_kind(asking(group, group.step_stalled(8)).answered("b"), LossNotice)


def test_of_two_both_give_up_at_once_as_one_of_them_is_left_out() -> None:
    [notice] = of_kind(stalled("b").answered("b"), LossNotice)
    assert isinstance(notice, LossNotice)
    assert notice.unreachable == ("b",)


def in_quorum_with_one_out_of_reach() -> ReplicaGroup:
    """Too few others would have stayed without it."""
    asking = after_a_failure("b", "c")
    asking.answered("b")
    asking.group.quorum_formed(8, members("a", "b", "c"), 2)
    return asking.group


def test_a_join_waits_where_one_that_was_out_of_reach_is_a_member_until_that_is_probed_again() -> None:
    """A connection that is refused fails the step at once: the next quorum would fail as fast, and so on."""
    group = in_quorum_with_one_out_of_reach()
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    assert group.probed(probe, ()) == []
    effects = group.probed(AGAIN, {"b"})
    assert [type(effect) for effect in effects] == [Probe, GroupJoin]


def test_no_join_waits_for_that_after_the_step_in_which_the_link_was_found() -> None:
    """The lighthouse has been told, and forms a quorum without one of the two."""
    asking = stalled("b", "c")
    assert of_kind(asking.answered("b"), LossNotice)
    [probe] = asking.group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    assert [type(effect) for effect in asking.group.probed(probe, ())] == [GroupJoin]


def test_a_join_after_a_step_that_was_done_waits_for_no_probe() -> None:
    asking = stalled()
    assert of_kind(asking.group.rank_joined(join(1)), GroupJoin)
    asking.group.quorum_formed(8, members("a", "b", "c"), 2)
    [probe] = asking.group.rank_joined(join(1, commit_failures=1))
    assert isinstance(probe, Probe)
    assert probe.must_listen == frozenset(), "no step had failed with them before"


def test_a_death_there_lets_the_join_go() -> None:
    group = in_quorum_with_one_out_of_reach()
    [probe] = group.rank_joined(join(0, commit_failures=1))
    assert isinstance(probe, Probe)
    assert group.probed(probe, ()) == []
    assert [type(effect) for effect in group.member_lost(8, "c", "gone")] == [LossNotice, GroupJoin]


def test_a_step_that_has_waited_for_long_for_whom_it_can_reach_is_not_given_up() -> None:
    assert in_quorum().step_stalled(7, for_long=True) == [BOTH]


def test_the_link_to_a_member_that_is_lost_is_probed_on() -> None:
    asking = after_a_failure()
    asking.answered("b")
    asking.group.member_lost(7, "b", "its session broke")
    assert asking.group.probed(AGAIN, {"b"}) == [replace(AGAIN, must_listen=frozenset())]


@pytest.mark.parametrize("quorum_id", [7, -1], ids=["a member", "one that was left out"])
def test_who_is_out_of_reach_and_refuses_once_its_session_has_ended_has_ended(quorum_id: int) -> None:
    asking = after_a_failure()
    asking.answered("b")
    asking.group.member_lost(quorum_id, "b", "it gave the quorum up", is_alive=True)
    assert asking.group.probed(AGAIN, {"b"}) == [AGAIN]
    asking.group.member_lost(quorum_id, "b", "its session ended")
    (again,) = of_kind(asking.group.probed(AGAIN, {"b"}), Probe)
    assert isinstance(again, Probe)
    assert again.must_listen == frozenset()
    assert asking.group.probed(again, ()) == [BrokenLinks(())]


def test_who_is_back_in_a_quorum_must_listen_again() -> None:
    asking = after_a_failure()
    asking.answered("b")
    asking.group.member_lost(-1, "b", "its session ended")
    asking.group.rank_joined(join(0, commit_failures=1))
    asking.group.quorum_formed(8, members("a", "b", "c"), 2)
    (again,) = of_kind(asking.group.probed(AGAIN, {"b"}), Probe)
    assert again == AGAIN


def test_a_quorum_without_whom_one_cannot_reach_is_not_given_up() -> None:
    asking = stalled("b", "c", "d")
    asking.group.member_lost(7, "d", "gone")
    asking.group.rank_joined(join(0, commit_failures=1))
    asking.group.quorum_formed(8, members("a", "c", "e"), 2)
    assert of_kind(asking.answered("b"), LossNotice) == []


def test_who_still_waits_after_a_death_probes_the_others() -> None:
    """The death ends their collectives, but not a heal from one that cannot be reached."""
    group = in_quorum()
    group.member_lost(7, "b", "gone")
    (probe,) = group.step_stalled(7)
    assert isinstance(probe, Probe)
    assert [replica_id for replica_id, _ in probe.peers] == ["c"]


def test_everybody_asks_somebody_else_first() -> None:
    probes = []
    for own in "abc":
        group = ReplicaGroup(own, 1)
        group.rank_joined(join(0))
        group.quorum_formed(7, members("a", "b", "c"), 1)
        probes.append(asking(group, group.step_stalled(7)).probe)
    assert [[replica_id for replica_id, _ in probe.peers] for probe in probes] == [
        ["b", "c"],
        ["c", "a"],
        ["a", "b"],
    ]
