"""Which callers in C++ reach a group that is written in Python: exactly those that torch has a bridge for.

torch's `PyProcessGroup` calls Python for the methods below (`BRIDGED`); DDP's reducer and functional
collectives use no others. For the rest, and for `torch.ops.c10d.*`, C++ goes to the group's backend.
From torch 2.14 on a registered group has one, which leads back to it. Any other group, and every group
before, has none: the caller gets a RuntimeError, not a wrong result. Python callers reach every method.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.collectives import BY_NAME

from .methods import ARGUMENTS, METHODS
from .scene import Scene

BRIDGED = {
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "barrier",
}
HAS_PYTHON_BACKENDS = hasattr(Backend, "get_error")  # from torch 2.14 on, which has more bridges, too
if HAS_PYTHON_BACKENDS:
    BRIDGED |= {"reduce", "_allgather_base", "gather", "scatter", "_reduce_scatter_base", "alltoall"}


@pytest.fixture
def group() -> ProcessGroupDummy:
    return ProcessGroupDummy(0, 1)


@pytest.mark.parametrize("name", METHODS)
def test_c_plus_plus_reaches_the_method_or_says_that_it_cannot(group: ProcessGroupDummy, name: str) -> None:
    row = BY_NAME[name]
    arguments = ARGUMENTS[row.name](Scene(group, 0, 1))
    call_as_c_plus_plus = getattr(dist.ProcessGroup, name)
    if row.name in BRIDGED:
        call_as_c_plus_plus(group, *arguments)
        assert group.calls[row.name] == 1
    else:
        with pytest.raises(RuntimeError, match=r"No backend type associated|default backend"):
            call_as_c_plus_plus(group, *arguments)
        assert not group.calls


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="no Python class can be a backend of this torch")
@pytest.mark.parametrize("name", METHODS)
def test_c_plus_plus_reaches_every_method_of_a_registered_group(group: ProcessGroupDummy, name: str) -> None:
    group.register(f"called-from-c-plus-plus-{name}")
    try:
        getattr(dist.ProcessGroup, name)(group, *ARGUMENTS[BY_NAME[name].name](Scene(group, 0, 1)))
        assert group.calls[BY_NAME[name].name] == 1
    finally:
        group.unregister()


def test_operators_reach_no_group_that_is_written_in_python(group: ProcessGroupDummy) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated"):
        torch.ops.c10d.barrier(torch.zeros(1), group.boxed(), [], True, -1)
