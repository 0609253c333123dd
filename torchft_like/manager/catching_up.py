"""How the script's steps are taken again by a rank that catches up beside the steps (`core/catch_up.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

STEPS_KEPT_MAX = 8


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
