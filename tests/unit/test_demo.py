"""The parts of the demo that decide, measure and compare, without a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from demo_faults import NEVER, Fault, plan
from demo_records import Commit, problems


def commits(quorum_id: int, first_step: int, *times: float) -> list[Commit]:
    """Steps `first_step`, `first_step + 1`, ... of one quorum, at these times."""
    return [Commit(time, first_step + index, quorum_id) for index, time in enumerate(times)]


def killed_at_ten() -> Fault:
    fault = Fault("SIGKILL", victim=1, at_step=2, away_steps=2)
    fault.did("strike", 10.0)
    return fault


class TestFault:
    def test_a_late_commit_of_the_old_quorum_is_no_recovery(self) -> None:
        fault = killed_at_ten()
        both = {0: commits(1, 1, 8.0, 9.0, 10.1), 1: commits(1, 1, 8.0, 9.0)}
        assert fault.next_act(both, 10.2) is None
        assert fault.recovered == NEVER

    def test_recovery_ends_when_the_last_survivor_commits_in_a_new_quorum(self) -> None:
        fault = killed_at_ten()
        old = commits(1, 1, 8.0, 9.0)
        fault.next_act({0: old + commits(2, 3, 10.3), 1: old, 2: old}, 10.4)
        assert fault.recovered == NEVER
        fault.next_act({0: old + commits(2, 3, 10.3), 1: old, 2: old + commits(2, 3, 10.5)}, 10.6)
        assert fault.recovered == 10.5

    def test_it_is_over_when_the_victim_commits_again(self) -> None:
        fault, old = killed_at_ten(), commits(1, 1, 8.0, 9.0)
        survivor = old + commits(2, 3, 10.3, 10.4)
        fault.next_act({0: survivor, 1: old}, 11.0)
        fault.did("revive", 11.0)
        fault.next_act({0: survivor, 1: old + commits(1, 3, 11.1)}, 11.2)
        assert not fault.over  # what a stopped process still finishes of its old quorum is no return
        fault.next_act({0: survivor, 1: old + commits(3, 5, 12.0)}, 12.1)
        assert fault.over
        assert fault.returned == 12.0

    @pytest.mark.parametrize("replicas", [2, 3, 5])
    def test_plan_hits_two_replicas_with_room_before_the_end(self, replicas: int) -> None:
        first, second = plan(replicas, 100)
        assert {first.victim, second.victim} <= set(range(replicas))
        assert first.victim != second.victim
        assert first.at_step + first.away_steps < second.at_step < 100 - 2 * second.away_steps


class TestProblems:
    def test_an_end_before_the_last_step_is_found_even_if_it_is_the_same_for_all(self) -> None:
        early = {"step": 8, "digest": "ab"}
        assert len(problems({0: early, 1: early}, steps=9)) == 1
        assert problems({0: early, 1: early}, steps=8) == []

    @pytest.mark.parametrize(
        ("other", "said"),
        [
            ({"step": 9, "digest": "ac"}, "the replicas hold 2 different states"),
            (
                {"step": 10, "digest": "ab"},
                "the replicas ended at steps {0: 9, 1: 10}, not all at the same one from 9 on",
            ),
            (None, "replica 1 printed no digest"),
        ],
    )
    def test_a_replica_that_differs_is_found(self, other: dict[str, Any] | None, said: str) -> None:
        assert problems({0: {"step": 9, "digest": "ab"}, 1: other}, steps=9) == [said]
