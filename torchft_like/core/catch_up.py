"""The steps that a rank keeps while a peer's state is on its way to it: the pure part of catching up.

A rank that catches up lets the others go on. It takes part in their steps with zeros, keeps the averages that
it receives as they do, and steps no optimizer. When the state has come, it loads that and takes the kept
steps again, in their order and each once: from the same state with the same averages come the same bits.

INVARIANT: the state that is fetched, followed by the kept steps, is the state of version `reached`. It holds
because of three rules.

* The fetched state is of the version that the up-to-date members had when the fetch began.
* A step is kept if nothing went wrong in it here, so that the averages are final. What the step led to is
  then named as those that committed it name it: by its number and its quorum.
* Whether others have committed it is known in the next quorum only, by the versions of its members. If the
  newest is not `reached`, which happens when a member dies at the end of a step, everything is dropped, and
  this rank heals as if it had just come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

STEPS_KEPT_MAX = 8


class Version(NamedTuple):
    """The version of a state: its step, and the quorum in which that was committed."""

    step: int
    commit_quorum_id: int


NOWHERE = Version(0, 0)  # no step leads there


class KeptStep(NamedTuple):
    """A step that is to be taken again: its quorum, how many participants it had, and their averages."""

    quorum_id: int
    participants: int
    averages: Any


class CatchUp:
    """The steps since a version whose state is on its way.

    Attributes:
        start: the version of the state that is fetched.
        kept: the steps since then.
        has_fetched: whether every rank of this replica group has the state, so that all load it together.
    """

    def __init__(self, start: Version) -> None:
        self.start = start
        self.kept: list[KeptStep] = []
        self.has_fetched = False

    @property
    def reached(self) -> Version:
        """The version to which the fetched state and the kept steps lead."""
        quorum_id = self.kept[-1].quorum_id if self.kept else self.start.commit_quorum_id
        return Version(self.start.step + len(self.kept), quorum_id)


class Replay(Protocol):
    """How a script's committed steps are taken again, on the training thread; `GradientReplay` is one.

    What `take` does to the state is all that a committed step does to it, given what `keep` returned in that
    step.

    One that has `changed_by_steps`, too, which lists tensors of the state that nothing but such a step
    changes, lets a source copy them while the script computes (`checkpointing/copy_ahead.py`): on another
    thread, which also calls it.
    """

    def keep(self) -> object:
        """Return a copy of what the step would be taken with, not None; called instead of the step."""
        ...

    def take(self, steps: Sequence[object]) -> None:
        """Take steps again, in this order, with what `keep` returned in each.

        The present step, which follows, is then taken by the script itself: its gradients are left as they
        are.
        """
        ...
