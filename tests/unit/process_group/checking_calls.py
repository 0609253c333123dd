"""Helpers that the tests of the check of collectives have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group.checking import Check

from .conftest import Party, allreduced


def checking(timeout: float = 60, check: Check = True) -> ProcessGroup:
    return ProcessGroupGloo(timeout, check_collectives=check)


def assert_goes_on(party: Party, groups: list[ProcessGroup]) -> None:
    assert party.together(groups, lambda _, group: allreduced(group)) == [float(len(groups))] * len(groups)


def error_of(act: Callable[[], Any]) -> Exception:
    with pytest.raises(RuntimeError) as raised:
        act()
    return raised.value


def checking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchft-checking")]
