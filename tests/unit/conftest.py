"""What every unit test can ask for: members of groups that are threads of one process, and a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.fake_world import fake_mesh
from tests.unit.process_group.conftest import party, store

__all__ = ["mesh", "party", "store"]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of two ranks, of which this is the second."""
    with fake_mesh(2, rank=1) as mesh:
        yield mesh
