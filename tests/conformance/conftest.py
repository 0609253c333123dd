"""The fleet that all tests of the suite share."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import pytest

from .fleet import Fleet
from .subjects import PRESENT, Subject


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Start processes with every group under test on first use, and end them with the session."""
    made = Fleet()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(params=PRESENT, ids=attrgetter("name"))
def subject(request: pytest.FixtureRequest) -> Subject:
    """Return one class after the other, of those that this machine has."""
    chosen: Subject = request.param
    return chosen


@pytest.fixture
def world(subject: Subject) -> int:
    """Return the usual number of ranks, or the most that the class can have."""
    return 3 if subject.worlds is None else max(subject.worlds)
