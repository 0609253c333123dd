"""Queues for a test, which are closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.message_queue.queues import Queues


@pytest.fixture
def queues() -> Iterator[Queues]:
    made = Queues()
    try:
        yield made
    finally:
        made.close()
