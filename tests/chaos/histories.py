"""Logs of runs that never took place: made by hand, each with exactly one thing wrong, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchft_like.testing.chaos.campaign import Run
from torchft_like.testing.chaos.kinds import Injection, judge
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.invariants import Commit
from torchft_like.testing.log import Log

NAMES = ("r0", "r1", "r2")
MEMBERS = frozenset(f"{name}:1" for name in NAMES)
STEP_S = 0.1
JOB = JobSettings(replicas=len(NAMES))


class Story:
    """Writes a log step by step: every replica commits that is not away."""

    def __init__(self) -> None:
        self.log = Log()
        self.now = 1000.0
        self.step = 0
        self.quorum_id = 7
        self.away: set[str] = set()

    def steps(self, count: int, *, took_s: float = STEP_S) -> Story:
        """Let every replica that is present commit `count` steps, each in `took_s` seconds."""
        present = [name for name in NAMES if name not in self.away]
        members = frozenset(f"{name}:1" for name in present)
        for _ in range(count):
            began, self.now, self.step = self.now, self.now + took_s, self.step + 1
            self.log.commits += [self._commit(name, members, began) for name in present]
        return self

    def event(self, kind: str, name: str = "", **fields: Any) -> Story:
        """Add one event of the replica `name`, or of the lighthouse if it is ""."""
        self.now += 0.001
        replica_id = f"{name}:1" if name else ""
        record = {"kind": kind, "time": self.now, "replica_id": replica_id, "group_rank": 0, **fields}
        self.log.events.append(record)
        return self

    def note(self, kind: str, name: str, **fields: Any) -> Story:
        """Add a line to the journal of the worker `name`."""
        self.now += 0.001
        self.log.notes.append({"kind": kind, "time": self.now, "replica": name, **fields})
        return self

    def new_quorum(self, *away: str) -> Story:
        """Begin a new quorum: these replicas are away from now on, and no others."""
        self.away = set(away)
        self.quorum_id += 1
        return self

    def _commit(self, name: str, members: frozenset[str], began: float) -> Commit:
        index, ledger = NAMES.index(name), sum(2 ** NAMES.index(m.partition(":")[0]) for m in members)
        return Commit(
            time=self.now,
            replica_id=f"{name}:1",
            group_rank=0,
            step=self.step,
            quorum_id=self.quorum_id,
            members=members,
            participants=len(members),
            participating=True,
            index=index,
            ledger=ledger,
            ledger_steps=ledger * (self.step - 1),
            digest=f"{self.step:x}",
            began=began,
        )


def killed_and_back() -> tuple[Story, Injection]:
    """Let r2 die after ten steps: the others lose it and go on, it heals and is back."""
    story = Story().steps(10)
    injection = Injection(0, "kill", story.now + 0.01, story.now + 0.01, ("r2",))
    story.now += 0.05
    for name in ("r0", "r1"):
        story.event("loss", name, member="r2:1", reason="its connection ended")
    story.new_quorum("r2").steps(5)
    story.event("heal", "r2", source="r0:1").new_quorum().steps(5)
    return story, injection


def run_of(story: Story, *injections: Injection) -> Run:
    """Return a run with this log and these faults, judged."""
    run = Run(JobSettings(replicas=len(NAMES)), length_s=3600.0, planned=len(injections))
    run.log, run.began, run.ended = story.log, 1000.0 - 0.001, story.now
    run.outcomes = [judge(injection, story.log, JOB, story.now) for injection in injections]
    return run


def diverged(story: Story, at: int) -> Story:
    """Give one replica another digest after the commit with this number."""
    story.log.commits[at] = replace(story.log.commits[at], digest="another")
    return story
