"""The verdict on a run: what makes it fail, and how its numbers are counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.histories import Story, diverged, killed_and_back, run_of
from torchft_like.testing.chaos.campaign import Report, make_report, measure, percentiles, plot
from torchft_like.testing.chaos.engine import Run, growth
from torchft_like.testing.chaos.evidence import Injection
from torchft_like.testing.chaos.orders import JobSettings


def report_of(run: Run, baseline: Run | None = None) -> Report:
    return make_report(run, {"seed": 0, "began": run.began}, baseline=baseline)


def test_a_run_that_recovered_from_a_kill_passes() -> None:
    report = report_of(run_of(*killed_and_back()))
    assert report.passed, report.to_text()
    assert report.by_kind["kill"].felt == 1


def test_other_bits_at_the_same_step_fail_it() -> None:
    story, injection = killed_and_back()
    report = report_of(run_of(diverged(story, at=4), injection))
    assert not report.passed
    assert "agreement" in report.problems["divergences"][0]


def test_a_fault_that_nobody_felt_fails_it() -> None:
    story = Story().steps(5)
    injection = Injection(0, "kill", story.now, story.now, ("r2",))
    report = report_of(run_of(story.steps(5), injection))
    assert not report.passed
    assert report.problems["faults that nobody felt"]


@pytest.mark.parametrize("problem", ["hangs", "crashes", "leaks"])
def test_a_hang_a_crash_and_a_leak_fail_it(problem: str) -> None:
    run = run_of(*killed_and_back())
    getattr(run, problem).append("something")
    report = report_of(run)
    assert not report.passed
    assert "something" in report.to_text()


def test_survivors_that_never_commit_again_are_a_hang() -> None:
    story = Story().steps(5)
    injection = Injection(0, "kill", story.now, story.now, ("r2",))
    for name in ("r0", "r1"):
        story.event("loss", name, member="r2:1", reason="-")
    report = report_of(run_of(story, injection))
    assert not report.passed
    assert "survivors recovered never" in report.problems["hangs"][0]


def test_a_replica_that_never_comes_back_is_a_hang() -> None:
    story, injection = killed_and_back()
    story.log.commits = [c for c in story.log.commits if c.time < injection.time or len(c.members) == 2]
    report = report_of(run_of(story, injection))
    assert not report.passed
    assert "all were back never" in report.problems["hangs"][0]


def test_a_fault_that_was_planned_and_never_came_fails_it() -> None:
    run = run_of(*killed_and_back())
    run.planned += 2
    report = report_of(run)
    assert report.problems["faults that nobody felt"] == ["2 of 3 planned faults never came"]


def test_what_a_command_without_digests_cannot_show_is_said_to_be_unchecked() -> None:
    story, injection = killed_and_back()
    run = run_of(diverged(story, at=4), injection)
    assert not report_of(run).skipped
    run.settings = JobSettings(replicas=3, command=("train",))
    report = report_of(run)
    assert "left out: agreement: the command writes no digests" in report.to_text()
    assert "heal_is_clean" not in report.skipped


def test_a_command_that_skips_steps_without_healing_fails_it() -> None:
    story, injection = killed_and_back()
    story.log.events = [event for event in story.log.events if event["kind"] != "heal"]
    run = run_of(story, injection)
    run.settings = JobSettings(replicas=3, command=("train",))
    assert "skipped steps and has not healed" in report_of(run).problems["divergences"][0]


def test_a_report_says_how_many_processes_could_show_a_leak() -> None:
    run = run_of(*killed_and_back())
    run.compared = 3
    assert "3 processes lived through enough faults" in report_of(run).to_text()


def test_a_divergence_in_the_run_without_faults_fails_it_too() -> None:
    baseline = run_of(diverged(Story().steps(10), at=4))
    assert not report_of(run_of(*killed_and_back()), baseline).passed


def test_batches_are_the_steps_of_all_who_took_part() -> None:
    story, injection = killed_and_back()
    measured = measure(run_of(story, injection))
    assert measured.steps == 20
    assert measured.batches == 10 * 3 + 5 * 2 + 5 * 3


def test_what_is_kept_compares_batches_per_second() -> None:
    run, baseline = run_of(*killed_and_back()), run_of(Story().steps(20))
    report = report_of(run, baseline)
    assert report.kept == pytest.approx((55 / measure(run).seconds) / (60 / measure(baseline).seconds))


def test_the_rate_between_faults_leaves_out_the_time_until_all_were_back() -> None:
    story, injection = killed_and_back()
    run = run_of(story, injection)
    whole_s = run.outcomes[0].whole_s
    assert whole_s is not None
    batches = 10 * 3 + 4 * 3  # the first step together ends the recovery
    assert measure(run).quiet_rate == pytest.approx(batches / (run.ended - run.began - whole_s))


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles(range(1, 101)) == (50, 90, 99, 100)
    assert percentiles([2.0, 1.0]) == (1.0, 2.0, 2.0, 2.0)
    assert percentiles([]) == ()


def test_a_report_is_saved_as_text_json_and_picture(tmp_path: Path) -> None:
    report = report_of(run_of(*killed_and_back()), run_of(Story().steps(20)))
    report.save(tmp_path)
    plot(report, tmp_path / "report.png")
    assert "PASSED" in (tmp_path / "report.txt").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_a_process_that_holds_ever_more_is_found() -> None:
    samples = [Counter({"descriptors of socket:[*]": 10 + 2 * index, "threads": 9}) for index in range(10)]
    assert growth(samples) == ["24 descriptors of socket:[*], 14 at first"]


def test_a_process_that_holds_more_for_a_moment_is_not() -> None:
    samples = [Counter({"descriptors of socket:[*]": 10 + 50 * (index == 5)}) for index in range(10)]
    assert growth(samples) == []
