"""What the state dicts of torch, torchdata and torchtitan's containers hold travels as it is."""

from __future__ import annotations

import inspect
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from tests.equality import same
from tests.unit.checkpointing.states import round_trip
from torchft_like.checkpointing.shards import place, shards_in
from torchft_like.checkpointing.state_stream import flatten_state
from torchft_like.errors import CheckpointFormatError
from torchft_like.manager.state_registry import StateRegistry


def stepped_optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.randn(4, 3))
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]
    parameter.grad = torch.ones(4, 3)
    optimizer.step()
    return optimizer


def decay(epoch: int) -> float:
    return 0.9**epoch


Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, decay),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, decay),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LambdaLR(o, decay)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    own = [kind for kind in vars(lr_scheduler).values() if inspect.isclass(kind)]
    names = {kind.__name__ for kind in own if issubclass(kind, lr_scheduler.LRScheduler)}
    assert {name for name in names if name[0] != "_"} - {"LRScheduler", "EpochParam"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_travels_and_goes_on_where_it_was(name: str) -> None:
    optimizer = stepped_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    metric = (0.5,) if name == "ReduceLROnPlateau" else ()
    for _ in range(3):
        optimizer.step()
        scheduler.step(*metric)
    state = scheduler.state_dict()
    received = round_trip(state)
    assert same(received, state)
    healed = stepped_optimizer()
    other = SCHEDULERS[name](healed)
    other.load_state_dict(received)
    healed.load_state_dict(round_trip(optimizer.state_dict()))
    for updates, schedule in ((optimizer, scheduler), (healed, other)):
        updates.step()
        schedule.step(*metric)
    assert [g["lr"] for g in healed.param_groups] == [g["lr"] for g in optimizer.param_groups]


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS"]


@pytest.mark.parametrize("kind", [getattr(torch.optim, name) for name in OPTIMIZERS], ids=OPTIMIZERS)
def test_an_optimizer_travels(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.randn(3))]) if kind is torch.optim.LBFGS else stepped_optimizer(kind)
    if kind is torch.optim.LBFGS:
        (parameter,) = optimizer.param_groups[0]["params"]

        def closure() -> float:
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())


def test_states_of_random_number_generators_travel() -> None:
    generator = np.random.default_rng(7)
    state = {
        "torch": torch.get_rng_state(),
        "generator": torch.Generator().get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": generator.bit_generator.state,
    }
    received = round_trip(state)
    assert same(received, state)
    torch.set_rng_state(received["torch"])
    random.setstate(received["python"])
    np.random.set_state(received["numpy"])
    generator.bit_generator.state = received["pcg"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_stateful_data_loader_travels() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    loader = stateful.StatefulDataLoader(list(range(20)), batch_size=2, num_workers=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert same(round_trip(state), state)
    healed = stateful.StatefulDataLoader(list(range(20)), batch_size=2, num_workers=2)
    healed.load_state_dict(round_trip(state))
    assert torch.equal(next(iter(healed)), next(batches))


def trained(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def as_torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The forms of its containers: a flat optimizer, bytes of a loader, counters."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": lr_scheduler.LambdaLR(optimizer, decay).state_dict(),
        "dataloader": {"dp_rank_1": pickle.dumps({"_index": 3}), "world_size": 2},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(2**40)},
    }


def as_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named, state = get_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "named": named, "state": state}


@pytest.mark.parametrize("form", [as_torchtitan, as_torch], ids=lambda form: form.__name__)
def test_what_containers_of_a_sharded_model_return_travels_and_comes_to_lie_where_it_lay(
    mesh: DeviceMesh, form: Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]
) -> None:
    state = form(*trained(mesh))
    flatten_state(state)
    own = form(*trained(mesh))
    placed = place(round_trip(state), own)
    sent, found = list(shards_in(state)), list(shards_in(placed))
    assert len(sent) == len(found) > 8
    for there, here in zip(sent, found, strict=True):
        assert isinstance(there, DTensor)
        assert isinstance(here, DTensor)
        assert (here.device_mesh, here.placements, here.shape) == (
            there.device_mesh,
            there.placements,
            there.shape,
        )
        assert torch.equal(here.to_local(), there.to_local())


class Schedule:
    """A callable object: LambdaLR saves what it holds."""

    def __init__(self) -> None:
        self.lock = OrderedDict(scale=decay)

    def __call__(self, epoch: int) -> float:
        return decay(epoch)


def test_what_cannot_travel_is_refused_by_its_path_before_the_first_step() -> None:
    scheduler = lr_scheduler.LambdaLR(stepped_optimizer(), Schedule())
    registry = StateRegistry()
    registry.register("train", print, lambda: {"lr_scheduler": scheduler.state_dict()})
    with pytest.raises(CheckpointFormatError, match=r"train\.lr_scheduler\.lr_lambdas\[0\]\.lock\.scale is"):
        registry.look(flatten_state)
