"""One scene for all tests of this folder: to start it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lighthouse.net import allow_many_files
from tests.stress.scene import Scene, running


@pytest.fixture(scope="session")
def scene() -> Iterator[Scene]:
    """The servers, and files enough for thousands of clients."""
    allow_many_files()
    with running() as found:
        yield found
