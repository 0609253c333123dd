"""Gradients over replicas, by the wrappers of modules: a thread per replica, real servers and Gloo."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.pipelining.stage import _PipelineStageBase

from lighthouse.events import Event
from tests.fake_world import fake_world
from tests.integration.test_manager_api import make_manager
from tests.managers import PATIENCE_S, each_in_a_thread, lighthouse_here
from torchft_like import (
    DistributedDataParallel,
    LighthouseServer,
    Manager,
    NotSupportedError,
    Optimizer,
    ProcessGroupGloo,
    PureDistributedDataParallel,
)
from torchft_like.digest import state_digest
from torchft_like.process_group import ManagedProcessGroup

pytestmark = pytest.mark.integration
LIMIT_S = 60.0

T = TypeVar("T")


class Replica(NamedTuple):
    """One of two, which begin with the same parameters."""

    name: str
    manager: Manager
    model: nn.Module


def on_both(
    lighthouse: LighthouseServer,
    make_model: Callable[[], nn.Module],
    act: Callable[[Replica], T],
    **settings: Any,
) -> list[T]:
    def run(name: str) -> T:
        with make_manager(lighthouse, name, models[name], **{"init_sync": False} | settings) as manager:
            return act(Replica(name, manager, models[name]))

    models = {name: make_model() for name in "ab"}
    models["b"].load_state_dict(models["a"].state_dict())
    return each_in_a_thread("ab", run)


class Branches(nn.Module):
    """Each replica goes its own way, and `unused` nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1, bias=False)
        self.b = nn.Linear(3, 1, bias=False)
        self.unused = nn.Linear(3, 1, bias=False)

    def forward(self, rows: Tensor, branch: str) -> Tensor:
        result: Tensor = (self.a if branch == "a" else self.b)(rows)
        return result


Trained = tuple[str, int, list[list[float] | None]]


def torchs_own(manager: Manager, model: nn.Module, **settings: Any) -> nn.parallel.DistributedDataParallel:
    group: Any = ManagedProcessGroup(manager)
    parallel = nn.parallel.DistributedDataParallel(model, process_group=group, init_sync=False, **settings)
    assert parallel.process_group is group, "which libraries ask for its name"
    return parallel


def train_branches(
    replica: Replica,
    branch: Callable[[int], str],
    steps: int,
    wrap: Callable[..., nn.Module] = DistributedDataParallel,
    **settings: Any,
) -> Trained:
    """Train; return a digest of the state, how many steps failed, and the last gradients."""
    parallel = wrap(replica.manager, replica.model, **settings)
    optimizer = Optimizer(replica.manager, torch.optim.AdamW(replica.model.parameters()))
    attempts = 0
    while (step := replica.manager.current_step()) < steps:
        attempts += 1
        optimizer.zero_grad()
        parallel(torch.ones(1, 3), branch(step)).sum().backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in replica.model.parameters()]
    flat = [None if gradient is None else gradient.flatten().tolist() for gradient in gradients]
    return state_digest(replica.model.state_dict()), attempts - steps, flat


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({}, 1),
        ({"gradient_as_bucket_view": True}, 1),
        ({"find_unused_parameters": True}, 0),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, 0),
    ],
)
@pytest.mark.parametrize("init_sync", [False, True])
def test_a_parameter_that_one_replica_uses_has_the_same_gradient_on_all(
    lighthouse: LighthouseServer, settings: dict[str, Any], lost: int, init_sync: bool
) -> None:
    """With `init_sync` one of them heals in the first step."""

    def train(replica: Replica) -> Trained:
        return train_branches(replica, lambda _: replica.name, 3, **settings)

    one, other = on_both(lighthouse, Branches, train, init_sync=init_sync)
    assert one == other
    assert one[1:] == (lost, [[0.5] * 3, [0.5] * 3, None])


@pytest.mark.agreement
@pytest.mark.parametrize(
    ("settings", "of_unused"),
    [({"find_unused_parameters": True}, None), ({"static_graph": True}, [0.0] * 3)],
)
@pytest.mark.parametrize("init_sync", [False, True])
def test_so_it_has_with_torchs_own_class_over_a_managed_group(
    lighthouse: LighthouseServer, settings: dict[str, Any], of_unused: list[float] | None, init_sync: bool
) -> None:
    def train(replica: Replica) -> Trained:
        return train_branches(replica, lambda _: replica.name, 3, torchs_own, **settings)

    one, other = on_both(lighthouse, Branches, train, init_sync=init_sync)
    assert one == other
    assert one[1:] == (0, [[0.5] * 3, [0.5] * 3, of_unused])


class Counted(Branches):
    """Counts its forward passes in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: Tensor, branch: str) -> Tensor:
        self.seen += 1
        return super().forward(rows, branch)


@pytest.mark.agreement
@pytest.mark.parametrize("newcomer", ["a", "b"])
def test_a_newcomer_with_a_static_graph_and_buffers_costs_no_step_with_torchs_own_class(
    newcomer: str,
) -> None:
    """Rank 0 of the group, `a`, whose buffers torch sends, is the newcomer in one case."""
    lighthouse = LighthouseServer(min_replicas=1, join_timeout_ms=60_000)
    has_begun, last_step = threading.Event(), [math.inf]

    def train(name: str) -> Trained:
        model = Counted()
        if name == newcomer:
            assert has_begun.wait(LIMIT_S)
        with make_manager(
            lighthouse, name, model, min_replica_size=1, pg=ProcessGroupGloo(LIMIT_S)
        ) as manager:
            parallel = torchs_own(manager, model, static_graph=True)
            optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
            attempts = 0
            while manager.current_step() < last_step[0]:
                attempts += 1
                optimizer.zero_grad()
                parallel(torch.ones(1, 3), name).sum().backward()
                optimizer.step()
                if name == newcomer and manager.current_step() > 0:
                    last_step[0] = min(last_step[0], manager.current_step() + 3)
                elif manager.current_step() >= 3:
                    has_begun.set()
            lost = 0 if name == newcomer else attempts - manager.current_step()
        return state_digest(model.state_dict()), lost, []

    try:
        one, other = each_in_a_thread("ab", train)
    finally:
        lighthouse.shutdown()
    assert one == other
    assert one[1] == 0


class Both(Branches):
    """Uses all of its parameters, but on a branch."""

    def forward(self, rows: Tensor, branch: str) -> Tensor:
        if branch == "all":
            return self.a(rows) + self.b(rows) + self.unused(rows)  # type: ignore[no-any-return]
        return super().forward(rows, branch)


@pytest.mark.parametrize("searches_from_the_start", ["", "a"])
def test_parameters_left_out_cost_a_step(lighthouse: LighthouseServer, searches_from_the_start: str) -> None:
    """And none where that replica looks for them, though the other does not.

    The one that leaves them out sees it alone. The other may not have begun that step, which then costs it
    nothing.
    """

    def train(replica: Replica) -> Trained:
        searches = replica.name == searches_from_the_start
        leaves_out = replica.name == "a"
        return train_branches(
            replica,
            lambda step: "b" if leaves_out and step >= 3 else "all",
            6,
            find_unused_parameters=searches,
        )

    one, other = on_both(lighthouse, Both, train)
    assert (one[0], one[2]) == (other[0], other[2])
    assert one[1:] == (0 if searches_from_the_start else 1, [[0.5] * 3, [1.0] * 3, [0.5] * 3])
    assert other[1] == 0 or not searches_from_the_start


@pytest.mark.parametrize("searches", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_buckets_are_filled_in_the_order_of_the_backward_pass_and_stay_as_they_are(
    lighthouse: LighthouseServer, searches: bool, fails: bool
) -> None:
    """Also after a step that was given up. Without a search nothing but buckets is reduced, but for one
    question in each quorum.
    """
    width = 1 << 17  # half a MiB each; torch's compiler asks for buckets of a MiB at least

    class Sum(nn.ModuleList):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.stack([layer(rows) for layer in self]).sum()

    def make_model() -> nn.Module:
        return Sum([nn.Linear(width, 1, bias=False) for _ in range(5)])

    def train(replica: Replica) -> list[list[list[int]]]:
        parallel = DistributedDataParallel(
            replica.manager, replica.model, find_unused_parameters=searches, bucket_cap_mb=1.0
        )
        numbers = {id(one): number for number, one in enumerate(replica.model.parameters())}
        found: list[list[list[int]]] = []
        inner = parallel._reducers_group.allreduce_bucket

        def spy(bucket: Any) -> Any:
            found[-1].append([numbers[id(one)] for one in bucket.parameters()])
            return inner(bucket)

        others: list[Any] = []
        reduce = replica.manager.group_allreduce

        def count(*args: Any, **how: Any) -> Any:
            others.append(replica.manager.quorum_id)
            return reduce(*args, **how)

        replica.manager.group_allreduce = count  # type: ignore[method-assign]
        parallel._reducers_group.allreduce_bucket = spy  # type: ignore[method-assign]
        rows = torch.ones(1, width)
        for attempt in range(4):
            replica.manager.start_quorum()
            found.append([])
            total = parallel(rows)
            if fails and attempt == 1:
                continue  # the backward pass does not even begin
            total.backward()
            assert replica.manager.should_commit()
        assert searches or len(others) == len(set(others))
        return [buckets for buckets in found if buckets]

    for found in on_both(lighthouse, make_model, train):
        assert found == [[[3, 4], [1, 2], [0]]] * (3 if fails else 4)


class Stumbling(torch.autograd.Function):
    """Raises in the first backward pass that meets it."""

    @staticmethod
    def forward(context: Any, rows: Tensor, errors: list[Exception]) -> Tensor:
        context.errors = errors
        return rows.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.errors:
            raise context.errors.pop()
        return gradient, None


class Stumbler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, rows: Tensor, errors: list[Exception]) -> Tensor:
        result: Tensor = self.second(Stumbling.apply(self.first(rows), errors))  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_script_that_catches_an_error_of_the_backward_pass_goes_on(
    lighthouse: LighthouseServer, wrapper: Callable[..., nn.Module]
) -> None:
    def train(replica: Replica) -> tuple[str, int]:
        parallel = wrapper(replica.manager, replica.model)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))
        errors, caught = [ArithmeticError("stumbled")] if replica.name == "a" else [], 0
        while replica.manager.current_step() < 3:
            try:
                optimizer.zero_grad()
                parallel(torch.full((1, 3), float(ord(replica.name))), errors).sum().backward()
                optimizer.step()
            except ArithmeticError:
                caught += 1
        return state_digest(replica.model.state_dict()), caught

    (one, felt), (other, not_felt) = on_both(lighthouse, Stumbler, train)
    assert (felt, not_felt) == (1, 0)
    assert one == other


class Tripping(torch.optim.SGD):
    """Raises in its second step, when it has updated some parameters."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            raise ArithmeticError("tripped")
        super().step(closure)


def train_and_catch(replica: Replica, optimizer: Optimizer, expected: type[BaseException]) -> tuple[str, int]:
    """Four steps of a script that goes on after an error of the optimizer: its state, how often it did."""
    parallel = DistributedDataParallel(replica.manager, replica.model)
    caught = 0
    while replica.manager.current_step() < 4:
        optimizer.zero_grad()
        parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward()
        try:
            optimizer.step()
        except expected:
            caught += 1
    return state_digest(replica.model.state_dict()), caught


def test_a_script_that_catches_an_error_of_the_optimizer_heals(lighthouse: LighthouseServer) -> None:
    """The step is committed, and the parameters are not what it made of them."""

    def train(replica: Replica) -> tuple[str, int]:
        kind = Tripping if replica.name == "a" else torch.optim.SGD
        optimizer = Optimizer(replica.manager, kind(replica.model.parameters(), lr=0.1))
        return train_and_catch(replica, optimizer, ArithmeticError)

    (one, felt), (other, not_felt) = on_both(lighthouse, lambda: nn.Linear(3, 3), train)
    assert (felt, not_felt) == (1, 0)
    assert one == other


def test_a_script_interrupted_between_commit_and_optimizer_heals(lighthouse: LighthouseServer) -> None:
    """In a notebook, say, where the cell is then run again."""

    def train(replica: Replica) -> tuple[str, int]:
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))

        def interrupt(event: Event) -> None:
            told = (replica.name, event.kind, event.step, event.fields.get("committed"))
            if told == ("a", "commit", 2, True):
                raise KeyboardInterrupt

        replica.manager.events.subscribe(interrupt)
        return train_and_catch(replica, optimizer, KeyboardInterrupt)

    (one, felt), (other, not_felt) = on_both(lighthouse, lambda: nn.Linear(3, 3), train)
    assert (felt, not_felt) == (1, 0)
    assert one == other


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_gradients_are_final_when_the_backward_pass_returns(
    lighthouse: LighthouseServer, wrapper: Callable[..., nn.Module]
) -> None:
    """Whoever clips them, or lets a second pass add to them, needs that."""

    def train(replica: Replica) -> list[set[float]]:
        parallel = wrapper(replica.manager, replica.model)
        replica.manager.start_quorum()
        found = []
        for value in {"a": (1.0, 10.0), "b": (3.0, 30.0)}[replica.name]:
            parallel(torch.full((1, 1000), value)).sum().backward()
            found.append(gradient_of(replica.model))
        assert replica.manager.should_commit()
        return [*found, gradient_of(replica.model)]

    def gradient_of(model: nn.Module) -> set[float]:
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        return set(parameter.grad.flatten().tolist())

    def make_model() -> nn.Module:
        return nn.Linear(1000, 1000, bias=False)

    assert on_both(lighthouse, make_model, train) == [[{2.0}, {22.0}, {22.0}]] * 2


def test_a_parameter_that_is_added_or_unfrozen_later_is_reduced(lighthouse: LighthouseServer) -> None:
    def train(replica: Replica) -> str:
        first, second = replica.model.children()
        second.requires_grad_(False)
        parallel = PureDistributedDataParallel(replica.manager, replica.model)
        parameters = list(replica.model.parameters())
        optimizer = Optimizer(replica.manager, torch.optim.SGD(parameters, lr=0.1))
        while (step := replica.manager.current_step()) < 3:
            if step == 1:
                second.requires_grad_(True)
            if step == 2:
                first.bias = nn.Parameter(torch.zeros(3))
                optimizer.add_param_group({"params": [first.bias]})
            optimizer.zero_grad()
            parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward()
            optimizer.step()
        return state_digest(replica.model.state_dict())

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

    one, other = on_both(lighthouse, make_model, train)
    assert one == other


@pytest.mark.parametrize("newcomer", ["", "b"])
@pytest.mark.parametrize(
    "settings", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_a_parameter_that_is_unfrozen_later_is_in_a_bucket(settings: dict[str, Any], newcomer: str) -> None:
    """And a replica that comes later unfreezes it once it has healed."""
    lighthouse = LighthouseServer(min_replicas=1 if newcomer else 2, join_timeout_ms=60_000)
    is_unfrozen, last_step = threading.Event(), [math.inf if newcomer else 6]
    first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    first[0].requires_grad_(False)
    models = {"a": first, "b": copy.deepcopy(first)}

    def train(name: str) -> str:
        model = models[name]
        if name == newcomer:
            assert is_unfrozen.wait(LIMIT_S)
        with make_manager(
            lighthouse,
            name,
            model,
            min_replica_size=1,
            init_sync=bool(newcomer),
            pg=ProcessGroupGloo(LIMIT_S),
        ) as manager:
            parallel = DistributedDataParallel(manager, model, **settings)
            optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.001))
            while (step := manager.current_step()) < last_step[0]:
                if step >= 3:
                    model[0].requires_grad_(True)
                if step >= 5:
                    is_unfrozen.set()
                optimizer.zero_grad()
                parallel(torch.full((1, 3), float(ord(name)))).sum().backward()
                if optimizer.step() and name == newcomer:
                    last_step[0] = min(last_step[0], manager.current_step() + 3)
        return state_digest(model.state_dict())

    try:
        one, other = each_in_a_thread("ab", train)
    finally:
        lighthouse.shutdown()
    assert one == other


def test_a_model_may_be_on_another_device_than_torchs_default(lighthouse: LighthouseServer) -> None:
    def train(replica: Replica) -> str:
        with torch.device("meta"):
            return train_branches(replica, lambda _: "all", 2, OnItsDevice)[0]

    one, other = on_both(lighthouse, Both, train)
    assert one == other


class OnItsDevice(DistributedDataParallel):
    def forward(self, rows: Tensor, branch: str) -> Any:
        return super().forward(torch.ones(rows.shape, device="cpu"), branch)


def no_pass(parallel: Any, rows: Tensor) -> None:
    parameters = list(parallel.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(parallel(rows).sum(), parameters), strict=True
    ):
        parameter.grad = gradient


def pass_that_does_not_average(parallel: Any, rows: Tensor) -> None:
    with parallel.no_sync():
        parallel(rows).sum().backward()


def pass_that_averages_too_early(parallel: Any, rows: Tensor) -> None:
    parallel(rows).sum().backward()
    pass_that_does_not_average(parallel, rows)


def second_pass(parallel: Any, rows: Tensor) -> None:
    loss = parallel(rows).sum()
    loss.backward(retain_graph=True)
    loss.square().backward()


def pass_of_the_module(parallel: Any, rows: Tensor) -> None:
    parallel(rows).sum().backward()
    parallel.module(rows).sum().backward()


@pytest.mark.parametrize(
    ("train", "wrapper", "words"),
    [
        (no_pass, DistributedDataParallel, "manager.allreduce"),
        (no_pass, PureDistributedDataParallel, "manager.allreduce"),
        (pass_that_does_not_average, DistributedDataParallel, "outside of no_sync"),
        (pass_that_averages_too_early, DistributedDataParallel, "last pass be outside of no_sync"),
        (second_pass, DistributedDataParallel, "Add up losses"),
        (second_pass, PureDistributedDataParallel, ""),
        (pass_of_the_module, DistributedDataParallel, "call the wrapper"),
        (pass_of_the_module, PureDistributedDataParallel, ""),
    ],
)
def test_no_optimizer_steps_with_gradients_of_one_replica(
    lighthouse: LighthouseServer,
    train: Callable[[Any, Tensor], None],
    wrapper: Callable[..., nn.Module],
    words: str,
) -> None:
    def act(replica: Replica) -> str:
        parallel = wrapper(replica.manager, replica.model)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))
        before = state_digest(replica.model.state_dict())
        optimizer.zero_grad()
        train(parallel, torch.full((1, 3), float(ord(replica.name))))
        if not words:
            assert optimizer.step()
            return state_digest(replica.model.state_dict())
        with pytest.raises(NotSupportedError, match=words):
            optimizer.step()
        assert state_digest(replica.model.state_dict()) == before
        optimizer.zero_grad()
        parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward()
        optimizer.step()  # whether or not the other one is in this step
        return ""

    one, other = on_both(lighthouse, lambda: nn.Linear(3, 3), act, min_replica_size=1)
    assert one == other


def test_gradients_that_a_script_averages_itself_are_stepped_with_and_those_of_another_optimizer_are_not_seen(
    lighthouse: LighthouseServer,
) -> None:
    def train(replica: Replica) -> str:
        generator, critic = replica.model.children()
        parallel = DistributedDataParallel(replica.manager, generator)
        judge: Any = DistributedDataParallel(replica.manager, critic)
        optimizers = [
            Optimizer(replica.manager, torch.optim.SGD(part.parameters(), lr=0.1))
            for part in (generator, critic)
        ]
        rows = torch.full((1, 3), float(ord(replica.name)))
        optimizers[0].zero_grad()
        judge.module(parallel(rows)).sum().backward()  # adds gradients to the critic, which are cleared
        assert optimizers[0].step()
        optimizers[1].zero_grad()
        no_pass(judge, rows)
        for parameter in critic.parameters():
            assert parameter.grad is not None
            replica.manager.allreduce(parameter.grad).wait()
        assert optimizers[1].step()
        return state_digest(replica.model.state_dict())

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    one, other = on_both(lighthouse, make_model, train)
    assert one == other


def test_parts_of_a_module_that_are_frozen_in_turns_keep_no_hooks(lighthouse: LighthouseServer) -> None:
    """As those of a GAN under one wrapper: each turn has a reducer of its own."""

    def train(replica: Replica) -> tuple[str, list[int]]:
        parallel = DistributedDataParallel(replica.manager, replica.model)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.001))
        counts = []
        while (step := replica.manager.current_step()) < 6:
            for number, part in enumerate(replica.model.children()):
                part.requires_grad_(number == step % 2)
            optimizer.zero_grad()
            parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward()
            optimizer.step()
            hooks = [parameter._post_accumulate_grad_hooks for parameter in replica.model.parameters()]
            counts.append(max(len(each) for each in hooks if each is not None))
        return state_digest(replica.model.state_dict()), counts

    one, other = on_both(lighthouse, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), train)
    assert one == other
    assert set(one[1]) == {1}


def test_a_step_of_several_passes_that_leave_parameters_out_is_lost_once(
    lighthouse: LighthouseServer,
) -> None:
    def train(replica: Replica) -> tuple[str, int]:
        parallel = DistributedDataParallel(replica.manager, replica.model)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.001))
        attempts = 0
        while replica.manager.current_step() < 3:
            attempts += 1
            optimizer.zero_grad()
            for _ in range(3):
                parallel(torch.full((1, 3), float(ord(replica.name))), replica.name).sum().backward()
            optimizer.step()
        return state_digest(replica.model.state_dict()), attempts

    one, other = on_both(lighthouse, Branches, train)
    assert one == other
    assert one[1] == 4


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 0.0001}])
def test_the_step_in_which_a_parameter_is_frozen_may_be_given_up(
    lighthouse: LighthouseServer, settings: dict[str, Any]
) -> None:
    """The reducer has the parameter still, and the buckets of the other replica's."""

    def train(replica: Replica) -> str:
        parallel = DistributedDataParallel(replica.manager, replica.model, **settings)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.001))
        gives_up = replica.name == "a"
        while (step := replica.manager.current_step()) < 4:
            next(replica.model.children()).requires_grad_(step < 2)
            optimizer.zero_grad()
            parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward()
            if step == 2 and gives_up:
                gives_up = False
                continue
            optimizer.step()
        return state_digest(replica.model.state_dict())

    one, other = on_both(lighthouse, lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]), train)
    assert one == other


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_gradients_of_a_parameter_that_several_wrappers_have_are_averaged_once(
    lighthouse: LighthouseServer, wrapper: Callable[..., nn.Module]
) -> None:
    """As of an encoder with two heads, and of a module that is wrapped again."""

    def train(replica: Replica) -> str:
        encoder, *heads = replica.model.children()
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))
        rows = torch.full((1, 3), float(ord(replica.name)))
        parallel = [wrapper(replica.manager, nn.Sequential(encoder, head)) for head in (*heads, *heads)]
        for used in ([0], [1], [0], [0, 1], [2], [3, 0]):
            optimizer.zero_grad()
            for one in used:
                parallel[one](rows).sum().backward()
            assert optimizer.step()
        return state_digest(replica.model.state_dict())

    one, other = on_both(lighthouse, lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]), train)
    assert one == other


def test_a_step_of_which_some_buckets_are_not_reduced_is_not_committed(lighthouse: LighthouseServer) -> None:
    """Though unused parameters are looked for: these are used, and `backward` was told to leave them out."""

    def train(replica: Replica) -> bool:
        parallel = DistributedDataParallel(replica.manager, replica.model, find_unused_parameters=True)
        optimizer = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))
        optimizer.zero_grad()
        first = next(replica.model.parameters())
        parallel(torch.full((1, 3), float(ord(replica.name)))).sum().backward(inputs=[first])
        return optimizer.step()

    assert on_both(lighthouse, lambda: nn.Linear(3, 3), train) == [False, False]


def test_a_copy_of_the_wrapper_is_a_module_that_reduces_nothing(lighthouse: LighthouseServer) -> None:
    def gradient_of(module: nn.Module, rows: Tensor) -> float:
        (parameter,) = module.parameters()
        parameter.grad = None
        module(rows).sum().backward()
        assert isinstance(parameter.grad, Tensor)
        return float(parameter.grad)

    def copy_it(replica: Replica) -> list[float]:
        rows = torch.full((1, 1), {"a": 1.0, "b": 3.0}[replica.name])
        parallel = PureDistributedDataParallel(replica.manager, replica.model)
        replica.manager.start_quorum()
        found = [gradient_of(parallel, rows)]
        copies = [copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))]
        found += [gradient_of(copied, rows) for copied in copies]
        assert replica.manager.should_commit()
        return found

    results = on_both(lighthouse, lambda: nn.Linear(1, 1, bias=False), copy_it)
    assert results == [[2.0, 1.0, 1.0], [2.0, 3.0, 3.0]]


def gave(replica: Replica, **settings: Any) -> str:
    with pytest.raises(NotSupportedError) as raised:
        DistributedDataParallel(replica.manager, replica.model, **settings)
    return str(raised.value)


def test_settings_by_which_replicas_reduce_other_things_are_refused(lighthouse: LighthouseServer) -> None:
    def refuse(replica: Replica) -> tuple[str, str]:
        (parameter,) = replica.model.parameters()
        delayed = [("weight", parameter)]
        return gave(replica, static_graph=True), gave(
            replica, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=parameter
        )

    static, delayed = on_both(lighthouse, lambda: nn.Linear(1, 1, bias=False), refuse)[0]
    assert "static_graph" in static
    assert "delay_all_reduce_named_params" in delayed


def test_a_hook_in_the_place_of_the_managers_a_join_and_a_copy_are_refused(
    lighthouse: LighthouseServer,
) -> None:
    def register(replica: Replica) -> None:
        parallel = DistributedDataParallel(replica.manager, replica.model)
        with pytest.raises(NotSupportedError, match="should_quantize"):
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for wrapped in (parallel, torchs_own(replica.manager, copy.deepcopy(replica.model))):
            with pytest.raises(NotSupportedError, match="shuts its Manager down"):
                wrapped.join()
            with pytest.raises(NotSupportedError, match="shuts its Manager down"):
                Join([wrapped])
        with pytest.raises(NotSupportedError, match="save its `module`"):
            copy.deepcopy(parallel)

    on_both(lighthouse, lambda: nn.Linear(1, 1, bias=False), register)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a module of torch's that is loaded here
def test_an_optimizer_that_shares_parameters_out_among_replicas_is_refused() -> None:
    model, kind = nn.Linear(2, 2), import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    posts = import_module("torch.distributed.optim").PostLocalSGDOptimizer
    averagers = import_module("torch.distributed.algorithms.model_averaging.averagers")
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(lighthouse, "a", model, min_replica_size=1) as manager,
        fake_world(1),
    ):
        manager.start_quorum()
        group = ManagedProcessGroup(manager)
        group.register("replicas")
        over = {"replicas": group, "a replica group": dist.group.WORLD}
        sharing = {
            name: kind(model.parameters(), torch.optim.SGD, process_group=each, lr=0.1)
            for name, each in over.items()
        }
        with pytest.raises(NotSupportedError, match="once that replica is gone"):
            Optimizer(manager, sharing["replicas"])
        Optimizer(manager, sharing["a replica group"])
        averages = [averagers.PeriodicModelAverager(period=2, process_group=each) for each in over.values()]
        steps = [posts(torch.optim.SGD(model.parameters(), lr=0.1), average) for average in averages]
        with pytest.raises(NotSupportedError, match="LocalSGD or DiLoCo"):
            Optimizer(manager, steps[0])
        Optimizer(manager, steps[1])
        assert manager.should_commit()
        group.unregister()


def test_a_scaler_unscales_by_the_peers_scale_where_a_replica_heals_before_the_forward_pass(
    lighthouse: LighthouseServer,
) -> None:
    """One heals in the first step, and a gradient is infinite later: both leave that step out."""

    def train(replica: Replica) -> tuple[str, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale={"a": 8.0, "b": 1024.0}[replica.name])
        replica.manager.register_state_dict_fn("scaler", scaler.load_state_dict, scaler.state_dict)
        parallel = DistributedDataParallel(replica.manager, replica.model)
        optimizer = Optimizer(replica.manager, torch.optim.AdamW(replica.model.parameters()))
        spoils = replica.name == "a"
        while (step := replica.manager.current_step()) < 4:
            optimizer.zero_grad()
            factor = float("inf") if spoils and step == 2 else 1.0
            spoils = spoils and step != 2
            scaler.scale(parallel(torch.ones(2, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        digest = state_digest({"model": replica.model.state_dict(), "scaler": scaler.state_dict()})
        return digest, scaler.get_scale()

    one, other = on_both(lighthouse, lambda: nn.Linear(3, 1), train, init_sync=True, use_async_quorum=False)
    assert one == other
    assert one[1] in {4.0, 512.0}


def test_a_pipeline_that_computes_gradients_past_the_hooks_is_refused(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is imported once there is the model."""
    name = "backward_maybe_with_nosync"
    method = getattr(_PipelineStageBase, name)
    together = threading.Barrier(2)
    monkeypatch.setattr(_PipelineStageBase, name, method)  # as it is after this test

    def refuse(replica: Replica) -> None:
        for wrap in (DistributedDataParallel, PureDistributedDataParallel):
            stage: Any = SimpleNamespace(submod=wrap(replica.manager, replica.model))
            together.wait(PATIENCE_S)
            setattr(_PipelineStageBase, name, inspect.unwrap(method))
            together.wait(PATIENCE_S)
            stage.submod(torch.ones(1))
            with pytest.raises(NotSupportedError, match=f"{wrap.__name__} averages them"):
                _PipelineStageBase.backward_maybe_with_nosync(stage, "weight", {"param_groups": []})

    on_both(lighthouse, lambda: nn.Linear(1, 1, bias=False), refuse)


@pytest.mark.parametrize("kind", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_model_that_is_let_go_with_its_wrapper_is_gone(kind: Callable[[Any, nn.Module], nn.Module]) -> None:
    """An in-process restart makes another one in each try."""
    with lighthouse_here(min_replicas=1) as lighthouse:
        model = nn.Linear(2, 2)
        with make_manager(lighthouse, "a", model, min_replica_size=1) as manager:
            manager.start_quorum()
            wrapper = kind(manager, model)
            wrapper(torch.ones(1, 2)).sum().backward()
            assert manager.should_commit()
        left = weakref.ref(model.weight)
        del model, wrapper, manager
        gc.collect()
        assert left() is None
