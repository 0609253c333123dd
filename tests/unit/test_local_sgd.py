"""LocalSGD and DiLoCo of one replica against their equations, with a peer whose numbers are known."""

from __future__ import annotations

import copy
import io
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.futures import Future

from tests.fake_world import fake_world
from torchft_like.core.step import Share
from torchft_like.errors import CheckpointFormatError
from torchft_like.local_sgd import USE_BUCKETIZATION_ENV, DiLoCo, LocalSGD

INNER_LR, OUTER_LR, MOMENTUM = 0.5, 0.7, 0.9
INNER_STEPS = 12


@dataclass
class Average:
    """A work whose result is there once it is waited for."""

    tensor: Tensor
    added: float | Tensor

    def wait(self) -> bool:
        self.tensor.add_(self.added).div_(2)
        return True


@dataclass
class Peer:
    """A Manager with one peer, which adds `offset(step)` to whatever this replica averages."""

    fails: Sequence[int] = ()  # the numbers of the syncs that are not committed
    _use_async_quorum: bool = False
    step: int = 0
    syncs: int = 0
    begun: int = 0
    reduced: list[int] = field(default_factory=list)
    asked: list[tuple[Any, Any]] = field(default_factory=list)  # how to quantize
    sent: list[weakref.ref[Tensor]] = field(default_factory=list)
    registered: dict[str, Any] = field(default_factory=dict)
    disowned: int = 0
    contributors: int = 2  # to the first sync; the other one adds zeros, and averages divide by two

    def share_of_step(self) -> Share:
        return Share(0, self.contributors, 2)

    def start_quorum(self) -> None:
        self.begun += 1

    def allreduce(
        self, tensor: Tensor, should_quantize: bool | str = False, *, error_feedback: Any = None
    ) -> Any:
        self.reduced.append(tensor.numel())
        self.asked.append((should_quantize, error_feedback))
        self.sent.append(weakref.ref(tensor))
        return Average(tensor, offset(self.syncs))

    def should_commit(self) -> bool:
        assert self.begun == self.syncs + 1
        committed = self.syncs not in self.fails
        self.syncs += 1
        self.step += committed
        return committed

    def current_step(self) -> int:
        return self.step

    def disown_state(self) -> None:
        self.disowned += 1

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.registered[key] = load, save


def offset(sync: int) -> float:
    return 0.25 * (sync + 1)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take inner steps with the same gradient in each: the number of the parameter and one."""
    for _ in range(INNER_STEPS):
        optimizer.zero_grad()
        for number, parameter in enumerate(net.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1)
        optimizer.step()
        yield


def expected(
    fragments: int, sync_every: int, delay: int, alpha: float, fails: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Yield the parameters after each inner step, by the equations."""
    parameters = [p.detach().clone() for p in model().parameters()]
    shared, momentum = [p.clone() for p in parameters], [torch.zeros_like(p) for p in parameters]
    has_stepped = [False] * len(parameters)
    size = len(parameters) // fragments
    step = syncs = local = 0
    sent: dict[int, Tensor] = {}
    for _ in range(INNER_STEPS):
        parameters = [p - INNER_LR * (number + 1) for number, p in enumerate(parameters)]
        local += 1
        of_fragment = range(step % fragments * size, step % fragments * size + size)
        if local == sync_every // fragments - delay:
            sent = {n: (shared[n] - parameters[n] + offset(syncs)) / 2 for n in of_fragment}
        if local == sync_every // fragments:
            local = 0
            committed = syncs not in fails
            for n in of_fragment:
                if committed:
                    momentum[n] = MOMENTUM * momentum[n] + sent[n] if has_stepped[n] else sent[n]
                    has_stepped[n] = True
                    shared[n] = shared[n] - OUTER_LR * momentum[n]
                    parameters[n] = (1 - alpha) * shared[n] + alpha * parameters[n]
                else:
                    parameters[n] = shared[n].clone()
            syncs += 1
            step += committed
        yield [p.clone() for p in parameters]


def outer_sgd(modules: Sequence[nn.Module]) -> torch.optim.SGD:
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=OUTER_LR, momentum=MOMENTUM)


@pytest.mark.parametrize("fails", [(), (1, 2)], ids=["all committed", "two fail"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 3), (2, 0), (2, 1)])
@pytest.mark.parametrize("together", [False, True], ids=["each by itself", "one bucket and one outer"])
def test_diloco_follows_its_equations(
    fragments: int, delay: int, alpha: float, fails: Sequence[int], together: bool
) -> None:
    net, peer = model(), Peer(fails)
    modules: list[nn.Module] = list(net) if fragments == 2 else [net]
    outers: list[torch.optim.Optimizer] = [outer_sgd([module]) for module in modules]
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    reference = expected(fragments, 4, delay, alpha, fails)
    with DiLoCo(
        peer,
        modules,
        inner,
        outer_sgd(modules) if together else outers,
        sync_every=4,
        use_bucketization=together,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    ) as diloco:
        for number, _ in enumerate(train(net, inner), 1):
            torch.testing.assert_close([p.detach() for p in net.parameters()], next(reference))
            interval = 4 // fragments
            assert diloco.is_syncing == (number % interval >= interval - delay)
    assert peer.syncs == INNER_STEPS * fragments // 4
    assert len(peer.reduced) == peer.syncs * (1 if together else 4 // fragments)
    assert [sent() for sent in peer.sent] == [None] * len(peer.sent), "no memory is kept between two syncs"


@pytest.mark.parametrize("cap_mb", [None, 1])
def test_a_bucket_is_no_greater_than_its_limit_but_for_one_parameter(
    monkeypatch: pytest.MonkeyPatch, cap_mb: int | None
) -> None:
    monkeypatch.setenv(USE_BUCKETIZATION_ENV, "True")
    net = nn.Sequential(*(nn.Linear(size, 256, bias=False) for size in (512, 500, 1030, 8, 9)))
    net[-1].double()  # a bucket has one dtype
    peer, inner = Peer(), torch.optim.SGD(net.parameters(), lr=0.1)
    with DiLoCo(peer, [net], inner, outer_sgd([net]), sync_every=1, bucket_cap_mb=cap_mb):
        inner.step()
    numbers = [256 * size for size in (512, 500, 1030, 8, 9)]
    buckets = [numbers[:4]] if cap_mb is None else [numbers[:2], numbers[2:3], numbers[3:4]]
    assert peer.reduced == [*map(sum, buckets), numbers[4]]


def test_what_quantizing_leaves_of_a_parameter_is_added_to_it_in_the_next_sync() -> None:
    net, peer = model(), Peer()
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    with DiLoCo(
        peer, [net], inner, outer_sgd([net]), sync_every=1, should_quantize=True, error_feedback=True
    ):
        inner.step()
        inner.step()
    assert all(quantize is True and feedback is not None for quantize, feedback in peer.asked)
    first, second = ([id(feedback) for _, feedback in peer.asked[n : n + 4]] for n in (0, 4))
    assert first == second
    assert len({*first}) == 4


def test_global_parameters_are_kept_on_the_device_that_is_named() -> None:
    net = model()
    inner, device = torch.optim.SGD(net.parameters(), lr=INNER_LR), torch.device("meta")
    diloco = DiLoCo(Peer(), [net], inner, outer_sgd([net]), sync_every=1, backup_device=device)
    assert {each.device for each in diloco.global_states()[0]["original_parameters"].values()} == {device}


def test_what_a_healing_replica_loads_is_the_peers_global_state() -> None:
    nets, peers = [model(), model()], [Peer(), Peer()]
    for number, (net, peer) in enumerate(zip(nets, peers, strict=True)):
        inner = torch.optim.SGD(net.parameters(), lr=INNER_LR * (number + 1))
        with DiLoCo(peer, list(net), inner, [outer_sgd([module]) for module in net], sync_every=2):
            for _ in train(net, inner):
                pass
    states = [[save() for _, save in peer.registered.values()] for peer in peers]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(states[0], states[1])
    for (load, _), state in zip(peers[1].registered.values(), states[0], strict=True):
        load(state)
    torch.testing.assert_close([save() for _, save in peers[1].registered.values()], states[0])
    assert list(peers[0].registered) == ["StreamingDiLoCoFragment_0", "StreamingDiLoCoFragment_1"]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_start_from_a_checkpoint_goes_on_with_the_same_bits(fragments: int) -> None:
    saved: list[io.BytesIO] = []
    ends: list[list[Tensor]] = []
    for _ in range(2):
        net, peer = model(), Peer()
        modules: list[nn.Module] = list(net) if fragments == 2 else [net]
        inner = torch.optim.AdamW(net.parameters(), lr=INNER_LR)
        diloco = DiLoCo(peer, modules, inner, [outer_sgd([module]) for module in modules], sync_every=4)
        if saved:
            parts = torch.load(io.BytesIO(saved[0].getvalue()))
            net.load_state_dict(parts["model"])
            inner.load_state_dict(parts["inner"])
            peer.step = peer.syncs = peer.begun = parts["step"]
            diloco.load_global_states(parts["global"])
        with diloco:
            while peer.step < 5:
                next(train(net, inner))
                if peer.step == 3 and not saved:
                    parts = {"model": net.state_dict(), "inner": inner.state_dict()}
                    saved.append(io.BytesIO())
                    torch.save({**parts, "step": 3, "global": diloco.global_states()}, saved[0])
        ends.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_a_checkpoint_of_other_fragments_is_refused_as_a_whole() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    diloco = DiLoCo(Peer(), list(net), inner, outer_sgd(list(net)), sync_every=2)
    before = copy.deepcopy(diloco.global_states())
    bad = copy.deepcopy(before)
    bad[0]["original_parameters"]["weight"] += 1
    bad[1]["original_parameters"]["weight"] = torch.zeros(1, 1)  # could be spread over the parameter
    for states, number in ((bad, 1), (bad[:1], 1), ([bad[1], bad[0]], 0)):
        with pytest.raises(CheckpointFormatError, match=f"fragment {number} has the parameters"):
            diloco.load_global_states(states)
    torch.testing.assert_close(diloco.global_states(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), [Shard(0)]), ((2,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((4,), [Shard(0)])],
    ids=["FSDP", "TP", "FSDP and TP", "uneven"],
)
def test_dtensors_are_synced_shard_by_shard(mesh: tuple[int, ...], placements: list[Placement]) -> None:
    ranks = math.prod(mesh)
    with fake_world(ranks, rank=1):
        net = nn.Linear(4, 6, bias=False)
        whole = net.weight.detach().clone()
        sharded = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None)
        before = sharded.to_local().clone()
        net.weight = nn.Parameter(sharded)
        peer, inner = Peer(), torch.optim.SGD(net.parameters(), lr=0.0)
        with DiLoCo(peer, [net], inner, torch.optim.SGD(net.parameters(), lr=1.0), sync_every=1):
            inner.step()
        assert isinstance(net.weight, DTensor)
        torch.testing.assert_close(net.weight.to_local(), before - offset(0) / 2)
        assert peer.reduced == [before.numel()]
        assert before.numel() < whole.numel()


@pytest.mark.parametrize("saved_as", ["DTensors", "shards"])  # as versions before saved them
def test_global_states_of_a_sharded_model_are_dtensors_of_which_a_rank_loads_its_shard(
    saved_as: str,
) -> None:
    with fake_world(2, rank=1):
        mesh = init_device_mesh("cpu", (2,))
        net = nn.Linear(4, 6, bias=False)
        sharded = distribute_tensor(net.weight.detach(), mesh, [Shard(1)], src_data_rank=None)
        net.weight = nn.Parameter(sharded)
        inner = torch.optim.SGD(net.parameters(), lr=0.0)
        diloco = DiLoCo(Peer(), [net], inner, torch.optim.SGD(net.parameters(), lr=1.0), sync_every=1)
        (state,) = copy.deepcopy(diloco.global_states())
        found = state["original_parameters"]["weight"]
        assert isinstance(found, DTensor)
        assert (found.shape, found.placements) == (net.weight.shape, sharded.placements)
        if saved_as == "shards":
            state["original_parameters"]["weight"] = found.to_local()
        with diloco:
            inner.step()
        diloco.load_global_states([state])
        (now,) = diloco.global_states()
        torch.testing.assert_close(now["original_parameters"]["weight"].to_local(), found.to_local())


def test_local_sgd_is_right_where_one_replica_adds_zeros_to_the_first_average() -> None:
    net, peer = model(), Peer(_use_async_quorum=True, contributors=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with LocalSGD(peer, net, optimizer, sync_every=1):
        reference = [p.detach() + offset(0) for p in net.parameters()]
        next(train(net, optimizer))
    torch.testing.assert_close([p.detach() for p in net.parameters()], reference)


@pytest.mark.parametrize("fails", [(), (1,)], ids=["all committed", "one fails"])
def test_local_sgd_averages_parameters_or_leaves_them(fails: Sequence[int]) -> None:
    net, peer = model(), Peer(fails, _use_async_quorum=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    reference = [p.detach().clone() for p in net.parameters()]
    with LocalSGD(peer, net, optimizer, sync_every=3):
        for number, _ in enumerate(train(net, optimizer), 1):
            reference = [p - INNER_LR * (n + 1) for n, p in enumerate(reference)]
            sync = number // 3 - 1
            if number % 3 == 0 and sync not in fails:
                reference = [(p + offset(sync)) / 2 for p in reference]
            torch.testing.assert_close([p.detach() for p in net.parameters()], reference)
    assert peer.syncs == INNER_STEPS // 3
    for _ in range(3):
        optimizer.step()
    assert peer.syncs == INNER_STEPS // 3, "the block has ended"


def test_a_replica_that_cannot_carry_out_a_committed_sync_disowns_its_state() -> None:
    net, peer = model(), Peer()
    inner, outer = torch.optim.SGD(net.parameters(), lr=INNER_LR), outer_sgd([net])
    outer.register_step_pre_hook(lambda *_: Future[None]().value())
    with pytest.raises(RuntimeError), DiLoCo(peer, [net], inner, outer, sync_every=1):
        inner.step()
    assert peer.disowned == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"asynchronous": True}, "use_async_quorum=False"),
        ({"outers": 3}, "3 outer optimizers for 2 model fragments"),
        ({"sync_every": 1}, "2 fragments cannot be synced in 1 steps"),
        ({"sync_every": 5}, "sync_every 5 must be a multiple of the number of fragments, 2"),
        ({"fragment_sync_delay": 2}, r"fragment_sync_delay is 2, must be in \[0, 2\)"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha is 1.5"),
        ({"empty": True}, "no parameters"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    net = model()
    modules = [nn.ReLU(), net] if change.pop("empty", False) else list(net)
    peer = Peer(_use_async_quorum=change.pop("asynchronous", False))
    outers: Any = [outer_sgd([net])] * change.pop("outers", 2)
    inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    with pytest.raises(ValueError, match=message):
        DiLoCo(peer, modules, inner, outers, **{"sync_every": 4, **change})
    with pytest.raises(ValueError, match="sync_every is 0"):
        LocalSGD(peer, net, inner, sync_every=0)
