"""torchft 0.2.0 in an environment of its own, and processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peer import PeerUnavailableError, peer_python
from benchmarks.processes import Fleet


@pytest.fixture(scope="session")
def peer() -> Path:
    """The interpreter of the peer's environment; the test is skipped where it cannot be installed."""
    try:
        return peer_python()
    except PeerUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as running:
        yield running
