"""One scene for all tests of this folder, because to start it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lighthouse.net import allow_many_files
from tests.managers import PATIENCE_MS
from tests.stress.scene import Scene, running


@pytest.fixture(scope="package")
def scene() -> Iterator[Scene]:
    """Start the servers, and allow files enough for thousands of clients.

    Healthy clients and servers give each other seconds to answer a PING: half of one is little in a flood,
    on a machine that does other things, too.
    """
    allow_many_files()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", str(PATIENCE_MS))
        with running() as found:
            yield found
