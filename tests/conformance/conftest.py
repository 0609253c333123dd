"""The fleet that all tests of the suite share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fleet import Fleet
from .subjects import SUBJECTS, Subject


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Processes with every group under test; started on first use, ended with the session."""
    made = Fleet()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """One class after the other."""
    chosen: Subject = request.param
    if not chosen.exists:
        pytest.skip(f"{chosen.name} needs a {chosen.device} device")
    return chosen


@pytest.fixture
def world(subject: Subject) -> int:
    """The usual number of ranks, for the classes that can have it."""
    return 3 if subject.worlds is None else max(subject.worlds)
