"""DTensors in a state: a rank sends its local shard and says how it lies; a peer puts it on its own mesh.

A mesh does not travel: it is process groups of one replica group. The receiver has the same rank in a
replica group of the same form, and finds the mesh in its own state, where that state has a DTensor at the
same place, or else anywhere one on a mesh of that form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchft_like.errors import CheckpointFormatError


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies over its mesh, in values that travel.

    Attributes:
        shape: of the whole tensor.
        mesh_shape, mesh_names: of the mesh; names are empty where the mesh has none.
        placements: one for each dimension of the mesh, as torch prints them.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    placements: tuple[str, ...]

    def __str__(self) -> str:
        names = f" {self.mesh_names}" if self.mesh_names else ""
        return f"{self.shape} placed {', '.join(self.placements)} on a mesh {self.mesh_shape}{names}"


@dataclass(frozen=True)
class Shard:
    """A rank's part of a DTensor, on its way between replica groups."""

    local: Tensor
    layout: Layout


def shard_of(tensor: DTensor) -> Shard:
    """This rank's part, on the memory of the tensor."""
    mesh = tensor.device_mesh
    layout = Layout(
        shape=tuple(tensor.shape),
        mesh_shape=tuple(mesh.mesh.shape),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        placements=tuple(map(str, tensor.placements)),
    )
    with torch.no_grad():
        return Shard(tensor.to_local().detach(), layout)


def shards_in(state: object) -> Iterator[Shard | DTensor]:
    """Every shard and every DTensor in nested containers."""
    if isinstance(state, Shard | DTensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from shards_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from shards_in(value)


def place(state: object, own: object, name: str) -> object:
    """`state` with a DTensor in the place of each Shard.

    Args:
        state: what a peer sent; its containers are changed.
        own: this rank's own state of the same kind.
        name: of the state, for errors.

    Raises:
        CheckpointFormatError: this rank's tensor at a shard's place lies otherwise, or there is none and
            no mesh of that form, or several; names the path.
    """
    return _Placing([tensor for tensor in shards_in(own) if isinstance(tensor, DTensor)]).place(
        state, own, (name,)
    )


class _Placing:
    def __init__(self, own: list[DTensor]) -> None:
        self._meshes: dict[Layout, list[DeviceMesh]] = {}
        for tensor in own:
            alike = self._meshes.setdefault(_mesh_of(shard_of(tensor).layout), [])
            if tensor.device_mesh not in alike:
                alike.append(tensor.device_mesh)
        self._placements: dict[str, Placement] = {str(p): p for tensor in own for p in tensor.placements}

    def place(self, value: object, own: Any, path: tuple[object, ...]) -> object:
        if isinstance(value, Shard):
            return self._tensor(value, own, path)
        if isinstance(value, dict):
            for key in value:
                beside = own.get(key) if isinstance(own, dict) else None
                value[key] = self.place(value[key], beside, (*path, key))
        elif isinstance(value, list | tuple):
            beside = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
            items = [self.place(item, beside[i], (*path, i)) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _tensor(self, shard: Shard, own: object, path: tuple[object, ...]) -> DTensor:
        layout = shard.layout
        if isinstance(own, DTensor):
            here = shard_of(own)
            if (here.layout, here.local.shape) != (layout, shard.local.shape):
                raise CheckpointFormatError(
                    f"{_show(path)} is {here.layout} here, and {layout} in the state to load: every replica "
                    "group must shard the same model over as many ranks"
                )
            return _tensor(shard, own.device_mesh, own.placements, own.stride())
        meshes = self._meshes.get(_mesh_of(layout), [])
        placements = [self._placements[text] for text in layout.placements if text in self._placements]
        if len(meshes) > 1:
            raise CheckpointFormatError(
                f"{_show(path)} is {layout} in the state to load, and {len(meshes)} meshes here have that "
                "form: give their dimensions of different names, or fill this place before the peer's "
                "state is loaded"
            )
        if not meshes or len(placements) < len(layout.placements):
            raise CheckpointFormatError(
                f"{_show(path)} is {layout} in the state to load; this rank's own state has no DTensor "
                "there, and none that lies so"
            )
        return _tensor(shard, meshes[0], placements, torch.empty(layout.shape, device="meta").stride())


def _tensor(
    shard: Shard, mesh: DeviceMesh, placements: Sequence[Placement], stride: tuple[int, ...]
) -> DTensor:
    shape = torch.Size(shard.layout.shape)
    return DTensor.from_local(shard.local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh_of(layout: Layout) -> Layout:
    return replace(layout, shape=(), placements=())


def _show(path: tuple[object, ...]) -> str:
    name, *keys = path
    return str(name) + "".join(f"[{key!r:.80}]" for key in keys)
