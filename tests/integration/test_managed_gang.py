"""Gangs over a Manager: replicas of real processes under a real lighthouse, one of which is killed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import gang_job
from tests.integration import managed_gang_job as replica
from tests.managers import PATIENCE_MS, lighthouse_here
from torchft_like import LighthouseServer
from torchft_like.testing.ranks import Rank, Ranks, running

pytestmark = pytest.mark.integration

# By the abort of the own group, or of a partner's, whichever came first.
ENDED = ("StaleGangError", "GangError")


class Job:
    """Replicas, in the order of their names, which is that of their ranks."""

    def __init__(self, lighthouse: str, ranks: Ranks) -> None:
        self._lighthouse = lighthouse
        self._names = itertools.count()
        self.ranks = ranks

    def join(self, *ranks: Rank, use_async_quorum: bool = False) -> None:
        for rank in ranks:
            rank.ask(replica.join, 0, f"replica-{next(self._names)}", self._lighthouse, use_async_quorum)

    def steps(self, *numbers: float) -> list[dict[str, Any]]:
        """One step of all, each with its number."""
        for place, (rank, number) in enumerate(zip(self.ranks, numbers, strict=True)):
            rank.tell(replica.step, place, number)
        return self.ranks.answers()

    def steps_until_all_are_in(self, *numbers: float) -> list[dict[str, Any]]:
        """The first step that all commit together: a quorum may come about without the latest."""
        for place, (rank, number) in enumerate(zip(self.ranks, numbers, strict=True)):
            rank.tell(replica.step_until, place, number, len(numbers))
        return self.ranks.answers()

    def kill(self, rank: Rank) -> None:
        rank.kill()
        self.ranks.remove(rank)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with lighthouse_here(min_replicas=1, keepalive_timeout_ms=PATIENCE_MS) as server:
        yield server


@pytest.fixture
def job(lighthouse: LighthouseServer) -> Iterator[Job]:
    with running(4) as ranks:
        job = Job(lighthouse.address(), Ranks(ranks))
        job.join(*ranks)
        yield job


def test_size_rank_and_topology_follow_the_quorum(job: Job) -> None:
    expected = [
        {"tp": 11, "dp": 101}, {"tp": 11, "dp": 1010}, {"tp": 1100, "dp": 101}, {"tp": 1100, "dp": 1010},
    ]  # fmt: skip
    for state in (1111.0, 2222.0):  # in the second step the gangs are those of the first
        assert job.steps(1, 10, 100, 1000) == [
            {**sums, "size": 4, "rank": rank, "committed": True, "state": state}
            for rank, sums in enumerate(expected)
        ]

    # One is killed in a collective, which one of the others has not come to.
    assert job.ranks.ask(replica.open_step) == [4] * 4
    for place in (0, 1, 3):
        job.ranks[place].tell(gang_job.call, place, "all_reduce")
    job.ranks[1].wait_blocked()
    job.kill(job.ranks[1])
    job.ranks[1].tell(gang_job.call, 2, "all_reduce")
    assert job.ranks.answers() == [("GangError", True)] * 3
    assert job.ranks.ask(replica.close_step) == [False] * 3

    # Three cannot be split in two: an error on all, of the topology only.
    assert job.steps(1, 10, 100) == [
        {"error": "TopologyError", "size": 3, "rank": rank, "committed": True, "state": 2333.0}
        for rank in range(3)
    ]
    job.kill(job.ranks[0])
    for each in job.steps_until_all_are_in(1, 10):
        assert (each["tp"], each["state"]) == (11, 2344.0)

    # Two more join, and heal before the step.
    with running(2) as joining:
        job.ranks += joining
        job.join(*joining)
        found = job.steps_until_all_are_in(1, 10, 100, 1000)
        assert [each["tp"] for each in found] == [11, 11, 1100, 1100]
        assert len({each["state"] for each in found}) == 1
        job.ranks.ask(replica.leave)


def test_a_part_without_the_dead_member_ends_with_the_quorum(job: Job) -> None:
    assert [found["size"] for found in job.steps(1, 1, 1, 1)] == [4] * 4
    assert job.ranks.ask(replica.open_part) == [0, 1, 0, 1]
    job.ranks[0].tell(gang_job.call, 0, "barrier")  # with 1, which does not come
    job.kill(job.ranks[3])
    assert job.ranks[0].answer()[0] in ENDED
    for place in (1, 2):
        assert job.ranks[place].ask(gang_job.call, place, "barrier")[0] in ENDED
    assert job.ranks.ask(replica.close_step) == [False] * 3
    assert [found["size"] for found in job.steps(1, 1, 1)] == [3] * 3
    assert job.ranks.ask(replica.use_old_part) == ["StaleGangError"] * 3


def test_parts_do_not_communicate_in_a_step_in_which_a_member_heals(lighthouse: LighthouseServer) -> None:
    with running(2) as ranks:
        job = Job(lighthouse.address(), Ranks(ranks[:1]))
        job.join(ranks[0], use_async_quorum=True)
        assert [found["committed"] for found in job.steps(5)] == [True]
        job.ranks.append(ranks[1])
        job.join(ranks[1], use_async_quorum=True)
        found = job.steps_until_all_are_in(1, 10)
        assert [(each["tp"], each["dp"]) for each in found] == [(11, 1), (11, 10)]
        assert found[0]["state"] == found[1]["state"]
        # One refuses; the other does, too, or hears first that the refusal has ended the quorum.
        assert any("GangError" in each["errors"] for each in found)
        assert all(each["errors"] & {"GangError", "StaleGangError"} for each in found)
