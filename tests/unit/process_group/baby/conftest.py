"""Fork servers of Baby groups that have torch loaded when they start: the tests here start several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.standby import start_loaded
from torchft_like.process_group.baby import fork_pool


@pytest.fixture(autouse=True, scope="package")
def _servers_that_have_torch_loaded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_pool, "_start_server", start_loaded)
        yield
        fork_pool.fork_pool.stop()  # before those who fork for it
