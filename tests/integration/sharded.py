"""A model whose parameters are sharded over the ranks of a replica group, for the worker; and a replay.

The replay trains the same model in one process on the data of the ranks that took part, without torch's FSDP
and without a Manager: a run with faults has to arrive at the same parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.options import WorkerOptions
from torchft_like import Manager
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.digest import state_digest
from torchft_like.fsdp import ShardedState, average_over_replicas
from torchft_like.testing.invariants import Commit
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import Model, flip_bit

# The ways in which a network is sharded and its gradients are averaged.
WAYS = (
    "hsdp",  # FSDP over both dimensions of a mesh, which asks the elastic group for an average
    "sum",  # the same, but it asks for a sum, and divides by the group's size itself
    "half",  # the same in half precision, divided in part before, in part after the sum
    "tp",  # layers split over the ranks of the group
    "hook",  # FSDP in the group, the Manager in its all-reduce hook
    "pp",  # a stage of a pipeline on each rank of the group
)
GROUP_SIZE = 2
FULL = StateDictOptions(full_state_dict=True)  # plain tensors, which collectives of the group put together
LEARNING_RATE, MOMENTUM = 0.05, 0.9

# A gradient in half precision is rounded when it is cast, divided, summed over the group's ranks, summed over
# the groups, and divided again, each time by up to half a unit in the last of 11 digits.
HALF_ROUNDING = 5 * 2.0**-11


class ShardedModel(Model):
    """One small network for each way to shard it, all trained in every step.

    The state is complete only once the Manager is known.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._name = options.name
        self._rank = int(os.environ["RANK"])
        self._inner_backend = options.inner_backend
        self._form = options.state
        self._device = options.device
        self._parts: dict[str, ShardedPart] = {}
        self.taken_over: Callable[[str], object] = str  # called with the digest of a peer's state

    def use(self, manager: Manager) -> None:
        """Shard the networks; called once, before the first step."""
        if self._inner_backend:
            manager.init_process_group(self._inner_backend)
        kinds = {"pp": PipelinedPart}
        ways = WAYS if self._device == "cpu" else set(WAYS) - kinds.keys()
        self._parts = {way: kinds.get(way, ShardedPart)(way, manager, self._device) for way in ways}
        parameters = [p for part in self._parts.values() for p in part.net.parameters()]
        self.net = nn.ModuleList(part.net for part in self._parts.values())
        self.optimizer = make_optimizer(parameters)
        self._state = ShardedState(self.net, self.optimizer)

    def backward(self, step: int) -> None:
        """Compute the gradients of all the networks, averaged."""
        for way, part in self._parts.items():
            batch = batch_of(self._name, data_rank(way, self._rank), step)
            inputs, targets = (tensor.to(self._device) for tensor in batch)
            part.backward(inputs, targets)

    def digest(self) -> str:
        """Return a digest of this rank's shards, those of the optimizer included."""
        return state_digest(self._state.state_dict())[:16]

    def state_dict(self) -> dict[str, object]:
        if self._form == "dtensors":
            return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._form == "full":
            model, optimizer = get_state_dict(self.net, self.optimizer, options=FULL)
            return {"model": model, "optimizer": optimizer}
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._form == "dtensors":
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        elif self._form == "full":
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(
                self.net, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FULL
            )
        else:
            self._state.load_state_dict(state)
        self.taken_over(self.digest())

    def flip(self, part: str) -> None:
        """Change one bit of this rank's shards, as a fault of the memory would."""
        *_, last = (p for p in self.net.parameters() if isinstance(p, DTensor) and p.to_local().numel())
        momentum = self.optimizer.state[last]["momentum_buffer"]
        flip_bit({"parameter": last, "optimizer": momentum}[part].to_local())

    def watched(self) -> list[Tensor]:
        """Return the tensors that are the same on the same rank of all replica groups."""
        return list(self.net.parameters())

    def write(self, journal: Journal, step: int) -> None:
        """Write down all parameters; every rank of the group calls this."""
        for way, part in self._parts.items():
            journal.write("parameters", way=way, step=step, values=part.values())


class ShardedPart:
    """One network, sharded in one way."""

    def __init__(self, way: str, manager: Manager, device: str) -> None:
        self.net = make_net().to(device)
        if way == "hook":
            # The meshes made before this one have started the default group.
            self._shard(init_device_mesh(device, (GROUP_SIZE,)))
            average_over_replicas(manager, self.net)
            return
        mesh = ft_init_device_mesh(
            device_type=device,
            mesh_shape=(2, 1, GROUP_SIZE) if way == "tp" else (2, GROUP_SIZE, 1),
            mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
            replicate_dim=0,
            manager=manager,
        )
        if way == "tp":
            parallelize_module(self.net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16 if way == "half" else None)
        self._shard(mesh["dp_replicate", "dp_shard"], mp_policy=policy)
        if way == "sum":
            for module in (self.net[0], self.net[2], self.net[3], self.net):
                assert isinstance(module, FSDPModule)
                module.set_force_sum_reduction_for_comms(True)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        nn.functional.mse_loss(self.net(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def values(self) -> list[float]:
        """Return all parameters; every rank of the group calls this."""
        full = [p.full_tensor() for p in self.net.parameters() if isinstance(p, DTensor)]
        return torch.cat([parameter.flatten() for parameter in full]).tolist()

    def _shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for layer in (self.net[0], self.net[2], self.net[3]):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(self.net, mesh=mesh, **options)


class PipelinedPart(ShardedPart):
    """One network whose first layers are on the first rank, and the others on the second one."""

    def __init__(self, way: str, manager: Manager, device: str) -> None:
        mesh = ft_init_device_mesh(
            device_type=device,
            mesh_shape=(GROUP_SIZE, 2, 1),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard"),
            replicate_dim=1,
            manager=manager,
        )
        self._rank = mesh.get_local_rank("pp")
        self.net = make_net()[:2] if self._rank == 0 else make_net()[2:]  # type: ignore[assignment]
        fully_shard(self.net, mesh=mesh["dp_replicate", "dp_shard"])
        ranks = mesh.get_group("pp")
        stage = PipelineStage(self.net, self._rank, GROUP_SIZE, torch.device(device), group=ranks)
        self._schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        if self._rank == 0:
            self._schedule.step(inputs)
        else:
            self._schedule.step(target=targets)

    def values(self) -> list[float]:
        parts: list[list[float]] = [[]] * GROUP_SIZE
        dist.all_gather_object(parts, super().values())
        return [value for part in parts for value in part]


def make_net() -> nn.Sequential:
    """Return a network that is the same on every rank.

    Of its last layers one rank has two rows and one row, the other rank one row and none.
    """
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 1))


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def data_rank(way: str, rank: int) -> int:
    """Return the rank whose data this rank sees: ranks that split layers, or the network, between them see
    the same data.
    """
    return 0 if way in {"tp", "pp"} else rank


def batch_of(name: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the data of one rank of a replica group in one step."""
    generator = torch.Generator().manual_seed((ord(name) * GROUP_SIZE + rank) * 1_000_000 + step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)


class Replayed(NamedTuple):
    """One step of plain training.

    Attributes:
        parameters: all of them, after it.
        tolerance: how far from them the workers' may be, by rounding alone.
    """

    step: int
    parameters: Tensor
    tolerance: float


def replay(
    commits: Sequence[Commit], names: str, way: str, written: Mapping[int, Tensor]
) -> Iterator[Replayed]:
    """Yield the committed steps, by plain training.

    Where the workers round, each step starts from what they wrote after the last one: their errors then
    do not add up, but for those in the momentum. A wrong divisor in a single step is off by twenty times
    what rounding can do.

    Args:
        commits: of one rank, from the first step on without a gap.
        names: of the replica groups; `names[i]` has bit i of the ledgers.
        way: how the workers sharded the network.
        written: all parameters after a step, by step, as that rank wrote them down.
    """
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    largest = 0.0
    for commit in commits:
        contributors = [name for index, name in enumerate(names) if commit.ledger >> index & 1]
        largest = max(largest, set_gradients(net, commit, contributors, way))
        optimizer.step()
        parameters = nn.utils.parameters_to_vector(net.parameters()).detach()
        tolerance = 1e-6
        if way == "half":
            tolerance += LEARNING_RATE / (1 - MOMENTUM) * HALF_ROUNDING * largest
            if commit is commits[-1] and commit.step not in written:
                return  # the rank writes the parameters after the commit, and has yet to
            nn.utils.vector_to_parameters(written[commit.step], net.parameters())
        yield Replayed(commit.step, parameters, tolerance)


def set_gradients(net: nn.Module, commit: Commit, contributors: Sequence[str], way: str) -> float:
    """Set the gradients to the average over the participants; return the largest number in any
    contribution.
    """
    ranks = {data_rank(way, rank) for rank in range(GROUP_SIZE)}
    parameters = list(net.parameters())
    sums, largest = [torch.zeros_like(p) for p in parameters], 0.0
    for name in contributors:
        for rank in ranks:
            inputs, targets = batch_of(name, rank, commit.step - 1)
            gradients = torch.autograd.grad(nn.functional.mse_loss(net(inputs), targets), parameters)
            largest = max(largest, *(float(gradient.abs().max()) for gradient in gradients))
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient, alpha=1 / (len(ranks) * commit.participants))
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total
    return largest
