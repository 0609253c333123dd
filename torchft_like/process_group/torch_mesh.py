"""The parts of `torch.distributed.DeviceMesh` without a public interface that the elastic mesh needs.

A DeviceMesh is a layout (size and stride of each dimension) over a list of ranks, and the names of its
dimensions' process groups. This is the only module that knows how torch stores them; torch 2.11, 2.12 and
2.13 differ in that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh

MeshLayout: Any = _mesh_layout._MeshLayout


def insert_dimension(mesh: DeviceMesh | None, dim: int) -> dict[str, Any]:
    """Return the arguments for DeviceMesh that describe `mesh` with one more dimension, of size one.

    The ranks are those of the mesh that `mesh` was sliced from: torch joins two meshes (FSDP does, with
    that of tensor parallelism) only where these are equal. Without a mesh, the only rank is the caller's.
    """
    if mesh is None:
        return {"_layout": _unit_layout(1), "_rank_map": torch.tensor([dist.get_rank()], dtype=torch.int)}
    layout: Any = mesh._layout
    return {
        "_layout": layout.splice(dim, dim, _unit_layout(_stride(layout, dim))),
        "_rank_map": mesh._rank_map,
    }


def set_groups(mesh: DeviceMesh, groups: list[dist.ProcessGroup]) -> None:
    """Give the dimensions of `mesh` these groups, in their order."""
    names = [group.group_name for group in groups]
    mesh._dim_group_names = names
    mesh._pg_registry.update(zip(names, groups, strict=True))


def _unit_layout(stride: int) -> Any:
    if hasattr(MeshLayout, "from_sizes_strides"):  # in these versions a dimension of size one has no stride
        return MeshLayout.from_sizes_strides((1,), (1,))
    return MeshLayout((1,), (stride,))


def _stride(layout: Any, dim: int) -> int:
    """Return the stride of a dimension that is unsqueezed from a tensor: torch 2.11 wants strides that do not
    grow.
    """
    if dim == len(layout):
        return 1
    size, stride = next(iter(layout[dim].sizes_and_strides), (1, 1))
    return int(size * stride)
