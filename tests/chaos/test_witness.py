"""What a witness takes for a commit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lighthouse.events import Event
from torchft_like.testing.journal import Journal, Witness


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
