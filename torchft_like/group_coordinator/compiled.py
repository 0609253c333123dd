"""Collectives as operators of torch, so that `torch.compile` keeps a graph in one piece.

A graph cannot hold a coordinator. It holds the coordinator's name, by which the operator finds it when it
runs, and, if the shape of a result depends on it, the number of members: torch compiles anew if that has
changed. An operator returns new tensors and changes none, as torch demands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchft_like.communicator.sizes import checked_dim, with_rows
from torchft_like.errors import GroupCoordinatorError


@torch.library.custom_op("torchft_like::all_reduce", mutates_args=())
def all_reduce(tensor: Tensor, coordinator: str) -> Tensor:
    """Call `GroupCoordinator.all_reduce`."""
    return _named(coordinator)._all_reduce_out_place(tensor)  # type: ignore[no-any-return]


@torch.library.custom_op("torchft_like::all_gather", mutates_args=())
def all_gather(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    """Call `GroupCoordinator.all_gather`."""
    return _with_members(coordinator, world_size)._all_gather_out_place(tensor, dim)  # type: ignore[no-any-return]


@torch.library.custom_op("torchft_like::reduce_scatter", mutates_args=())
def reduce_scatter(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    """Call `GroupCoordinator.reduce_scatter`."""
    return _with_members(coordinator, world_size)._reduce_scatter_out_place(tensor, dim)  # type: ignore[no-any-return]


@all_reduce.register_fake
def _(tensor: Tensor, coordinator: str) -> Tensor:
    return tensor.new_empty(tensor.shape)


@all_gather.register_fake
def _(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    at = checked_dim(dim, tensor.dim())
    rows = tensor.shape[at] * world_size
    return tensor.new_empty(with_rows(tensor.shape, at, rows))


@reduce_scatter.register_fake
def _(tensor: Tensor, dim: int, coordinator: str, world_size: int) -> Tensor:
    at = checked_dim(dim, tensor.dim())
    rows = tensor.shape[at] // world_size
    return tensor.new_empty(with_rows(tensor.shape, at, rows))


def _named(unique_name: str) -> Any:
    from torchft_like.group_coordinator.coordinator import coordinator_named  # noqa: PLC0415 - it imports this

    return coordinator_named(unique_name)


def _with_members(coordinator: str, world_size: int) -> Any:
    """Return the coordinator, if it has as many members as the graph was compiled for.

    Raises:
        GroupCoordinatorError: they have changed since the graph was entered, as a Manager's quorum may.
    """
    found = _named(coordinator)
    communicator = found._current()
    if communicator.world_size != world_size:
        # Other members may have entered theirs with the new members.
        with communicator.guard("a compiled graph"):
            raise GroupCoordinatorError(f"it was entered with {world_size} members: enter it again")
    return found
