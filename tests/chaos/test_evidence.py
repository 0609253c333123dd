"""What counts as felt, and how recoveries are measured, on histories made by hand."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from tests.chaos.histories import JOB, Story, killed_and_back
from torchft_like.testing.chaos.engine import features, usable
from torchft_like.testing.chaos.evidence import FELT, Injection, judge
from torchft_like.testing.chaos.injectors import INJECTORS
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import KINDS


def injection_of(story: Story, kind: str, *victims: str, **details: float | str) -> Injection:
    return Injection(0, kind, story.now, story.now + 2.0, victims, details)


def test_a_kill_is_felt_by_the_loss_that_survivors_were_told_of() -> None:
    story, injection = killed_and_back()
    assert "loss of r2" in judge(injection, story.log, JOB, story.now).felt


def test_a_kill_that_left_no_trace_is_not_felt() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "kill", "r2")
    story.steps(20)
    assert judge(injection, story.log, JOB, story.now).felt == ""


def test_a_loss_that_only_the_victim_wrote_down_is_no_evidence() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "stop", "r2")
    story.event("loss", "r2", member="r2:1", reason="-").steps(5)
    assert not judge(injection, story.log, JOB, story.now).felt


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


def test_survivors_that_never_commit_again_have_no_recovery() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "kill", "r2")
    for name in ("r0", "r1"):
        story.event("loss", name, member="r2:1", reason="-")
    outcome = judge(injection, story.log, JOB, story.now + 60)
    assert outcome.felt
    assert outcome.recovery_s is None
    assert outcome.whole_s is None


def test_a_fault_is_not_credited_with_what_the_next_one_did() -> None:
    story, injection = killed_and_back()
    early = replace(injection, time=injection.time - 0.3)
    assert not judge(early, story.log, JOB, until=injection.time).felt


def test_a_lighthouse_outage_is_felt_by_who_lost_it_and_came_back() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "lighthouse-kill")
    story.event("disconnected", "r0", address="-", reason="-")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.event("connected", "r0", address="-").steps(3)
    assert judge(injection, story.log, JOB, story.now).felt


@pytest.mark.parametrize("kind", ["truncate", "bit-flip"])
def test_a_spoilt_transfer_is_felt_only_when_it_was_refused(kind: str) -> None:
    story = Story().steps(5)
    injection = injection_of(story, kind, "r2")
    story.note("spoilt", "r0", how=kind)
    assert not judge(injection, story.log, JOB, story.now).felt
    story.event("heal", "r2", refused=[])
    assert not judge(injection, story.log, JOB, story.now).felt
    gone = deepcopy(story)
    gone.event("error", "r2", reason="CheckpointFormatError: state of step 5 could not be fetched from -")
    assert judge(injection, gone.log, JOB, gone.now).felt
    story.event("heal", "r2", refused=["http://10.0.0.1:4711: the stream is truncated"])
    assert judge(injection, story.log, JOB, story.now).felt


def test_a_full_disk_is_felt_by_a_checkpoint_that_failed_for_it() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "disk-full")
    story.note("checkpoint_failed", "r1", errno="EACCES", reason="-")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.note("checkpoint_failed", "r1", errno="ENOSPC", reason="No space left on device")
    assert judge(injection, story.log, JOB, story.now).felt


@pytest.mark.parametrize("kind", ["baby-kill", "baby-stop"])
def test_a_backend_that_is_hit_is_felt_by_an_error_if_there_was_one_to_hit(kind: str) -> None:
    story = Story().steps(5)
    nothing, hit = (injection_of(story, kind, "r2", backends=count) for count in (0, 1))
    assert not judge(hit, story.log, JOB, story.now).felt
    story.event("error", "r2", reason="the subprocess is gone")
    assert not judge(nothing, story.log, JOB, story.now).felt
    assert judge(hit, story.log, JOB, story.now).felt


def test_every_kind_that_is_offered_leaves_a_survivor() -> None:
    kinds, skipped = usable(list(KINDS), features(JobSettings(replicas=2), network=False))
    assert "fd-exhaustion" in skipped
    assert "kill-half" in kinds


def test_exhausted_descriptors_are_felt_by_the_victim_alone() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "fd-exhaustion", "r1")
    story.event("error", "r0", reason="[Errno 24] Too many open files")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.event("error", "r1", reason="[Errno 24] Too many open files")
    assert judge(injection, story.log, JOB, story.now).felt


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


def test_a_step_that_is_given_up_is_felt_by_another_replica() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "give-up", "r2")
    story.event("error", "r2", reason="-").note("given_up", "r2")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.event("abort", "r0", reason="given up by r2:1: it begins another step")
    assert judge(injection, story.log, JOB, story.now).felt


@pytest.mark.parametrize("members", [["r2:1"], ["r1:1"], ["r1:1", "r2:1"]])
def test_a_sick_replica_is_felt_when_it_alone_is_left_out_and_the_others_go_on(members: list[str]) -> None:
    story = Story().steps(5)
    injection = injection_of(story, "sick", "r2")
    story.event("left_out", members=members, reasons=["-"], source="lighthouse")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.new_quorum("r2").steps(5)
    assert bool(judge(injection, story.log, JOB, story.now).felt) is (members == ["r2:1"])


def test_a_stranger_is_felt_when_it_is_refused_and_nobody_notices() -> None:
    story = Story().steps(5)
    injection = injection_of(story, "foreign", stranger="stranger")
    assert not judge(injection, story.log, JOB, story.now).felt
    story.event("refused", member="stranger:1", reason="wider", source="lighthouse").steps(5)
    assert judge(injection, story.log, JOB, story.now).felt
    story.event("error", "r0", reason="-")
    assert not judge(injection, story.log, JOB, story.now).felt


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
    assert set(KINDS) == set(INJECTORS) >= set(FELT)
