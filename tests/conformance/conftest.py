"""The fleet that all tests of the suite share."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import pytest

from .fleet import Fleet
from .subjects import PRESENT, Subject


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Processes with every group under test; started on first use, ended with the session."""
    made = Fleet()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(params=PRESENT, ids=attrgetter("name"))
def subject(request: pytest.FixtureRequest) -> Subject:
    """One class after the other, of those that this machine has."""
    chosen: Subject = request.param
    return chosen


@pytest.fixture
def world(subject: Subject) -> int:
    """The usual number of ranks, for the classes that can have it."""
    return 3 if subject.worlds is None else max(subject.worlds)
