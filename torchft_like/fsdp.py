"""Sharded training in replica groups: the state that heals a peer, and gradients over the quorum.

Two ways to train with `fully_shard` when the replica groups change:

* on a mesh of `ft_init_device_mesh`, whose elastic dimension FSDP reduces over by itself, or
* on a mesh of the replica group alone, with `average_over_replicas` as the all-reduce hook.

In both each rank holds its shards, and heals from the rank with the same number in another replica
group: a rank's state is its own shards, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchft_like.checkpointing.shards import (
    CUT_OVER_REPLICAS,
    is_cut_over_replicas,
    like_shard_of,
    local_part,
)
from torchft_like.errors import CheckpointFormatError, NotSupportedError


class Averaging(Protocol):
    """The part of a Manager that averages over the quorum."""

    def allreduce(self, tensor: Tensor) -> Work:
        """Average in place over the participants; never fail."""


def average_over_replicas(manager: Averaging, model: nn.Module) -> None:
    """Let every FSDP module in `model` average its gradient shards over the quorum.

    This is for `fully_shard` on a mesh of this replica group. On a mesh with an elastic dimension FSDP
    averages by itself, and this would do it twice.

    Args:
        manager: the Manager of this rank.
        model: the model, after all calls of `fully_shard`.

    Raises:
        ValueError: a parameter that is trained is in no FSDP module, or ignored by it: nothing would
            average its gradient, and the replicas would come apart.
    """

    def average(gradients: Tensor) -> None:
        manager.allreduce(gradients).wait()

    _let_go_of_gathered(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    reduced = {id(p) for module in sharded for p in module.parameters() if isinstance(p, DTensor)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reduced:
            raise ValueError(
                f"FSDP does not reduce the gradient of {name}: call fully_shard first, on the model itself "
                "too, without ignored_params"
            )
    for module in sharded:
        module.set_all_reduce_hook(average)


class ShardedState:
    """This rank's shards of a model and its optimizer, as a Manager sends them to a peer.

        state = ShardedState(model, optimizer)
        manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)

    It is a convenience: functions that return the DTensors of model and optimizer do as well. It compares
    shapes before it loads anything, and its `state_dict` does not touch the modules, so that it may be called
    at any time between two updates. The sharded parameters stay the same objects from `fully_shard` on, and
    change only when the optimizer steps, so the constructor looks them up once. It also supports models that
    are sharded in part or not at all.

    Args:
        model: the model, after all calls of `fully_shard` and `parallelize_module`.
        optimizer: torch's optimizer of the model's parameters, not the wrapper that asks the Manager.

    Raises:
        NotSupportedError: a parameter is sharded over the elastic dimension of its mesh.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        _let_go_of_gathered(model)
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            if is_cut_over_replicas(parameter):
                raise NotSupportedError(f"{name} {CUT_OVER_REPLICAS}")
        self._model = model
        self._buffer_names = [name for name, _ in model.named_buffers()]
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors on the memory of the shards, in containers that can be sent.

        Raises:
            NotSupportedError: the optimizer has a tensor that is sharded unlike its parameter.
        """
        optimizer = self._optimizer.state_dict()
        parameters = _by_index(self._optimizer)
        optimizer["state"] = {
            index: {key: _pack(value, parameters[index], key) for key, value in entries.items()}
            for index, entries in optimizer["state"].items()
        }
        return {
            "model": {name: local_part(tensor) for name, tensor in self._tensors().items()},
            "optimizer": optimizer,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank of another replica group.

        Raises:
            CheckpointFormatError: that model, or optimizer, had other parameters, or was sharded in another
              way.
        """
        own = {name: tuple(local_part(tensor).shape) for name, tensor in self._tensors().items()}
        other = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                raise CheckpointFormatError(
                    f"{name} has shards of {own.get(name)} here and of {other.get(name)} in the state to "
                    "load: every replica group must shard the same model over as many ranks"
                )
        groups = self._optimizer.param_groups, state["optimizer"]["param_groups"]
        here, there = ([len(group["params"]) for group in each] for each in groups)
        if here != there:
            raise CheckpointFormatError(
                f"the optimizer's groups have {here} parameters here and {there} in the state to load: every "
                "replica group must give its optimizer the same ones"
            )
        _let_go_of_gathered(self._model)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                local_part(tensor).copy_(state["model"][name])
        parameters = _by_index(self._optimizer)
        optimizer = dict(state["optimizer"])
        optimizer["state"] = {
            index: {key: _unpack(value, parameters[index]) for key, value in entries.items()}
            for index, entries in optimizer["state"].items()
        }
        self._optimizer.load_state_dict(optimizer)

    def _tensors(self) -> dict[str, Tensor]:
        """Return parameters and present buffers: modules replace buffers, and no hook of FSDP does."""
        buffers = dict(self._model.named_buffers())
        return {**self._parameters, **{name: buffers[name] for name in self._buffer_names if name in buffers}}


def _let_go_of_gathered(model: nn.Module) -> None:
    """Reshard the model: parameters that FSDP gathered for an evaluation would be those of the next step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _by_index(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order in which the optimizer's state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pack(value: Any, parameter: Tensor, key: str) -> Any:
    """Return a sharded tensor of an optimizer's state as a marked plain one, and any other value as it is."""
    if not isinstance(value, DTensor):
        return value
    form = value.shape, value.placements, value.device_mesh
    if not isinstance(parameter, DTensor) or form != (
        parameter.shape,
        parameter.placements,
        parameter.device_mesh,
    ):
        raise NotSupportedError(
            f"the optimizer's {key!r} is sharded unlike its parameter: give the Manager your own functions"
        )
    return {"shard": local_part(value)}


def _unpack(value: Any, parameter: Tensor) -> Any:
    is_shard = isinstance(value, dict) and value.keys() == {"shard"} and isinstance(parameter, DTensor)
    return like_shard_of(parameter, value["shard"]) if is_shard else value
