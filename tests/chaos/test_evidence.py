"""What counts as felt, and how recoveries are measured, on histories made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    assert set(KINDS) == set(INJECTORS) >= set(FELT)
