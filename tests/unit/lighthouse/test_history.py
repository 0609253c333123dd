"""What operators are told of the past: recoveries, heals, rates, stragglers; bounded whatever happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lighthouse.core.history import MOMENTS_MAX, NAMES_MAX, RECORDS_MAX, History, Moment, Report

EPOCH = 1000.0  # wall-clock time at 0 of the other clock


class Job:
    """A history, and what comes in at the times that a test says."""

    def __init__(self) -> None:
        self.history = History()

    def event(self, kind: str, replica_id: str, now: float, quorum_id: int = 7) -> None:
        self.history.happened(Moment(EPOCH + now, kind, quorum_id, replica_id, f"{replica_id}: {kind}"), now)

    def formed(self, now: float, quorum_id: int = 7, **steps: int) -> None:
        self.history.formed(quorum_id, steps, EPOCH + now, now)

    def says(self, replica_id: str, step: int, now: float, waiting: int = 0, heals_from: str = "") -> None:
        report = Report(7, step, "", waiting, heals_from)
        self.history.reported(replica_id, report, EPOCH + now, now)


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_recovery_ends_with_a_quorum_and_then_with_a_step(job: Job) -> None:
    job.formed(0.0, a=5, b=5, c=5, d=5)
    job.event("leave", "d", 9.0)
    job.event("loss", "c", 10.0)
    job.event("loss", "b", 10.1)
    (recovery,) = job.history.recoveries
    assert (recovery.lost, recovery.quorum_s, recovery.time) == (["c", "b"], None, EPOCH + 10.0)
    job.says("a", 99, 10.2)  # of the quorum that broke
    assert job.history.ends.keys() == {"b", "c", "d"}
    for again in (0.0, 0.1):
        job.formed(11.0 + again, 8, a=99)
    assert (recovery.quorum_s, recovery.quorum_id, recovery.step_s) == (1.0, 8, None)
    assert (job.history.quorum_began, job.history.ends) == (EPOCH + 11.0, {})
    job.says("a", 99, 11.5)
    job.says("newcomer", 100, 11.6)
    job.says("a", 100, 12.0)
    assert recovery.step_s == 2.0
    assert (sum(job.history.to_quorum.counts), job.history.to_step.sum_s) == (1, 2.0)


def test_a_replica_outside_of_the_quorum_is_nothing_to_recover_from(job: Job) -> None:
    job.event("loss", "stranger", 1.0, quorum_id=-1)
    assert not job.history.recoveries
    assert job.history.ends == {"stranger": "stranger: loss"}


def test_a_heal_is_followed_from_its_quorum_to_its_end(job: Job) -> None:
    job.formed(0.0, a=50, b=0)
    (heal,) = job.history.heals
    job.says("b", 0, 0.5, heals_from="a")
    assert (heal.source, heal.from_step, heal.to_step, heal.outcome) == ("a", 0, 50, "")
    job.says("b", 0, 0.6)  # it failed, and has not begun another one
    assert job.history.healing() == {"b": heal}
    job.says("b", 51, 2.0)
    assert (heal.outcome, heal.seconds, job.history.healing()) == ("healed", 2.0, {})
    assert [moment.kind for moment in job.history.moments] == ["heal"]
    job.says("b", 61, 3.0)
    job.says("b", 71, 4.0)
    assert job.history.paces["b"].steps_per_s(4.0) == 10.0, "the steps that it took over are not its own"


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda job: job.event("loss", "b", 3.0), "lost"),
        (lambda job: job.event("leave", "b", 3.0), "left"),
        (lambda job: job.formed(3.0, 8, a=52, b=52), "healed"),
    ],
)
def test_a_heal_ends_with_its_replica_or_a_quorum(job: Job, end: Callable[[Job], None], outcome: str) -> None:
    job.formed(1.0, a=50, b=0)
    job.formed(2.0, a=51, b=0)
    end(job)
    assert [(h.outcome, h.seconds, h.to_step) for h in job.history.heals] == [(outcome, 2.0, 51)]
    assert not job.history.healing()


def test_the_rate_falls_while_no_step_is_told(job: Job) -> None:
    for second in range(5):
        job.says("a", 10 * second, float(second))
        job.says("a", 10 * second + 1, second + 0.1)  # too soon to be a sample
        job.says("b", 7, float(second))  # nothing new
    assert job.history.paces["b"].steps_per_s(5.0) is None
    pace = job.history.paces["a"]
    assert pace.steps_per_s(5.0) == 10.0
    assert pace.steps_per_s(21.0) == 2.0


def test_a_replica_that_lost_its_state_or_claimed_steps_begins_anew(job: Job) -> None:
    for second in range(5):
        job.says("a", 10 * second, float(second))
    job.formed(5.0, a=30)
    pace = job.history.paces["a"]
    assert (pace.step, pace.steps_per_s(5.0)) == (30, None)


@pytest.mark.parametrize(
    ("waiting", "reports", "slowest"),
    [
        ({"a": 700, "b": 50, "c": 650}, 5, "b"),
        ({"a": 300, "b": 50}, 5, "b"),
        ({"a": 300, "b": 50}, 4, None),
        ({"a": 300, "b": 200}, 5, None),
        ({"a": 9000, "b": 900}, 5, None),  # per mille
        ({"a": 9}, 5, None),
    ],
)
def test_the_straggler_is_the_one_that_waits_for_nobody(
    job: Job, waiting: dict[str, int], reports: int, slowest: str | None
) -> None:
    for replica_id, permille in waiting.items():
        for second in range(reports):
            job.says(replica_id, 1, float(second), permille)
    assert job.history.straggler([*waiting, "silent"]) == slowest


def test_nothing_grows_with_what_happened(job: Job) -> None:
    for number in range(3 * MOMENTS_MAX):
        name = f"r{number}"
        job.event("register", name, float(number))
        job.says(name, number, float(number), heals_from="a")
        job.event("loss", name, float(number))
        if number % 20 == 0:
            job.formed(number + 0.5, number, a=number)
    history = job.history
    sizes = (len(history.moments), len(history.recoveries), len(history.heals), len(history.paces))
    assert sizes == (MOMENTS_MAX, RECORDS_MAX, RECORDS_MAX, 0)
    assert len(history.recoveries[-1].lost) == NAMES_MAX
    assert len(history.ends) <= MOMENTS_MAX
    assert history.counts["loss"] == 3 * MOMENTS_MAX
