"""DTensors in a state: a rank sends its local shard and its layout; a peer puts the shard on its own mesh.

A mesh is not sent: it consists of process groups of one replica group. The sender numbers its meshes. The
receiver has the same rank in a replica group of the same form, and learns which of its own meshes a number
stands for from the places where its own state has a DTensor too. A number that occurs at none of them stands
for the only mesh of that form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from torchft_like.errors import CheckpointFormatError
from torchft_like.plain_data import STATES, Layout, Shard, Sheet, Unfit, shown, write_other_state

if TYPE_CHECKING:  # to load it takes half a second, which a state without DTensors is spared
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Path: TypeAlias = "tuple[object, ...]"


def write_dtensor(value: DTensor, sheet: Sheet, depth: int) -> None:
    """Write a DTensor as this rank's shard of it; a writer of `STATE_SCHEMA`."""
    if any(placement.is_partial() for placement in value.placements):
        raise Unfit(
            f"is a DTensor placed {', '.join(map(str, value.placements))}: partial values do not travel; "
            "redistribute it first"
        )
    if is_cut_over_replicas(value):
        raise Unfit(f"is a DTensor that {CUT_OVER_REPLICAS}")
    sheet.write(Shard(local_part(value), layout_of(value), sheet.number_of(value.device_mesh)), depth)


def _write_other(value: object, sheet: Sheet, depth: int) -> None:
    if is_dtensor(value) and type(value) is _dtensor_class():
        write_dtensor(value, sheet, depth)
    else:
        write_other_state(value, sheet, depth)


STATE_SCHEMA = replace(STATES, other=_write_other)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, of which there is none before torch's module of them is loaded."""
    return isinstance(value, _dtensor_class())


def _dtensor_class() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_cut_over_replicas(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded over the elastic dimension of its mesh."""
    elastic_dim = getattr(tensor.device_mesh, "_elastic_dim", None) if is_dtensor(tensor) else None
    return elastic_dim is not None and not tensor.placements[elastic_dim].is_replicate()  # type: ignore[attr-defined]


CUT_OVER_REPLICAS = (
    "is sharded over the elastic dimension of its mesh, and a part of it is gone with each replica group: "
    "give fully_shard a mesh of two dimensions, the elastic one first (it shards over the other)"
)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, or of this rank's part of a DTensor, as a plain tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def layout_of(tensor: DTensor) -> Layout:
    return _form_of(tensor.device_mesh, tuple(tensor.shape), tuple(map(str, tensor.placements)))


def _form_of(mesh: DeviceMesh, shape: tuple[int, ...] = (), placements: tuple[str, ...] = ()) -> Layout:
    """Return the layout of tensors on a mesh; without shape and placements it stands for all of them."""
    return Layout(shape, tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), placements)


def shards_in(state: object) -> list[Shard | DTensor]:
    """Return every shard and every DTensor in nested containers."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Shard) or is_dtensor(leaf)]


def like_shard_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that lies as `tensor` does, with this shard; `local` if `tensor` is a plain one."""
    if not is_dtensor(tensor):
        return local
    shard = Shard(local, layout_of(tensor), 0)
    return _tensor(shard, tensor.device_mesh, tensor.placements, tensor.stride())


def place(state: object, own: object) -> Any:
    """Return `state` with a DTensor in the place of each Shard.

    Args:
        state: the state that a peer sent; its containers are changed.
        own: this rank's own state, of the same form.

    Raises:
        CheckpointFormatError: this rank's tensor at a shard's place has another layout, or there is none and
          no mesh of that form, or several; the text names the path.
    """
    placing = _Placing([tensor for tensor in shards_in(own) if is_dtensor(tensor)])
    state = _replace(state, own, (), placing.beside)
    return _replace(state, own, (), placing.elsewhere)


def _replace(value: object, own: Any, path: Path, leaf: Callable[[Shard, object, Path], object]) -> object:
    """Replace each Shard in `value` by `leaf(shard, value of the own state at that place, path)`."""
    if isinstance(value, Shard):
        return leaf(value, own, path)
    if isinstance(value, dict):
        for key in value:
            beside = own.get(key) if isinstance(own, dict) else None
            value[key] = _replace(value[key], beside, (*path, key), leaf)
    elif isinstance(value, list | tuple):
        beside = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
        items = [_replace(item, beside[i], (*path, i), leaf) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        make: Callable[[list[object]], object] = getattr(value, "_make", type(value))  # of a named tuple
        return make(items)
    return value


class _Placing:
    """The meshes of this rank's own state, by their form and by the sender's numbers."""

    def __init__(self, own: list[DTensor]) -> None:
        self._by_form: dict[Layout, dict[DeviceMesh, None]] = {}
        self._by_number: dict[tuple[int, Layout], dict[DeviceMesh, None]] = {}
        for tensor in own:
            self._by_form.setdefault(_form_of(tensor.device_mesh), {})[tensor.device_mesh] = None
        self._placements: dict[str, Placement] = {str(p): p for tensor in own for p in tensor.placements}

    def beside(self, shard: Shard, own: object, path: Path) -> Shard | DTensor:
        """Place a shard where this rank's own state has a DTensor, and learn the number of its mesh."""
        if not is_dtensor(own):
            return shard
        layout = layout_of(own)
        local = local_part(own)
        if (layout, local.shape) != (shard.layout, shard.local.shape):
            raise CheckpointFormatError(
                f"{_shown(path)} is {layout} here, and {shard.layout} in the state to load: every "
                "replica group must shard the same model over as many ranks"
            )
        self._by_number.setdefault((shard.mesh, _form_of(own.device_mesh)), {})[own.device_mesh] = None
        if 0 != shard.local.data_ptr() == local.data_ptr() and not own.requires_grad:  # it has arrived there
            return own
        return _tensor(shard, own.device_mesh, own.placements, own.stride())

    def elsewhere(self, shard: Shard, _: object, path: Path) -> DTensor:
        """Place a shard where this rank's own state has no DTensor."""
        layout, form = shard.layout, replace(shard.layout, shape=(), placements=())
        meshes = list(self._by_number.get((shard.mesh, form)) or self._by_form.get(form, {}))
        placements = [self._placements[text] for text in layout.placements if text in self._placements]
        if len(meshes) > 1:
            raise CheckpointFormatError(
                f"{_shown(path)} is {layout} in the state to load, and {len(meshes)} meshes here have that "
                "form: register a state that has all of them with it, give their dimensions of different "
                "names, or fill this place before the peer's state is loaded"
            )
        if not meshes or len(placements) < len(layout.placements):
            raise CheckpointFormatError(
                f"{_shown(path)} is {layout} in the state to load; this rank's own state has no DTensor "
                "there, and none that lies so"
            )
        return _tensor(shard, meshes[0], placements, torch.empty(layout.shape, device="meta").stride())


def _shown(path: Path) -> str:
    return shown(path, "the state")


def _tensor(
    shard: Shard, mesh: DeviceMesh, placements: Sequence[Placement], stride: tuple[int, ...]
) -> DTensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    shape = torch.Size(shard.layout.shape)
    return DTensor.from_local(shard.local, mesh, placements, run_check=False, shape=shape, stride=stride)
