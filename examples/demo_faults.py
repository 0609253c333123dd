"""What the demo does to a replica and when, and what can be measured of it afterwards.

Everything is decided by observed steps, never by a clock: a fault strikes when the job has come so
far, and the victim is brought back when the others have gone on without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from demo_records import Commit

Kind = Literal["SIGKILL", "SIGSTOP"]
Act = Literal["strike", "revive"]
Commits = Mapping[int, Sequence[Commit]]  # of each replica, oldest first

NEVER = float("inf")


@dataclass
class Fault:
    """One fault and what came of it. Times are seconds since the Unix epoch, `NEVER` until they come."""

    kind: Kind
    victim: int
    at_step: int  # strike once everybody has committed this many
    away_steps: int  # bring the victim back once the others have committed so many more
    struck: float = NEVER
    recovered: float = NEVER  # every survivor has committed a step in a quorum without the victim
    revived: float = NEVER
    returned: float = NEVER  # the victim has committed a step again

    def next_act(self, commits: Commits, at: float) -> Act | None:
        """Return the act that is due now, if any; the caller carries it out and then calls `did`."""
        self._measure(commits)
        survivors = [replica for replica in commits if replica != self.victim]
        if self.struck == NEVER:
            return "strike" if _slowest(commits, commits) >= self.at_step else None
        if self.revived == NEVER and self.recovered < at:
            gone_on = _slowest(commits, survivors) - _last_step_before(commits, self.struck)
            return "revive" if gone_on >= self.away_steps else None
        return None

    def did(self, act: Act, at: float) -> None:
        """Note that `act` was carried out at this time."""
        if act == "strike":
            self.struck = at
        else:
            self.revived = at

    @property
    def over(self) -> bool:
        """Whether the victim is back and trains."""
        return self.returned < NEVER

    def _measure(self, commits: Commits) -> None:
        """Times are measured by quorum, not by the clock alone: a step may have been all but
        committed with the victim's help when the fault struck, and proves nothing."""
        if self.struck == NEVER:
            return
        old_quorum = _last_quorum_before(commits, self.struck)
        new = {
            replica: [commit for commit in own if commit.quorum_id > old_quorum]
            for replica, own in commits.items()
        }
        survivors = [own for replica, own in new.items() if replica != self.victim]
        self.recovered = max(_first_time(own, self.struck) for own in survivors)
        if self.revived < NEVER:
            self.returned = _first_time(new[self.victim], self.revived)


def plan(replicas: int, steps: int) -> list[Fault]:
    """Return a stop after a fifth of the steps and a kill after half of them, at different replicas.

    In this order because the stopped one is back within a second or two on any machine, while one
    that was killed has to start Python and import torch; the job waits for the last one to be back.
    """
    away = max(3, steps // 15)
    return [
        Fault("SIGSTOP", 1 % replicas, steps // 5, away),
        Fault("SIGKILL", 2 % replicas, steps // 2, away),
    ]


def _slowest(commits: Commits, replicas: Collection[int]) -> int:
    return min((commits[replica][-1].step if commits[replica] else 0) for replica in replicas)


def _first_time(commits: Sequence[Commit], after: float) -> float:
    return next((commit.time for commit in commits if commit.time > after), NEVER)


def _last_quorum_before(commits: Commits, time: float) -> int:
    return max((c.quorum_id for own in commits.values() for c in own if c.time <= time), default=-1)


def _last_step_before(commits: Commits, time: float) -> int:
    return max((c.step for own in commits.values() for c in own if c.time <= time), default=0)
