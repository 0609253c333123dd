"""The state of a sharded model, and the hook that averages its gradients; one rank of torch's fake world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tests.fake_world import fake_world
from tests.faults import raising
from tests.versions import NEEDS_RESET_OF_FSDP
from torchft_like import DistributedDataParallel, Manager
from torchft_like.checkpointing.shards import local_part
from torchft_like.checkpointing.state_stream import flatten_state
from torchft_like.device_mesh import extend_device_mesh
from torchft_like.digest import state_digest
from torchft_like.errors import CheckpointFormatError, NotSupportedError
from torchft_like.fsdp import ShardedState, average_over_replicas
from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.work import FinishedOperation

WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def _fake_world() -> Iterator[None]:
    with fake_world(WORLD_SIZE, rank=1):
        yield


class Net(nn.Module):
    """Three rows over two ranks; a buffer; a parameter that is not sharded evenly."""

    def __init__(self, seed: int, rows: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, rows)
        self.outer = nn.Linear(rows, 2)
        self.register_buffer("scale", torch.randn(()))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.outer(self.inner(inputs)) * self.scale
        return result


def sharded(seed: int, rows: int = 3) -> Net:
    net = Net(seed, rows)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    fully_shard(net.inner, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def trained(seed: int, make: Callable[[int], Net] = sharded) -> tuple[Net, torch.optim.Optimizer]:
    net = make(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    return net, optimizer


def test_torchs_reducer_is_given_no_sharded_parameter() -> None:
    with pytest.raises(NotSupportedError, match=r"inner\.weight is a DTensor.*fully_shard with a mesh"):
        DistributedDataParallel(cast("Manager", None), sharded(seed=1))


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_sharded_over_the_replicas_is_refused_before_the_first_step(dim: int) -> None:
    """FSDP shards over the last dimension of a mesh."""
    net, fixed = Net(seed=1), init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("shard",))
    fully_shard(net, mesh=extend_device_mesh(fixed, ProcessGroupDummy(0, 1), "replicas", dim))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if dim == 0:
        flatten_state({"model": net.state_dict(), "train": ShardedState(net, optimizer).state_dict()})
        return
    with pytest.raises(NotSupportedError, match=r"inner\.weight is sharded over the elastic dimension"):
        ShardedState(net, optimizer)
    with pytest.raises(CheckpointFormatError, match=r"inner.weight.* is sharded over the elastic dimension"):
        flatten_state({"model": net.state_dict()})


def test_a_buffer_that_the_module_replaces_is_sent_and_taken_over() -> None:
    net, optimizer = trained(seed=1)
    source, healed_net = ShardedState(net, optimizer), sharded(seed=2)
    healed = ShardedState(healed_net, torch.optim.AdamW(healed_net.parameters()))
    net.scale = torch.tensor(5.0)
    healed_net.scale = torch.tensor(7.0)
    healed.load_state_dict(source.state_dict())
    assert float(healed_net.scale) == 5.0
    net.scale = healed_net.scale = None  # type: ignore[assignment]
    healed.load_state_dict(source.state_dict())
    assert healed_net.scale is None


def test_an_optimizer_may_keep_plain_dicts_for_a_sharded_parameter() -> None:
    net, optimizer = trained(seed=1)
    counts = {"skipped": 3}
    optimizer.state[net.inner.weight]["counts"] = counts
    state = ShardedState(net, optimizer)
    state.load_state_dict(state.state_dict())
    assert optimizer.state[net.inner.weight]["counts"] == counts


def alone(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """Sharded over this rank only: what it gathers is all there is, so its outputs are right."""
    net, mesh = Net(seed), DeviceMesh("cpu", [dist.get_rank()])
    fully_shard(net.inner, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def evaluate(net: Net) -> Tensor:
    """FSDP leaves what the root has gathered in place afterwards, for a backward pass that does not come."""
    with torch.no_grad():
        return net(torch.ones(5, 4))  # type: ignore[no-any-return]


def test_who_heals_after_an_evaluation_does_not_go_on_with_the_parameters_that_were_gathered_for_it() -> None:
    source_net, source_optimizer = alone(seed=1)
    net, optimizer = alone(seed=2)
    healed = ShardedState(net, optimizer)
    before = evaluate(net)
    healed.load_state_dict(ShardedState(source_net, source_optimizer).state_dict())
    after, expected = evaluate(net), evaluate(source_net)
    assert torch.equal(after, expected)
    assert not torch.equal(before, expected)


def test_a_state_that_is_made_after_an_evaluation_is_that_of_the_shards() -> None:
    net, optimizer = alone(seed=1)
    evaluate(net)
    state = ShardedState(net, optimizer)
    net(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    weight = net.outer.weight
    assert isinstance(weight, DTensor)
    assert torch.equal(state.state_dict()["model"]["outer.weight"], weight.to_local())


def test_loading_keeps_the_memory_that_fsdp_gathers_from() -> None:
    net, optimizer = trained(seed=1)
    state = ShardedState(net, optimizer)
    before = {name: tensor.data_ptr() for name, tensor in state.state_dict()["model"].items()}
    state.load_state_dict(ShardedState(*trained(seed=2)).state_dict())
    assert {name: tensor.data_ptr() for name, tensor in state.state_dict()["model"].items()} == before


def test_reading_the_state_in_a_forward_pass_leaves_the_gathered_parameters_alone() -> None:
    """A Manager reads it there, from another thread, when a peer heals."""
    net, optimizer = trained(seed=1)
    state = ShardedState(net, optimizer)
    outside = state_digest(state.state_dict())
    inside: list[str] = []
    net.inner.register_forward_hook(lambda *_: inside.append(state_digest(state.state_dict())))
    net(torch.ones(5, 4)).sum().backward()
    assert inside == [outside]


def test_the_state_dict_of_a_module_would_break_the_forward_pass() -> None:
    """Why there is a ShardedState. Should this fail with a newer torch, it is needed no more."""
    net = sharded(seed=1)
    net.inner.register_forward_hook(lambda *_: net.state_dict() and None)
    with pytest.raises(RuntimeError, match="mixed"):
        net(torch.ones(5, 4))


@pytest.mark.parametrize("make", [sharded, Net])
def test_who_heals_goes_on_with_the_sources_parameters_and_optimizer(make: Callable[[int], Net]) -> None:
    (net, optimizer), (other, others) = trained(1, make), trained(2, make)
    ShardedState(other, others).load_state_dict(ShardedState(net, optimizer).state_dict())
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        parts = [
            (ours, theirs),
            *((own, others.state[theirs][k]) for k, own in optimizer.state[ours].items()),
        ]
        assert len(parts) == 4
        for own, loaded in parts:
            assert type(own) is type(loaded)
            assert torch.equal(local_part(own), local_part(loaded))


@pytest.mark.parametrize("other", ["rows", "more here", "more there"])
def test_the_state_of_another_model_is_refused_before_anything_is_loaded(other: str) -> None:
    net, optimizer = trained(seed=1)
    their_net = sharded(seed=1, rows=5 if other == "rows" else 3)
    if other != "rows":
        (net if other == "more here" else their_net).register_buffer("a", torch.zeros(()))
    own = ShardedState(net, optimizer)
    before = state_digest(own.state_dict())
    theirs = ShardedState(their_net, torch.optim.AdamW(their_net.parameters()))
    found = {
        "rows": r"inner.bias has shards of \(1,\) here and of \(2,\)",
        "more here": r"a has shards of \(\) here and of None",
        "more there": r"a has shards of None here and of \(\)",
    }
    with pytest.raises(CheckpointFormatError, match=found[other]):
        own.load_state_dict(theirs.state_dict())
    assert state_digest(own.state_dict()) == before


def test_the_state_of_an_optimizer_of_more_parameters_is_refused_before_anything_is_loaded() -> None:
    net, optimizer = trained(seed=1)
    other_net = sharded(seed=2)
    own = ShardedState(other_net, torch.optim.AdamW(other_net.inner.parameters()))
    before = state_digest(own.state_dict())
    with pytest.raises(CheckpointFormatError, match=r"\[2\] parameters here and \[4\] in the state to load"):
        own.load_state_dict(ShardedState(net, optimizer).state_dict())
    assert state_digest(own.state_dict()) == before


def test_an_optimizer_that_shards_otherwise_is_told_apart() -> None:
    net, optimizer = trained(seed=1)
    parameter = next(net.parameters())
    assert isinstance(parameter, DTensor)
    whole = DTensor.from_local(torch.zeros(3, 4), parameter.device_mesh, [Replicate()], run_check=False)
    optimizer.state[parameter]["exp_avg"] = whole
    with pytest.raises(NotSupportedError, match="'exp_avg'"):
        ShardedState(net, optimizer).state_dict()


class Sevens:
    """Stands for a Manager: an average that can be told from any gradient."""

    def __init__(self) -> None:
        self.numels: list[int] = []

    def allreduce(self, tensor: Tensor) -> dist.Work:
        self.numels.append(tensor.numel())
        tensor.fill_(7.0)
        return FinishedOperation([tensor])


def not_sharded() -> Net:
    return Net(seed=1)


def sharded_in_part() -> Net:
    net = Net(seed=1)
    fully_shard(net.outer, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    return net


def sharded_but_for_a_layer() -> Net:
    net = Net(seed=1)
    fully_shard(net, mesh=init_device_mesh("cpu", (WORLD_SIZE,)), ignored_params=set(net.inner.parameters()))
    return net


@pytest.mark.parametrize("make", [not_sharded, sharded_in_part, sharded_but_for_a_layer])
def test_a_gradient_that_no_hook_would_average_is_a_value_error(make: Callable[[], Net]) -> None:
    with pytest.raises(ValueError, match=r"inner\.weight.*fully_shard"):
        average_over_replicas(Sevens(), make())


def test_a_frozen_parameter_need_not_be_sharded() -> None:
    net, manager = sharded_but_for_a_layer(), Sevens()
    net.inner.requires_grad_(False)
    average_over_replicas(manager, net)
    net(torch.ones(5, 4)).sum().backward()
    assert len(manager.numels) == 1  # of the outer layer


def test_the_hook_can_be_set_after_an_evaluation() -> None:
    net, manager = alone(seed=1)[0], Sevens()
    evaluate(net)
    average_over_replicas(manager, net)
    net(torch.ones(5, 4)).sum().backward()
    assert sum(manager.numels) == sum(parameter.numel() for parameter in net.parameters())


def break_off_a_backward_pass(net: Net) -> None:
    hook = net.inner.register_forward_hook(
        lambda _, __, hidden: hidden.register_hook(raising(RuntimeError("broken off"))) and None
    )
    with pytest.raises(RuntimeError, match="broken off"):
        net(torch.ones(5, 4)).sum().backward()
    hook.remove()


@NEEDS_RESET_OF_FSDP
@pytest.mark.parametrize("is_reset", [True, False])
def test_after_a_backward_pass_broken_off_fsdp_must_be_reset(is_reset: bool) -> None:
    """As docs/sharded-training.md says, until a newer torch does without."""
    net, manager = alone(seed=1)[0], Sevens()
    average_over_replicas(manager, net)
    break_off_a_backward_pass(net)
    reduced = []
    for _ in range(2):
        if is_reset:
            net.reset_iter_state()  # type: ignore[operator] # fully_shard has made it an FSDPModule
        manager.numels.clear()
        net(torch.ones(5, 4)).sum().backward()
        reduced.append(sum(manager.numels))
    own = sum(parameter.numel() for parameter in net.parameters())
    assert (reduced == [own, own]) is is_reset
    assert (reduced[-1] == 0) is not is_reset
