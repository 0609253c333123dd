"""Gangs whose members live in threads of one process, over real Gloo groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from tests.unit.process_group.conftest import Party
from torchft_like.gang import ProcessGroupGang
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

T = TypeVar("T")
CPU = torch.device("cpu")


class Crew:
    """The gangs of all members, in the order of their ranks."""

    def __init__(self, party: Party, gangs: list[ProcessGroupGang]) -> None:
        self._party = party
        self.gangs = gangs

    def together(self, act: Callable[[ProcessGroupGang], T]) -> list[T]:
        """Run the same on every member at once."""
        return self._party.together(self.gangs, lambda _, gang: act(gang))

    def outcomes(self, act: Callable[[ProcessGroupGang], T]) -> list[T | Exception]:
        """Run the same as `together` does; return the results or errors."""

        def caught(gang: ProcessGroupGang) -> T | Exception:
            try:
                return act(gang)
            except Exception as error:  # noqa: BLE001 - it is what the test is about
                return error

        return self.together(caught)


MakeCrew = Callable[..., Crew]


@pytest.fixture
def crew(party: Party) -> MakeCrew:
    """Return a function that makes gangs: `crew(3)`, `crew(2, lambda: ProcessGroupGloo(1))`."""

    def make(size: int, group: Callable[[], ProcessGroup] = lambda: ProcessGroupGloo(30)) -> Crew:
        return Crew(party, [ProcessGroupGang(pg, CPU) for pg in party.meet(size, group)])

    return make
