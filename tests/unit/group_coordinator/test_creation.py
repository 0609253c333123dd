"""Making the groups of a coordinator, in a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator import GroupCoordinator


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("torchft-dummy", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "failure", [RuntimeError("no device group"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_a_device_group_that_cannot_be_made_leaves_no_group_behind(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    make, known = dist.new_group, set(c10d._world.pg_map)
    made: list[Any] = []

    def new_group(*arguments: Any, **more: Any) -> Any:
        if more["group_desc"].endswith("/device"):
            raise failure
        made.append(make(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises((GroupCoordinatorError, KeyboardInterrupt)):
        GroupCoordinator([[0]], 0, "torchft-dummy", True)
    assert len(made) == 1
    assert set(c10d._world.pg_map) == known
