"""The verdict on a run: what makes it fail, and how its numbers are counted."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lighthouse.events import Event
from tests.chaos.histories import JOB, Story, diverged, killed_and_back, run_of
from tests.conftest import ROOT
from tests.pages import blocks
from torchft_like.cli import main
from torchft_like.testing.chaos.campaign import (
    FAILED,
    WRONG_ARGUMENT,
    Report,
    Run,
    features,
    growth,
    make_report,
    measure,
    percentiles,
    plot,
    usable,
)
from torchft_like.testing.chaos.kinds import OF_KIND, Injection, judge
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import KINDS, draw
from torchft_like.testing.journal import Journal, Witness
from torchft_like.testing.processes import Processes


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


# What counts as felt, and how recoveries are measured, on histories made by hand.


def injection_of(story: Story, kind: str, *victims: str, **details: float | str) -> Injection:
    return Injection(0, kind, story.now, story.now + 2.0, victims, details)


def test_a_kill_is_felt_by_the_loss_that_survivors_were_told_of() -> None:
    story, injection = killed_and_back()
    assert "loss of r2" in judge(injection, story.log, JOB, story.now).felt


def test_a_recovery_ends_with_the_first_step_that_was_begun_after_the_fault_was_felt() -> None:
    story = Story().steps(3)
    killed = story.now + 0.01
    story.steps(1)  # in flight when the fault came: committed by all, and no recovery
    for name in ("r0", "r1"):
        story.event("loss", name, member="r2:1", reason="-")
    story.new_quorum("r2").steps(1)
    outcome = judge(Injection(0, "kill", killed, killed, ("r2",)), story.log, JOB, story.now)
    assert outcome.recovery_s == pytest.approx(story.now - killed)


def test_a_recovery_waits_for_the_last_survivor() -> None:
    story, injection = killed_and_back()
    outcome = judge(injection, story.log, JOB, story.now)
    story.log.commits = [
        commit
        for commit in story.log.commits
        if not (commit.replica_id == "r1:1" and len(commit.members) == 2)
    ]
    later = judge(injection, story.log, JOB, story.now)
    assert outcome.recovery_s is not None
    assert later.recovery_s is not None
    assert later.recovery_s > outcome.recovery_s


def test_the_whole_is_back_when_the_victim_commits_with_the_others() -> None:
    story, injection = killed_and_back()
    outcome = judge(injection, story.log, JOB, story.now)
    together = [c.time for c in story.log.commits if c.time > injection.time and len(c.members) == 3]
    assert outcome.whole_s == pytest.approx(min(together) - injection.time)


def test_a_fault_is_not_credited_with_what_the_next_one_did() -> None:
    story, injection = killed_and_back()
    early = replace(injection, time=injection.time - 0.3)
    assert not judge(early, story.log, JOB, until=injection.time).felt


Act = Callable[[Story], object]


def event(kind: str, name: str = "", **fields: Any) -> Act:
    return lambda story: story.event(kind, name, **{"reason": "-", **fields})


def note(kind: str, name: str, **fields: Any) -> Act:
    return lambda story: story.note(kind, name, **{"reason": "-", **fields})


def both(first: Act, second: Act) -> Act:
    return lambda story: (first(story), second(story))


def left_out(*members: str) -> Act:
    return event("left_out", members=members, reasons=["-"], source="lighthouse")


NOTHING: Act = lambda story: story.steps(5)  # noqa: E731 - as the others
WITHOUT_R2: Act = lambda story: story.new_quorum("r2").steps(5)  # noqa: E731
SPOILT = both(
    note("fault", "r0", act="cut-answer"), event("heal", "r2", refused=[], addresses=["http://h:1"])
)
TOO_MANY = "[Errno 24] Too many open files"
UNFETCHED = "CheckpointFormatError: state of step 5 could not be fetched from -"
STRANGER = {"stranger": "stranger"}
REFUSED = event("refused", member="stranger:1", source="lighthouse")
GIVEN_UP = both(event("error", "r2"), note("fault", "r2", act="give-up"))

# A fault with this victim and these details, what is no evidence of it, and what is some after that, if any.
EVIDENCE: list[tuple[str, str, dict[str, Any], Act, Act | None]] = [
    ("stop", "r2", {}, event("loss", "r2", member="r2:1"), None),  # the victim's own word
    ("lighthouse-kill", "", {}, event("disconnected", "r0"), event("connected", "r0")),
    ("truncate", "r2", {}, SPOILT, event("error", "r2", reason=UNFETCHED)),
    ("truncate", "r2", {}, SPOILT, event("heal", "r2", refused=[], addresses=["http://h:1", "http://h:2"])),
    ("bit-flip", "r2", {}, SPOILT, event("heal", "r2", refused=["http://h:1: the stream is truncated"])),
    (
        "disk-full",
        "",
        {},
        note("checkpoint_failed", "r1", errno="EACCES"),
        note("checkpoint_failed", "r1", errno="ENOSPC"),
    ),
    ("baby-kill", "r2", {"backends": 1}, NOTHING, event("error", "r2")),
    ("baby-stop", "r2", {"backends": 0}, event("error", "r2"), None),
    ("fd-exhaustion", "r1", {}, event("error", "r0", reason=TOO_MANY), event("error", "r1", reason=TOO_MANY)),
    ("give-up", "r2", {}, GIVEN_UP, event("abort", "r0", reason="given up by r2:1")),
    ("sick", "r2", {}, left_out("r2:1"), WITHOUT_R2),
    ("sick", "r2", {}, both(left_out("r1:1"), WITHOUT_R2), None),
    ("sick", "r2", {}, both(left_out("r1:1", "r2:1"), WITHOUT_R2), None),
    ("foreign", "", STRANGER, NOTHING, REFUSED),
    ("foreign", "", STRANGER, both(REFUSED, event("error", "r0")), None),
]


@pytest.mark.parametrize(("kind", "victim", "details", "before", "evidence"), EVIDENCE)
def test_each_kind_is_felt_by_its_own_evidence(
    kind: str, victim: str, details: dict[str, Any], before: Act, evidence: Act | None
) -> None:
    story = Story().steps(5)
    injection = injection_of(story, kind, *([victim] if victim else []), **details)
    before(story)
    assert not judge(injection, story.log, JOB, story.now).felt
    if evidence is not None:
        evidence(story)
        assert judge(injection, story.log, JOB, story.now).felt


def test_every_kind_that_is_offered_leaves_a_survivor() -> None:
    kinds, skipped = usable(list(KINDS), features(JobSettings(replicas=2), network=False))
    assert "fd-exhaustion" in skipped
    assert "kill-half" in kinds


def test_a_delay_is_felt_when_steps_take_longer_by_it() -> None:
    for took_s, is_felt in ((0.1, False), (0.2, True)):
        story = Story().steps(20)
        injection = injection_of(story, "delay", delay_s=0.05, delayed=100)
        story.steps(9, took_s=took_s)
        assert bool(judge(injection, story.log, JOB, story.now).felt) is is_felt


@pytest.mark.parametrize(("is_idle", "waited_s"), [(True, 8.0), (True, 0.0), (False, 8.0)])
def test_idle_members_are_felt_by_a_survivor_that_waits(is_idle: bool, waited_s: float) -> None:
    story = Story().steps(5)
    injection = injection_of(story, "idle", "r1", "r2")
    for name in ("r1", "r2"):
        story.event("loss", "r0", member=f"{name}:1", reason="-")
    if is_idle:
        story.note("idle", "r1", seconds=15.0)
    story.now += waited_s
    story.new_quorum("r1", "r2").steps(5)
    assert bool(judge(injection, story.log, JOB, story.now).felt) is (is_idle and waited_s > 0)


def test_lost_packets_are_felt_when_segments_were_sent_again() -> None:
    story = Story().steps(5)
    assert not judge(injection_of(story, "loss", lost=9, retransmits=0), story.log, JOB, story.now).felt
    assert judge(injection_of(story, "loss", lost=9, retransmits=3), story.log, JOB, story.now).felt


@pytest.mark.parametrize(("cut", "stood_s"), [(9, 2.0), (9, 0.0), (0, 2.0)])
def test_a_bad_link_is_felt_when_packets_were_cut_and_nobody_committed(cut: int, stood_s: float) -> None:
    story = Story().steps(5)
    injection = injection_of(story, "link", cut=cut)
    story.now += stood_s
    story.steps(25)
    assert bool(judge(injection, story.log, JOB, story.now).felt) is (cut > 0 and stood_s > 0)


def test_every_kind_of_fault_can_be_injected_and_felt() -> None:
    assert set(KINDS) == set(OF_KIND)


# What a witness takes for a commit.


class HealsByOneStep:
    """A manager whose replica is a step on after each vote, whatever the verdict."""

    def __init__(self) -> None:
        self.events = self
        self.step = 8

    def subscribe(self, listener: Any) -> None:
        self._tell = listener

    def tell(self, kind: str, **fields: Any) -> None:
        self._tell(Event(kind, "manager", time.time(), "a", 0, self.step, 5, fields))

    def end_step(self, *, committed: bool) -> None:
        self.step += 1
        self.tell("commit", committed=committed)

    def allreduce(self, tensor: torch.Tensor, **_: Any) -> HealsByOneStep:
        return self

    def wait(self) -> None:
        """Nobody is waited for."""

    def is_participating(self) -> bool:
        return False

    def num_participants(self) -> int:
        return 2

    def current_step(self) -> int:
        return self.step


@pytest.mark.parametrize("committed", [True, False])
def test_the_verdict_says_what_is_a_commit_and_not_the_number_of_the_step(
    tmp_path: Path, committed: bool
) -> None:
    manager: Any = HealsByOneStep()
    witness = Witness(manager, Journal(str(tmp_path / "journal")), 0)
    manager.tell("quorum", members=["a", "b"])
    for _ in range(2):
        witness.attend(manager.current_step())
        assert not witness.has_committed, "the verdict of the last step says nothing of this one"
        manager.end_step(committed=committed)
        assert witness.has_committed is committed


# Schedules come from their seed alone, and deal every kind equally often.


def test_the_same_seed_gives_the_same_faults() -> None:
    assert draw(5, list(KINDS), 600, 10, 4) == draw(5, list(KINDS), 600, 10, 4)
    assert draw(5, list(KINDS), 600, 10, 4) != draw(6, list(KINDS), 600, 10, 4)


def test_every_kind_comes_equally_often() -> None:
    counts = Counter(planned.kind for planned in draw(1, list(KINDS), len(KINDS) * 100, 10, 4))
    assert set(counts.values()) == {10}


def test_faults_come_in_their_own_intervals() -> None:
    plan = draw(3, ["kill"], 100, 10, 4)
    assert [int(planned.at_s // 10) for planned in plan] == list(range(10))


@pytest.mark.parametrize(
    ("kinds", "length_s", "interval_s", "replicas"),
    [
        ([], 60, 10, 4),
        (["nothing"], 60, 10, 4),
        (["kill"], 0, 10, 4),
        (["kill"], 60, -1, 4),
        (["kill"], 60, 1, 0),
        (["kill"], math.inf, 1, 2),
        (["kill"], math.nan, 1, 2),
        (["kill"], 60, math.nan, 2),
        (["kill"], 3, 10, 2),
        (["kill"], 3600, 1e-9, 2),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    kinds: list[str], length_s: float, interval_s: float, replicas: int
) -> None:
    with pytest.raises(ValueError, match=r"unknown kinds|must be above 0|no fault fits|more than"):
        draw(1, kinds, length_s, interval_s, replicas)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kinds", "nothing"],
        ["--kinds", ","],
        ["--replicas", "1"],
        ["--replicas", "41"],
        ["--names", "all-the-same"],
        ["--names", "job:{index}"],
        ["--length", "nan"],
        ["--interval", "inf"],
        ["--step-time", "-1"],
        ["--baseline", "-5"],
        ["--command", "python 'train.py"],
        ["--command", "no-such-program-anywhere"],
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *arguments])
    assert ended.value.code == WRONG_ARGUMENT
    assert arguments[0] in capsys.readouterr().err


def test_the_command_writes_over_no_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chaos").mkdir()
    assert main(["chaos", "--out", str(tmp_path)]) == WRONG_ARGUMENT
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kinds", "kill-rank,baby-kill"], "kill-rank: replica groups have one rank"),
        (["--length", "3", "--interval", "10"], "no fault fits"),
    ],
)
def test_the_command_says_why_there_is_no_fault_at_all(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *arguments]) == WRONG_ARGUMENT
    assert complaint in capsys.readouterr().err


@pytest.mark.integration
def test_ctrl_c_at_a_terminal_ends_every_process_and_says_so(processes: Processes, tmp_path: Path) -> None:
    job = ["--no-network", "--replicas", "2", "--kinds", "kill", "--out", str(tmp_path / "out")]
    command = processes.start(sys.executable, "-m", "torchft_like.chaos", "chaos", *job)
    command.wait_for_output("faults 00:00:00")
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait(60.0) == 130
    assert "interrupted; every process has been ended" in command.output


Fails = Callable[..., str]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Fails:
    """Return a function that runs a job of a command, which has to fail, and returns what is said of it."""

    def run(command: str, *job: str, first_step_s_max: float = 1e9) -> str:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr("torchft_like.testing.chaos.campaign.FIRST_STEP_S_MAX", first_step_s_max)
        command = f"{sys.executable} {command}"
        assert main(["chaos", "--no-network", "--kinds", "kill", "--command", command, *job]) == FAILED
        return capsys.readouterr().err

    return run


def test_a_command_that_ends_before_it_has_trained_has_failed_at_once(fails: Fails) -> None:
    said = fails("-c 'raise SystemExit(\"no data\")'")
    assert "before a first step of all replica groups r" in said
    assert "ended with 1, which nobody asked for:\nno data" in said


def test_a_command_whose_groups_have_other_names_has_failed_at_once(fails: Fails, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        next(each.text for each in blocks(ROOT / "docs" / "quickstart.md") if each.language == "python")
    )
    said = fails(str(script), "--replicas", "2")
    assert "trains, and the groups are to be called r0, r1 (--names)" in said


def test_a_job_that_does_not_even_start_has_failed_and_its_logs_are_kept(
    fails: Fails, tmp_path: Path
) -> None:
    said = fails("-c 'import time; time.sleep(1e6)'", first_step_s_max=0.5)
    assert "no first step" in said
    [kept] = tmp_path.glob("torchft-like-*")
    assert f"logs are kept in {kept}" in said
    assert list(kept.glob("chaos/*.log"))
