"""An environment for every integration test that does not depend on the shell that runs the tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.managers import lighthouse_here
from tests.stores import serve_store
from tests.unit.process_group.conftest import party
from torchft_like import LighthouseServer

__all__ = ["party"]

OURS = re.compile(r"TORCHFT_.*|TORCHELASTIC_.*|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)")


@pytest.fixture(autouse=True)
def _without_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove every variable that the project reads from the inherited environment."""
    for variable in filter(OURS.fullmatch, list(os.environ)):
        monkeypatch.delenv(variable)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    """Yield a lighthouse in this process, for a job of two replicas or more."""
    with lighthouse_here() as server:
        yield server


@pytest.fixture
def store() -> TCPStore:
    """Return a store that outlives every rank of the test."""
    return serve_store()
