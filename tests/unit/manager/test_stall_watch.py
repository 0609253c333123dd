"""When a wait is remarkable: what is learned from others, and how it is forgotten."""

from __future__ import annotations

import pytest

from torchft_like.manager.stall_watch import FIRST_S, LOOK_EVERY_S, PER_MEMBER_S, StallWatch

QUORUM, MEMBERS = 7, 4
LEAST_S = FIRST_S + PER_MEMBER_S * MEMBERS


class Rank:
    """Looked at ten times a second."""

    def __init__(self) -> None:
        self.watch = StallWatch()
        self.now = 100.0
        self.waits = 0

    def wait(self, seconds: float, quorum_id: int = QUORUM, members: int = MEMBERS) -> list[float]:
        """Another wait; after how many seconds it was remarkable."""
        began, self.waits = self.now, self.waits + 1
        found = []
        while self.now <= began + seconds:
            if self.watch.look(quorum_id, members, self.waits, self.now):
                found.append(self.now - began)
            self.now += LOOK_EVERY_S
        assert not self.watch.look(quorum_id, members, None, self.now)
        self.now += 0.1
        return found


def test_a_first_wait_is_remarkable_after_half_a_second_and_each_time_it_has_doubled() -> None:
    found = Rank().wait(5.0)
    limits = [LEAST_S * 2**n for n in range(len(found))]
    assert len(found) >= 3
    for after_s, limit_s in zip(found, limits, strict=True):
        assert limit_s < after_s <= limit_s + LOOK_EVERY_S + 1e-9


def test_a_wait_as_long_as_others_is_not_remarkable() -> None:
    rank = Rank()
    assert rank.wait(3.0)
    assert [rank.wait(3.0) for _ in range(100)] == [[]] * 100


def test_one_long_wait_is_forgotten_in_the_end() -> None:
    rank = Rank()
    rank.wait(60.0)
    assert rank.wait(5.0) == []
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


@pytest.mark.parametrize("members", [2, 100, 10_000])
def test_the_more_there_are_to_ask_the_later_they_are_asked(members: int) -> None:
    [after_s] = Rank().wait((FIRST_S + PER_MEMBER_S * members) * 1.5, members=members)
    assert after_s > FIRST_S + PER_MEMBER_S * members
