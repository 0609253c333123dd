"""What FSDP divides its gradients by when the number of replica groups changes under it.

FSDP asks the elastic group for its size in every backward pass, and some ways to reduce divide by it
themselves. Members that heal are in the group and add zero: they must not be counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_like import LighthouseServer, Manager, Optimizer, ProcessGroupGloo
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.fsdp import ShardedState

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)  # FSDP divides before and after the sum
FULL = MixedPrecisionPolicy()  # it asks for an average


@dataclass(frozen=True)
class Step:
    """One step of one replica: who took part, and the gradient that it got."""

    members: int
    participants: int
    gradient: float


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield server.address()
    dist.destroy_process_group()
    server.shutdown()


def only_sum(net: nn.Module) -> None:
    assert isinstance(net, FSDPModule)
    net.set_force_sum_reduction_for_comms(True)


@pytest.mark.parametrize(
    ("policy", "prepare"),
    [(FULL, lambda _: None), (FULL, only_sum), (HALF, lambda _: None)],
    ids=["average", "sum", "half"],
)
def test_gradients_are_divided_by_the_participants_not_by_the_members(
    lighthouse: str, policy: MixedPrecisionPolicy, prepare: Callable[[nn.Module], None]
) -> None:
    is_joined, is_done = threading.Event(), threading.Barrier(2)

    def train(name: str, gradient: float) -> list[Step]:
        """The gradient of each replica's loss is a number of its own, whatever the weight is."""
        with Manager(
            pg=ProcessGroupGloo(30),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            lighthouse_addr=lighthouse,
            replica_id=name,
        ) as manager:
            mesh = ft_init_device_mesh(
                device_type="cpu",
                mesh_shape=(2, 1),
                mesh_dim_names=("dp_replicate", "dp_shard"),
                replicate_dim=0,
                manager=manager,
            )
            net = nn.Linear(1, 1, bias=False)
            fully_shard(net, mesh=mesh, mp_policy=policy)
            prepare(net)
            sgd = torch.optim.SGD(net.parameters(), lr=0.01)
            state, optimizer = ShardedState(net, sgd), Optimizer(manager, sgd)
            manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
            steps: list[Step] = []
            while not steps or steps[-1].participants < 2:
                optimizer.zero_grad()
                net(torch.tensor([[gradient]])).sum().backward()
                assert isinstance(net.weight.grad, DTensor)
                reduced = net.weight.grad.to_local().item()
                members, participants = manager.replica_world_size(), manager.num_participants()
                optimizer.step()
                steps.append(Step(members, participants, reduced))
                is_joined.set()
            is_done.wait(LIMIT_S)
            return steps

    with ThreadPoolExecutor(2) as replicas:
        first = replicas.submit(train, "a", 1.0)
        assert is_joined.wait(LIMIT_S)
        second = replicas.submit(train, "b", 3.0)
        alone_and_after, joined = first.result(LIMIT_S), second.result(LIMIT_S)
    assert set(alone_and_after) == {Step(1, 1, 1.0), Step(2, 1, 1.0), Step(2, 2, 2.0)}
    assert joined == [Step(2, 1, 1.0), Step(2, 2, 2.0)]
