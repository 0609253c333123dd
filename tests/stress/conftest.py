"""One scene for all tests of this folder, because to start it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lighthouse.net import allow_many_files
from tests.stress.scene import Scene, running


@pytest.fixture(scope="session")
def scene() -> Iterator[Scene]:
    """Start the servers, and allow files enough for thousands of clients."""
    allow_many_files()
    with running() as found:
        yield found
