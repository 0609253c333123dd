"""Helpers that the tests of the check of collectives have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

from .conftest import Party


def checking(timeout: float = 60) -> ProcessGroup:
    return ProcessGroupGloo(timeout, check_collectives=True)


def summed(group: ProcessGroup, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def assert_goes_on(party: Party, groups: list[ProcessGroup]) -> None:
    assert party.together(groups, lambda _, group: summed(group)) == [float(len(groups))] * len(groups)


def error_of(act: Callable[[], Any]) -> Exception:
    with pytest.raises(RuntimeError) as raised:
        act()
    return raised.value


def checking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchft-checking")]
