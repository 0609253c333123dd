"""When a wait is remarkable: what is learned from others, and how it is forgotten."""

from __future__ import annotations

import itertools

import pytest

from lighthouse.core.history import Report
from torchft_like.core.stall_watch import (
    FIRST_S,
    LAST_S,
    LOOK_EVERY_S,
    PER_MEMBER_S,
    REPORT_PER_MEMBER_S,
    ProgressLog,
    StallWatch,
    Wait,
)

pytestmark = pytest.mark.progress

QUORUM, MEMBERS = 7, 4
LEAST_S = FIRST_S + PER_MEMBER_S * MEMBERS
ROUNDING_S = 1e-9


class Rank:
    """Looked at ten times a second."""

    def __init__(self) -> None:
        self.watch = StallWatch()
        self.now = 100.0
        self._numbers = itertools.count()

    def wait(
        self, seconds: float, kind: str = "allreduce", quorum_id: int = QUORUM, members: int = MEMBERS
    ) -> list[float]:
        """Another wait; after how many seconds it was remarkable."""
        began, wait = self.now, Wait(kind, next(self._numbers))
        found = []
        while self.now <= began + seconds:
            if self.watch.look(quorum_id, members, wait, self.now):
                found.append(self.now - began)
            self.now += LOOK_EVERY_S
        assert not self.watch.look(quorum_id, members, None, self.now)
        self.now += LOOK_EVERY_S
        return found


def test_a_first_wait_is_remarkable_after_half_a_second_and_each_time_it_has_doubled() -> None:
    found = Rank().wait(9.0)
    assert LEAST_S < found[0] <= LEAST_S + LOOK_EVERY_S + ROUNDING_S
    assert len(found) >= 4
    for before, after in itertools.pairwise(found):
        assert 2 * before < after + ROUNDING_S <= 2 * before + LOOK_EVERY_S + 2 * ROUNDING_S


def test_a_long_wait_is_looked_at_again_and_again() -> None:
    found = Rank().wait(200.0)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) <= LAST_S + PER_MEMBER_S * MEMBERS + LOOK_EVERY_S + ROUNDING_S
    assert 200.0 - found[-1] < 2 * LAST_S


def test_a_wait_as_long_as_others_is_not_remarkable() -> None:
    rank = Rank()
    assert rank.wait(3.0)
    assert [rank.wait(3.0) for _ in range(100)] == [[]] * 100


def test_what_was_learned_of_one_kind_says_nothing_of_another() -> None:
    rank = Rank()
    rank.wait(60.0, "preparation")
    assert rank.wait(1.0)


def test_after_one_long_wait_the_next_is_remarkable_after_ten_seconds_and_then_sooner_again() -> None:
    rank = Rank()
    rank.wait(300.0)
    assert rank.wait(9.0) == []
    assert rank.wait(11.0)
    for _ in range(100):
        rank.wait(LEAST_S / 2)
    assert rank.wait(1.0)


def test_another_quorum_is_another_matter() -> None:
    rank = Rank()
    rank.wait(60.0)
    assert rank.wait(1.0, quorum_id=QUORUM + 1)


def test_who_waits_for_nothing_is_never_remarkable() -> None:
    watch = StallWatch()
    assert not any(watch.look(QUORUM, MEMBERS, None, float(n)) for n in range(100))


@pytest.mark.parametrize("members", [2, 100, 2000])
def test_the_more_there_are_to_ask_the_later_they_are_asked(members: int) -> None:
    least_s = FIRST_S + PER_MEMBER_S * members
    [after_s] = Rank().wait(least_s * 1.5, members=members)
    assert after_s > least_s


def test_a_step_waits_for_a_member_that_is_late_each_time_for_longer_than_join_timeout() -> None:
    """Each second step would be lost: a try again has asked for its quorum, and waits."""
    join_timeout_s, late_s = 2.0, 5.0
    watch, now = StallWatch(), 100.0

    def wait(seconds: float, number: int, quorum_id: int, *, is_unasked: bool = True) -> bool:
        """Return whether another wait was overdue at some time."""
        nonlocal now
        began, overdue = now, False
        while now <= began + seconds:
            watch.look(quorum_id, MEMBERS, Wait("allreduce", number, is_unasked), now)
            overdue |= watch.is_overdue(join_timeout_s, now)
            now += LOOK_EVERY_S
        return overdue

    assert not wait(late_s, 0, QUORUM, is_unasked=False), "all members have asked for this step"
    assert not wait(late_s, 1, QUORUM)
    assert wait(20 * late_s, 2, QUORUM), "it may never come"
    assert not any(wait(late_s, number, QUORUM + 1) for number in range(3, 10))
    assert not any(wait(LOOK_EVERY_S, number, QUORUM + 1) for number in range(10, 1000))
    assert wait(late_s, 1000, QUORUM + 1), "they are no longer late"


def test_progress_is_told_now_and_then_and_at_once_after_a_first_step_and_where_a_heal_begins_and_ends() -> (
    None
):
    log, members, interval_s = ProgressLog(), 100, 10.0
    assert members * REPORT_PER_MEMBER_S == 0.4  # the least time between two
    looks = [  # the time, and what is seen; what share of the looks since the last report found it waiting
        (1.0, Report(7, 5), 0),
        (1.2, Report(7, 5, "b"), None),
        (1.5, Report(7, 6, "b"), 1000),  # the first step in this quorum
        (2.5, Report(7, 7, "b"), None),
        (11.4, Report(7, 7), None),
        (11.5, Report(7, 8), 333),
        (22.0, Report(7, 8), 0),
        (33.0, Report(7, 8), None),  # it is known
        (33.1, Report(7, 8, heals_from="a"), 0),
        (33.4, Report(7, 8), None),
        (33.5, Report(7, 8), 0),
        (34.0, Report(8, 9), None),
        (35.0, Report(8, 10), 0),  # the first step in the next one
        (36.0, Report(8, 11), None),
    ]
    for now, seen, permille in looks:
        told = None if permille is None else seen._replace(waiting_permille=permille)
        assert log.look(seen, members, interval_s, now) == told, now
