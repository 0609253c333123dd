"""Fixtures: each torchft in an environment of its own, and processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.processes import Fleet
from benchmarks.systems import PEERS, System
from tools.environments import UnavailableError


@pytest.fixture(scope="session", params=PEERS, ids=lambda system: str(system.peer))
def peer(request: pytest.FixtureRequest) -> System:
    """Return torchft at a pinned version; the test is skipped where it cannot be installed."""
    system: System = request.param
    try:
        _ = system.interpreter
    except UnavailableError as error:
        pytest.skip(str(error))
    return system


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as running:
        yield running
