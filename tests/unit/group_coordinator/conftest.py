"""Elastic coordinators for tests that ask for them; none is lost for a late answer of a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.group_coordinator.elastic_crew import PATIENCE_MS, Crew


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", PATIENCE_MS)


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.end()
