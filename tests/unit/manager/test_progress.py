"""When a replica group says how far it is."""

from __future__ import annotations

import math

import pytest

from lighthouse.core.history import Report
from torchft_like.core.stall_watch import REPORT_PER_MEMBER_S, ProgressLog

EVERY_S = 1.0


class Looks:
    """A log, at which a ManagerServer looks eight times a second."""

    def __init__(self, members: int = 3) -> None:
        self.log, self.now, self.members, self.every_s = ProgressLog(), 100.0, members, EVERY_S

    def look(self, step: int, quorum_id: int = 1, waits_for: str = "", heals_from: str = "") -> Report | None:
        self.now += 0.125
        seen = Report(quorum_id, step, waits_for, heals_from=heals_from)
        return self.log.look(seen, self.members, self.every_s, self.now)

    def steps_told(self, steps: range) -> list[int]:
        return [told.step for step in steps if (told := self.look(step)) is not None]


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_the_first_step_in_a_quorum_is_told_at_once_and_later_ones_once_in_an_interval(looks: Looks) -> None:
    assert looks.look(4) == Report(1, 4)
    assert looks.steps_told(range(5, 30)) == [5, 13, 21, 29]
    assert looks.look(30, quorum_id=2) is None, "no step was committed in this one yet"
    assert looks.look(31, quorum_id=2) == Report(2, 31)


def test_what_has_not_changed_is_not_told_again(looks: Looks) -> None:
    assert looks.look(4) is not None
    assert [looks.look(4) for _ in range(50)] == [None] * 50


def test_a_heal_is_told_at_its_beginning_and_at_its_end(looks: Looks) -> None:
    assert looks.look(0) is not None
    assert looks.look(0, heals_from="a") == Report(1, 0, heals_from="a")
    assert looks.look(0, heals_from="a") is None
    assert looks.look(9) == Report(1, 9)


def test_the_share_of_waiting_is_that_of_the_looks(looks: Looks) -> None:
    looks.look(0)
    looks.look(1)
    told = [looks.look(2, waits_for="allreduce" if i % 4 else "") for i in range(12)]
    (report,) = [report for report in told if report is not None]
    assert (report.waits_for, report.waiting_permille) == ("allreduce", 750)


def test_many_members_tell_less_often() -> None:
    looks = Looks(members=int(3 * EVERY_S / REPORT_PER_MEMBER_S))
    assert looks.steps_told(range(100)) == [0, 24, 48, 72, 96]


def test_while_nobody_looks_only_beginnings_and_ends_are_told(looks: Looks) -> None:
    looks.every_s = math.inf
    assert looks.steps_told(range(4, 40)) == [4, 5]
    assert looks.look(0, quorum_id=2, heals_from="a") == Report(2, 0, heals_from="a")
    looks.every_s = EVERY_S
    assert looks.steps_told(range(40, 50)) == [40, 48]
