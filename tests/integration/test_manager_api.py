"""The Manager's public surface, with real servers and Gloo inside one process: a thread per replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lighthouse.address import parse_address
from tests.conftest import ROOT
from tests.fake_world import fake_world
from tests.faults import raising
from tests.managers import each_in_a_thread, lighthouse_here, manager_alone
from tests.pages import blocks
from tests.stores import serve_store
from torchft_like import (
    ConfigError,
    DistributedDataParallel,
    GroupLostError,
    LighthouseServer,
    ManagedProcessGroup,
    Manager,
    MaxRetriesError,
    NotSupportedError,
    Optimizer,
    ProcessGroupGloo,
    PureDistributedDataParallel,
    QuorumTimeoutError,
    ShutdownError,
)
from torchft_like.checkpointing import HTTPTransport
from torchft_like.collectives import ErrorFeedback
from torchft_like.core.replica_group import RankJoin
from torchft_like.core.step import Share
from torchft_like.digest import state_digest
from torchft_like.errors import CheckpointFormatError
from torchft_like.manager import group_store, quorum_driver
from torchft_like.testing.processes import holds_within

pytestmark = pytest.mark.integration

LIMIT_S = 60.0

T = TypeVar("T")


def make_manager(lighthouse: LighthouseServer, name: str, model: nn.Module, **settings: Any) -> Manager:
    given = {"min_replica_size": 2, "init_sync": True, **settings}
    return manager_alone(name, lighthouse.address(), model, **given)


def ignore(_: object) -> None:
    """A state that is not looked at."""


def on_both(work: Callable[[str], T]) -> list[T]:
    return each_in_a_thread("ab", work)


class SmallCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations of one number are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.called.add((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_a_manager_calls_a_vector_function_before_threads_may_do_it_together(
    lighthouse: LighthouseServer,
) -> None:
    with SmallCalls() as noted, make_manager(lighthouse, "a", nn.Linear(1, 1)):
        pass
    assert ("sqrt", torch.float32) in noted.called


def test_an_average_divides_by_the_participants_and_a_sum_does_not(lighthouse: LighthouseServer) -> None:
    def reduce(name: str) -> tuple[list[float], list[int]]:
        value = {"a": 1.0, "b": 3.0}[name]
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            manager.start_quorum()
            mean, total = torch.full((2,), value), torch.full((2,), int(value))
            manager.allreduce(mean).wait()
            manager.allreduce(total, reduce_op=torch.distributed.ReduceOp.SUM).wait()
            with pytest.raises(ValueError, match="int64"):
                manager.allreduce(total)
            assert manager.should_commit()
            return mean.tolist(), total.tolist()

    assert on_both(reduce) == [([2.0, 2.0], [4, 4])] * 2


def test_of_a_dtensor_each_rank_averages_its_part(lighthouse: LighthouseServer) -> None:
    with fake_world(2):
        mesh = DeviceMesh("cpu", [0, 1])

    def reduce(name: str) -> list[float]:
        part = torch.full((2,), {"a": 1.0, "b": 3.0}[name])
        gradient = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            manager.start_quorum()
            manager.allreduce(gradient).wait()
            dist.all_reduce(gradient, group=ManagedProcessGroup(manager))
            assert manager.should_commit()
        values: list[float] = gradient.to_local().tolist()
        return values

    assert on_both(reduce) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("quantize", [True, "fp8", "int8"])
def test_quantized_averages_are_the_same_bits_and_other_collectives_come_after_them(
    lighthouse: LighthouseServer, quantize: bool | str
) -> None:
    def reduce(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(ord(name))
        own = [torch.randn(size, generator=generator) for size in (1000, 7, 0, 70_000)]
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            manager.start_quorum()
            means, plain = [tensor.clone() for tensor in own], own[0].clone()
            total = own[1].clone()
            works = [manager.allreduce(mean, should_quantize=quantize) for mean in means]
            works.append(manager.allreduce(plain))
            works.append(manager.allreduce(total, should_quantize=quantize, reduce_op=ReduceOp.SUM))
            with pytest.raises(NotSupportedError, match="SUM and AVG"):
                manager.allreduce(plain, should_quantize=quantize, reduce_op=ReduceOp.MAX)
            with pytest.raises(ValueError, match="int64"):
                manager.allreduce(torch.ones(1, dtype=torch.int64), quantize, ReduceOp.SUM)
            with pytest.raises(ValueError, match="int2"):
                manager.allreduce(plain, should_quantize="int2")
            if name == "a":
                for work in reversed(works):
                    work.wait()
            assert manager.should_commit()
            return own, [*means, plain, total]

    (own_a, got_a), (own_b, got_b) = on_both(reduce)
    assert all(map(torch.equal, got_a, got_b))
    exact = [(a + b) / 2 for a, b in zip(own_a, own_b, strict=True)]
    torch.testing.assert_close(got_a[4], exact[0])
    for got, wanted in zip([*got_a[:4], got_a[5] / 2], [*exact, exact[1]], strict=True):
        torch.testing.assert_close(got, wanted, atol=0.5, rtol=0)
        assert torch.equal(got, wanted) == (not got.numel()), "it was quantized"


def test_what_quantizing_leaves_counts_in_the_next_step_if_this_one_is_committed(
    lighthouse: LighthouseServer,
) -> None:
    def train(name: str) -> list[torch.Tensor]:
        feedback, results = ErrorFeedback(), list[torch.Tensor]()
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            for step in range(3):
                manager.start_quorum()
                mean = torch.linspace(0.0, 1.0, 300)
                manager.allreduce(mean, "int8", error_feedback=feedback).wait()
                if step == 0:
                    manager.report_error(RuntimeError("this step is lost"))
                assert manager.should_commit() == (step > 0)
                results.append(mean)
            return results

    for lost, first, second in on_both(train):
        assert torch.equal(lost, first)
        assert not torch.equal(first, second)
        exact = torch.linspace(0.0, 1.0, 300)
        assert ((first + second) / 2 - exact).abs().mean() < 0.7 * (first - exact).abs().mean()


@pytest.mark.no_zombie
@pytest.mark.parametrize("waits", [True, False])
def test_a_quantized_average_without_its_peer_ends_with_its_step(
    lighthouse: LighthouseServer, waits: bool
) -> None:
    """The peer gives its step up, and asks for another quorum, before it has sent anything."""
    has_sent = threading.Event()

    def train(name: str) -> list[Any]:
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            manager.start_quorum()
            manager.wait_quorum()
            first = manager.quorum_id
            if name == "a":
                lost = torch.full((300,), 5.0)
                work = manager.allreduce(lost, should_quantize="int8")
                has_sent.set()
                if waits:
                    work.wait()
                    assert not manager.should_commit()
            else:
                assert has_sent.wait(LIMIT_S)
            while True:
                manager.start_quorum()
                mean = torch.full((300,), {"a": 1.0, "b": 3.0}[name])
                manager.allreduce(mean, should_quantize="int8").wait()
                if manager.should_commit():
                    return [manager.quorum_id > first, mean]

    (is_newer, mean), (is_newer_too, other) = on_both(train)
    assert [is_newer, is_newer_too] == [True, True]
    assert torch.equal(mean, other)
    torch.testing.assert_close(mean, torch.full((300,), 2.0))


def test_a_replica_that_heals_has_no_part_in_any_reduction(lighthouse: LighthouseServer) -> None:
    dtypes = {ReduceOp.BAND: torch.int64, ReduceOp.MIN: torch.int64, ReduceOp.PRODUCT: torch.float32}

    def reduce(name: str) -> tuple[bool, list[float]]:
        with make_manager(lighthouse, name, nn.Linear(1, 1)) as manager:
            manager.start_quorum()
            operations = [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BAND, ReduceOp.SUM]
            value = {"a": -3, "b": -5}[name]
            results = [torch.tensor([value], dtype=dtypes.get(op, torch.float32)) for op in operations]
            for tensor, operation in zip(results, operations, strict=True):
                manager.allreduce(tensor, reduce_op=operation)
            results.append(torch.tensor([float(value)]))
            manager.allreduce(results[-1], should_quantize="int8", reduce_op=ReduceOp.SUM)
            assert manager.should_commit()
            return manager.is_participating(), [round(float(tensor), 3) for tensor in results]

    results = dict(on_both(reduce))
    assert results.keys() == {True, False}
    assert results[True] == results[False]
    assert len(set(results[True])) == 1
    assert results[True][0] in (-3, -5)


@pytest.mark.parametrize("init_sync", [True, False])
def test_a_replica_with_nothing_to_heal_with_is_told(lighthouse: LighthouseServer, init_sync: bool) -> None:
    """It would go on with a state of its own, and commit."""

    def train(name: str) -> str:
        stateless: dict[str, Any] = {"load_state_dict": None, "state_dict": None, "init_sync": init_sync}
        with make_manager(lighthouse, name, nn.Linear(1, 1), **stateless) as manager:
            manager.start_quorum()
            try:
                return str(manager.should_commit())
            except ConfigError as error:
                return str(error)

    for outcome in on_both(train):
        assert ("register_state_dict_fn" in outcome) if init_sync else (outcome == "True")


def test_a_replica_that_gives_a_step_up_joins_again_when_the_first_join_was_answered(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an exception in the forward pass. The second would be a join for the step after this one."""
    joined, others_joined = threading.Semaphore(0), threading.Event()
    at_joins: list[bool] = []

    def train(name: str) -> int:
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            if name == "b":
                assert joined.acquire(timeout=LIMIT_S)
                assert not joined.acquire(timeout=0.2)
                others_joined.set()
            else:
                join = manager._link.join
                monkeypatch.setattr(manager._link, "join", lambda what: noted(join, what))
                manager.start_quorum()
            while manager.current_step() < 2:
                manager.start_quorum()
                manager.should_commit()
            return manager.current_step()

    def noted(join: Callable[[Any], None], what: Any) -> None:
        at_joins.append(others_joined.is_set())
        joined.release()
        join(what)

    assert on_both(train) == [2, 2]
    assert at_joins[:2] == [False, True]


@pytest.mark.progress
def test_nobody_waits_for_a_replica_that_leaves_while_a_request_that_it_gave_up_is_answered(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a QuorumTimeoutError just before the answer: it has asked twice, and both are answered."""
    a, b = (
        make_manager(lighthouse, name, nn.Linear(1, 1), min_replica_size=1, init_sync=False) for name in "ab"
    )
    ask, requests = a._link.join, list[RankJoin]()
    monkeypatch.setattr(a._link, "join", requests.append)
    for manager in (a, b):
        manager.start_quorum()
    ask(requests[0])
    for manager in (a, b):  # or the error of b ends the group while a still configures it
        manager.wait_quorum()
    b.report_error(RuntimeError("of b alone, so that the next quorum has another id"))
    assert [manager.should_commit() for manager in (a, b)] == [True, False]
    b.start_quorum()
    ask(requests[0])
    assert holds_within(LIMIT_S, lambda: b._driver.attempt is not None and b._driver.attempt.is_agreed)
    a.shutdown()
    is_told = holds_within(LIMIT_S, lambda: b._driver.attempt is not None and b._driver.attempt.is_configured)
    b.shutdown()
    assert is_told, "it waits for its timeout, which is longer"


def test_a_replica_that_lets_nobody_in_goes_on_in_a_quorum_that_stands(lighthouse: LighthouseServer) -> None:
    """It would have to ask at a step that the other one may have begun."""

    def train(name: str) -> tuple[list[bool], int]:
        asked: list[int] = []
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            join = manager._link.join

            def count(asks: RankJoin) -> None:
                asked.append(asks.step)
                join(asks)

            manager._link.join = count  # type: ignore[method-assign, assignment]
            committed = []
            for step in range(30):
                manager.start_quorum(shrink_only=name == "a" and step % 3 == 0)
                manager.allreduce(torch.ones(1)).wait()
                committed.append(manager.should_commit())
            return committed, len([step for step in asked if step > 3])

    assert on_both(train) == [([True] * 30, 0)] * 2


def test_a_step_ends_once(lighthouse: LighthouseServer) -> None:
    """A second optimizer that asks once more would count the step twice."""

    def train(name: str) -> int:
        with make_manager(lighthouse, name, nn.Linear(1, 1), init_sync=False) as manager:
            manager.start_quorum()
            assert manager.should_commit()
            with pytest.raises(RuntimeError, match="once"):
                manager.should_commit()
            return manager.current_step()

    assert on_both(train) == [1, 1]


def test_a_state_that_cannot_travel_once_the_optimizer_has_stepped_is_an_error_of_the_second_step() -> None:
    state: dict[str, object] = {}
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(
            lighthouse, "a", nn.Linear(1, 1), min_replica_size=1, state_dict=lambda: state
        ) as manager,
    ):
        manager.start_quorum()
        assert manager.should_commit()
        state["projection"] = object()
        with pytest.raises(CheckpointFormatError, match="projection is an object, which does not travel"):
            manager.start_quorum()
        del state["projection"]
        manager.start_quorum()
        assert manager.should_commit()


@pytest.mark.filterwarnings("ignore")  # Dynamo and what it traces warn of each other
def test_a_whole_step_may_be_compiled() -> None:
    torch._dynamo.reset()
    model = nn.Linear(1, 1)
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(lighthouse, "a", model, min_replica_size=1) as manager,
    ):
        average, optimizer = (
            DistributedDataParallel(manager, model),
            Optimizer(manager, torch.optim.SGD(model.parameters())),
        )

        @torch.compile(backend="eager")
        def step(inputs: torch.Tensor) -> bool:
            optimizer.zero_grad()
            loss = average(inputs).sum()
            loss.backward()
            manager.allreduce(loss.detach()).wait()
            return optimizer.step()

        weights = [model.weight.item()]
        for number in (1, 2):
            assert step(torch.ones(1, 1))
            assert manager.current_step() == number
            weights.append(model.weight.item())
    assert len(set(weights)) == 3


class Scaled(nn.Module):
    """A module in whose forward pass Dynamo finds something to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_compiled_wrapper_is_compiled_once_whatever_the_steps_are_like(
    wrapper: Callable[..., nn.Module],
) -> None:
    torch._dynamo.reset()
    graphs, model = [], Scaled()

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(lighthouse, "a", model, min_replica_size=1) as manager,
    ):
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters()))
        compiled = torch.compile(wrapper(manager, model), backend=keep)

        def step(*, clears: bool = True, gives_up: bool = False) -> None:
            optimizer.zero_grad(set_to_none=clears)
            compiled(torch.ones(1)).sum().backward()
            compiled(torch.ones(1))
            if not gives_up:
                assert optimizer.step()

        step()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for kind in ({"clears": False}, {"gives_up": True}, {}, {"gives_up": True}, {}):
                step(**kind)
        assert manager.steps_given_up == 2
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_compiled_backward_pass_averages_each_gradient() -> None:
    torch._dynamo.reset()
    model = Scaled()
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(lighthouse, "a", model, min_replica_size=1) as manager,
        torch._dynamo.config.patch(compiled_autograd=True),
    ):
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters()))
        average = PureDistributedDataParallel(manager, model)

        @torch.compile(backend="eager")
        def train() -> None:
            average(torch.ones(1)).sum().backward()

        for number in (1, 2, 3):
            optimizer.zero_grad()
            train()
            assert manager.has_reduced
            assert optimizer.step()
            assert manager.current_step() == number


def test_gradients_are_not_reduced_past_the_manager(lighthouse: LighthouseServer) -> None:
    model, in_python = nn.Linear(1, 1), torch._dynamo.config.patch(optimize_ddp="python_reducer")
    refused = pytest.raises(NotSupportedError, match="PureDistributedDataParallel")
    with make_manager(lighthouse, "a", model) as manager, in_python, refused:
        DistributedDataParallel(manager, model)


def test_a_transport_without_a_host_serves_where_the_manager_does(lighthouse: LighthouseServer) -> None:
    transport: HTTPTransport[object] = HTTPTransport(timedelta(seconds=60))
    settings = {"checkpoint_transport": transport, "hostname": "127.0.0.2"}
    with make_manager(lighthouse, "a", nn.Linear(1, 1), **settings):
        assert parse_address(transport.metadata()).host == "127.0.0.2"


def test_a_reported_error_spoils_the_step_and_max_retries_ends_it(lighthouse: LighthouseServer) -> None:
    both_began = threading.Barrier(2)

    def fail(name: str) -> str:
        with make_manager(lighthouse, name, nn.Linear(1, 1), max_retries=1) as manager:
            manager.start_quorum()
            manager.wait_quorum()
            manager.report_error(ValueError("loss is nan"))
            assert manager.errored() is not None, "the peer's abort may have come first"
            assert not manager.should_commit()
            assert manager.current_step() == 0
            manager.start_quorum()
            assert manager.errored() is None
            both_began.wait(LIMIT_S)
            manager.report_error(ValueError("loss is nan"))
            with pytest.raises(MaxRetriesError) as raised:
                manager.should_commit()
            return str(raised.value)

    told = on_both(fail)
    assert any("loss is nan" in text for text in told), "at one of them no abort of the other came first"


def test_too_few_participants_for_long_are_named_by_the_error() -> None:
    with (
        lighthouse_here(min_replicas=1) as lighthouse,
        make_manager(lighthouse, "alone", nn.Linear(1, 1), max_retries=0) as manager,
    ):
        manager.start_quorum()
        with pytest.raises(MaxRetriesError, match="1 replica group took part in it, and min_replica_size"):
            manager.should_commit()


def test_ranks_that_give_up_before_they_meet_leave_nobody_waiting(lighthouse: LighthouseServer) -> None:
    """Each spoils the step for the other rank of its group, which would wait in `configure` for a peer."""
    spoilers = {("a", 0), ("b", 1)}
    stores = {name: serve_store() for name in "ab"}

    def train(name: str, rank: int) -> list[bool]:
        model, port = nn.Linear(4, 4), stores[name].port
        with make_manager(
            lighthouse, name, model, rank=rank, world_size=2, store_addr="127.0.0.1", store_port=port
        ) as manager:
            votes: list[bool] = []
            while manager.current_step() < 2:
                manager.start_quorum()
                if not votes and (name, rank) in spoilers:
                    manager.report_error(RuntimeError("a spoiled step"))
                votes.append(manager.should_commit())
            return votes

    with ThreadPoolExecutor(4) as threads:
        training = {(n, r): threads.submit(train, n, r) for n in "ab" for r in range(2)}
        done, _ = wait(training.values(), timeout=40.0)  # that of the process groups is 60 s
        assert len(done) == 4, [who for who, future in training.items() if not future.done()]
    votes = [future.result() for future in training.values()]
    assert all(v[0] is False and v[-2:] == [True, True] for v in votes)


@pytest.mark.leave_together
@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
def test_a_group_of_which_one_rank_is_asked_to_stop_leaves_where_no_quorum_comes(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool
) -> None:
    """Its other rank is told, too, wherever it waits. Nobody waits for `quorum_timeout`."""
    monkeypatch.setattr(quorum_driver, "STOP_WAIT_S", 0.2)
    store, collective = serve_store(), threading.Barrier(2)

    def train(rank: int) -> tuple[bool, bool]:
        model = nn.Linear(4, 4)
        place: dict[str, Any] = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        with make_manager(
            lighthouse,
            "a",
            model,
            rank=rank,
            use_async_quorum=use_async_quorum,
            quorum_timeout=20.0,
            max_retries=0,
            **place,
        ) as manager:
            if rank == 1:
                manager.request_stop()
            manager.start_quorum()
            assert manager.share_of_step() == Share(None, 1, 1)
            assert manager.num_participants() == 1  # by which scripts divide
            manager.allreduce(torch.ones(4)).wait()
            collective.wait(LIMIT_S)  # of the ranks of the group, as in a backward pass
            return manager.should_commit(), manager.stop_agreed

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [(False, True)] * 2


@pytest.mark.leave_together
@pytest.mark.parametrize("is_late", [False, True], ids=["", "late"])
def test_ranks_leave_though_they_hold_for_a_lighthouse_that_is_gone(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of each group is asked to stop; the other one holds by then, or begins its step later."""
    monkeypatch.setattr(quorum_driver, "STOP_WAIT_S", 0.2)
    stores = {name: serve_store() for name in "ab"}
    meet = threading.Barrier(4)

    def train(name: str, rank: int) -> tuple[bool, bool]:
        settings: dict[str, Any] = {
            "lighthouse_absence": "wait",
            "quorum_timeout": LIMIT_S,
            "max_retries": 0,
            "rank": rank,
            "world_size": 2,
            "store_addr": "127.0.0.1",
            "store_port": stores[name].port,
        }
        with make_manager(lighthouse, name, nn.Linear(1, 1), **settings) as manager:
            for _ in range(3):  # the quorum stands
                manager.start_quorum()
                manager.allreduce(torch.ones(4)).wait()
                assert manager.should_commit()
            if meet.wait(LIMIT_S) == 0:
                lighthouse.shutdown()
            assert holds_within(LIMIT_S, lambda: manager._protocol._is_held)
            if is_late and rank == 0:
                meet.wait(LIMIT_S)
            manager.start_quorum()
            if not is_late:
                meet.wait(LIMIT_S)
            if rank == 1:
                manager.request_stop()
            manager.allreduce(torch.ones(4)).wait()
            outcome = manager.should_commit(), manager.stop_agreed
            if is_late and rank == 1:
                meet.wait(LIMIT_S)
            meet.wait(LIMIT_S)
            return outcome

    with lighthouse_here() as lighthouse, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(train, "aabb", (0, 1, 0, 1))) == [(False, True)] * 4


@pytest.mark.leave_together
@pytest.mark.parametrize("asked", [0, 1])
def test_a_rank_that_begins_its_step_once_the_one_that_was_asked_to_stop_has_left_leaves_in_order(
    asked: int, lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rank 0 the group's server has left, and with rank 1 the group is over for it."""
    monkeypatch.setattr(quorum_driver, "STOP_WAIT_S", 0.2)
    store, are_there = serve_store(), threading.Barrier(2)

    def train(rank: int) -> tuple[bool, bool]:
        place: dict[str, Any] = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        with make_manager(
            lighthouse, "a", nn.Linear(1, 1), rank=rank, quorum_timeout=LIMIT_S, **place
        ) as manager:
            are_there.wait(LIMIT_S)
            if rank == asked:
                manager.request_stop()
            else:
                link: Any = manager._link
                is_over = (lambda: link.group.lost_reason) if asked == 1 else (lambda: link._closing)
                assert holds_within(LIMIT_S, is_over)
            manager.start_quorum()
            return manager.should_commit(), manager.stop_agreed

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [(False, True)] * 2


@pytest.mark.leave_together
def test_a_rank_that_was_told_to_leave_does_so_also_where_its_script_skips_the_end_of_the_step(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then rank 0 has left, and with it their server."""
    monkeypatch.setattr(quorum_driver, "STOP_WAIT_S", 0.2)
    store, has_left = serve_store(), threading.Event()

    def train(rank: int) -> bool:
        place: dict[str, Any] = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        with make_manager(
            lighthouse, "a", nn.Linear(1, 1), rank=rank, quorum_timeout=20.0, **place
        ) as manager:
            manager.start_quorum()
            if rank == 0:
                manager.request_stop()
            else:
                manager.wait_quorum()
                assert has_left.wait(LIMIT_S)
                manager.start_quorum()
            assert not manager.should_commit()
            stops = manager.stop_agreed
        if rank == 0:
            has_left.set()
        return stops

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [True, True]


@pytest.mark.leave_together
@pytest.mark.parametrize("goes_on", [False, True], ids=["", "goes on"])
def test_rank_0_that_leaves_first_ends_nothing_for_one_that_was_told_to_leave_with_it(goes_on: bool) -> None:
    """That one may still save its state, with collectives of others of the group, but begin no step."""
    store, has_left = serve_store(), threading.Event()

    def train(rank: int) -> None:
        place: dict[str, Any] = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        with make_manager(
            lighthouse, "a", nn.Linear(1, 1), rank=rank, min_replica_size=1, **place
        ) as manager:
            manager.request_stop()
            manager.start_quorum()
            assert manager.should_commit()
            assert manager.stop_agreed
            if rank == 1:
                link: Any = manager._link
                assert has_left.wait(LIMIT_S)
                assert holds_within(LIMIT_S, lambda: link._closing)  # it has seen that rank 0 is gone
                assert manager._driver.fatal is None
                if goes_on:
                    manager.start_quorum()
                    with pytest.raises(GroupLostError, match="rank 0"):
                        manager.wait_quorum()
        if rank == 0:
            has_left.set()

    with lighthouse_here(min_replicas=1) as lighthouse, ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))


def test_what_times_out_on_one_rank_costs_its_group_a_step_and_not_the_group() -> None:
    """The other rank, which has nothing to wait for, waits for a vote that comes after the timeout."""
    lighthouse = LighthouseServer(min_replicas=1, join_timeout_ms=60_000)
    store = serve_store()
    managers: dict[int, Manager] = {}

    def has_voted() -> bool:
        attempt = managers[0]._driver.attempt if 0 in managers else None
        return attempt is not None and attempt.is_deciding

    def train(rank: int) -> list[bool]:
        place: dict[str, Any] = {
            "rank": rank,
            "world_size": 2,
            "store_addr": "127.0.0.1",
            "store_port": store.port,
        }
        named: dict[str, Any] = {
            "replica_id": "a",
            "lighthouse_addr": lighthouse.address(),
            "init_sync": False,
        }
        with Manager(ProcessGroupGloo(), ignore, dict, 1, timeout=4.0, **place, **named) as manager:
            managers[rank] = manager
            votes: list[bool] = []
            while len(votes) < 2:
                manager.start_quorum()
                manager.wait_quorum()
                if rank == 1 and not votes:
                    assert holds_within(LIMIT_S, has_voted)
                    never: torch.futures.Future[None] = torch.futures.Future()
                    manager.wrap_future(never, None).wait()  # as a collective that hangs
                votes.append(manager.should_commit())
            return votes

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [[False, True], [False, True]]
    lighthouse.shutdown()


@pytest.mark.heal_is_clean
@pytest.mark.no_regress
def test_a_replica_that_loaded_a_part_of_a_state_has_no_version(lighthouse: LighthouseServer) -> None:
    """Whoever is of that version, and whole, is ahead of it: it heals from them if its source is gone."""

    is_over, load_in_part = threading.Event(), raising(RuntimeError("loaded in part"))

    def train(name: str) -> tuple[dict[str, int], dict[str, int]]:
        model = nn.Linear(1, 1)
        with make_manager(lighthouse, name, model, init_sync=False) as manager:
            manager.register_state_dict_fn("more", load_in_part if name == "b" else ignore, dict)
            manager.start_quorum()
            assert manager.should_commit()
            if name == "b":
                manager.load_state_dict({**manager.state_dict(), "step": 0})  # so it is behind
            before = manager.state_dict()
            manager.start_quorum()
            if name == "b":
                with pytest.raises(RuntimeError, match="loaded in part"):
                    manager.should_commit()
                is_over.set()
            else:
                assert not manager.should_commit(), "alone it does not commit, but it serves"
            assert is_over.wait(LIMIT_S)
            return before, manager.state_dict()

    before, after = on_both(train)[1]
    assert (before["step"], before["commit_quorum_id"]) == (0, 0)
    assert after == {**before, "commit_quorum_id": -1}


def test_a_replica_heals_in_the_last_step_of_its_source(lighthouse: LighthouseServer) -> None:
    """The source has left its script by then: it waits until the state has been fetched."""

    def train(name: str) -> float:
        model = nn.Linear(1500, 1500)
        with make_manager(lighthouse, name, model) as manager:
            manager.start_quorum()
            assert manager.should_commit()
        return float(model.weight.detach().sum())

    one, other = on_both(train)
    assert one == other


def test_a_wrapped_future_gives_the_default_and_spoils_the_step(lighthouse: LighthouseServer) -> None:
    def wrap(name: str) -> int:
        with make_manager(lighthouse, name, nn.Linear(1, 1)) as manager:
            manager.start_quorum()
            manager.wait_quorum()
            never: torch.futures.Future[int] = torch.futures.Future()
            value = manager.wrap_future(never, 7, timeout=0.05).wait()
            assert not manager.should_commit()
            return value

    assert on_both(wrap) == [7, 7]


def test_a_wrapped_future_that_fails_before_the_quorum_spoils_it(lighthouse: LighthouseServer) -> None:
    has_failed = threading.Event()

    def wrap(name: str) -> bool:
        with make_manager(lighthouse, name, nn.Linear(1, 1)) as manager:
            if name == "b":
                assert has_failed.wait(LIMIT_S)
            manager.start_quorum()
            if name == "a":
                broken: torch.futures.Future[int] = torch.futures.Future()
                wrapped = manager.wrap_future(broken, 7)
                broken.set_exception(RuntimeError("broken"))  # type: ignore[arg-type] # as torch declares it
                assert wrapped.wait() == 7
                has_failed.set()
            return manager.should_commit()

    assert on_both(wrap)[0] is False


def test_a_quorum_that_cannot_be_had_is_a_typed_error(lighthouse: LighthouseServer) -> None:
    with make_manager(lighthouse, "alone", nn.Linear(1, 1)) as manager:
        for _ in range(2):
            manager.start_quorum(timeout=0.1)
            with pytest.raises(QuorumTimeoutError, match="not enough replica groups joined"):
                manager.wait_quorum()
        with pytest.raises(QuorumTimeoutError):
            manager.should_commit()


def test_a_quorum_that_a_rank_of_the_own_group_keeps_away_names_it(
    lighthouse: LighthouseServer,
) -> None:
    store, rank_1_is_there, rank_0_is_done = serve_store(), threading.Event(), threading.Event()

    def start(rank: int) -> Manager:
        place: dict[str, Any] = {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
        return make_manager(lighthouse, "a", nn.Linear(1, 1), rank=rank, **place)

    def idle() -> None:
        with start(1):
            rank_1_is_there.set()
            assert rank_0_is_done.wait(LIMIT_S)

    with start(0) as manager, ThreadPoolExecutor(1) as threads:
        manager.start_quorum(timeout=0.1)
        with pytest.raises(QuorumTimeoutError, match="rank 1 of this replica group did not come"):
            manager.wait_quorum()
        idling = threads.submit(idle)
        assert rank_1_is_there.wait(LIMIT_S)
        manager.start_quorum(timeout=0.1)
        with pytest.raises(QuorumTimeoutError, match="rank 1 of this replica group did not ask"):
            manager.wait_quorum()
        rank_0_is_done.set()
        idling.result(LIMIT_S)


def test_two_replica_groups_share_the_port_of_a_store_only_if_they_have_one_rank_each(
    lighthouse: LighthouseServer,
) -> None:
    store = serve_store()
    place: dict[str, Any] = {"store_addr": "127.0.0.1", "store_port": store.port, "rank": 0}
    with (
        make_manager(lighthouse, "a", nn.Linear(1, 1), world_size=1, **place),
        make_manager(lighthouse, "b", nn.Linear(1, 1), world_size=1, **place),
        make_manager(lighthouse, "c", nn.Linear(1, 1), world_size=2, **place),
        pytest.raises(ConfigError, match="rank 0 of this group has a process already"),
    ):
        make_manager(lighthouse, "d", nn.Linear(1, 1), world_size=2, **place)


def test_a_manager_that_was_shut_down_says_so(lighthouse: LighthouseServer) -> None:
    manager = make_manager(lighthouse, "gone", nn.Linear(1, 1))
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(ShutdownError):
        manager.start_quorum()


def test_a_step_must_begin_before_it_is_used(lighthouse: LighthouseServer) -> None:
    with make_manager(lighthouse, "early", nn.Linear(1, 1)) as manager:
        assert manager.num_participants() == 0
        assert manager.participating_rank() is None
        with pytest.raises(RuntimeError, match="start_quorum"):
            manager.wait_quorum()


def test_nobody_waits_for_a_replica_whose_process_group_is_not_prepared() -> None:
    preparing, prepared, both_done = threading.Event(), threading.Event(), threading.Barrier(2)

    class Slow(ProcessGroupGloo):
        def prepare(self, timeout: timedelta) -> None:
            preparing.set()
            assert prepared.wait(timeout.total_seconds())

    def sizes(name: str) -> list[int]:
        assert name == "b" or preparing.wait(LIMIT_S)
        pg = Slow(60.0) if name == "b" else ProcessGroupGloo(60.0)
        found = [0]
        with manager_alone(name, lighthouse.address(), pg=pg) as manager:
            while found[-1] < 2:
                manager.start_quorum()
                manager.wait_quorum()
                found.append(manager.replica_world_size())
                manager.should_commit()
                prepared.set()
            both_done.wait(LIMIT_S)
        return found[1:]

    with lighthouse_here(min_replicas=1) as lighthouse:
        alone, late = on_both(sizes)
    assert alone[0] == 1
    assert late == [2]


def test_collectives_of_a_step_given_up_never_meet_those_of_another(lighthouse: LighthouseServer) -> None:
    """After an exception in the training loop, say; the replicas have got to different places in the step."""
    finished = threading.Barrier(2)

    def train(name: str) -> set[float]:
        model = nn.Linear(1, 1)
        own, given_up = {"a": (1.0, 2), "b": (10.0, 3)}[name]
        with make_manager(lighthouse, name, model, init_sync=False) as manager:
            manager.start_quorum()
            assert manager.should_commit()
            manager.start_quorum()
            for _ in range(given_up):
                manager.allreduce(torch.full((2,), 1000 * own), reduce_op=ReduceOp.SUM)
            committed: set[float] = set()
            while manager.current_step() < 2:
                manager.start_quorum()
                sums = [torch.full((2,), own) for _ in range(3)]
                works = [manager.allreduce(tensor, reduce_op=ReduceOp.SUM) for tensor in sums]
                for work in works:
                    work.wait()
                if manager.should_commit():
                    committed = {float(tensor[0]) for tensor in sums}
            finished.wait(LIMIT_S)
            return committed

    assert on_both(train) == [{11.0}, {11.0}]


@pytest.mark.progress
@pytest.mark.parametrize("offers", [True, False])
def test_a_step_that_cannot_begin_keeps_no_healing_replica_waiting(offers: bool) -> None:
    """The one before it is given up: its state is offered nevertheless, or refused where that fails, too."""

    class Ill(HTTPTransport[Any]):
        is_ill = False

        def metadata(self) -> str:
            if self.is_ill:
                raise RuntimeError("the transport is ill")
            return super().metadata()

        def send_checkpoint_with(self, *args: Any) -> None:
            if self.is_ill and not offers:
                raise RuntimeError("the transport is ill")
            super().send_checkpoint_with(*args)

    transport, may_join, was_told = Ill(LIMIT_S), threading.Event(), threading.Event()
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}

    def train(name: str) -> None:
        assert name == "a" or may_join.wait(LIMIT_S)
        settings = {"checkpoint_transport": transport} if name == "a" else {}
        with make_manager(lighthouse, name, models[name], min_replica_size=1, **settings) as manager:
            if name == "b":
                manager.start_quorum()
                assert manager.should_commit() == offers
                was_told.set()
                return
            manager.start_quorum()
            manager.wait_quorum()
            while manager.replica_world_size() < 2:
                assert manager.should_commit()
                may_join.set()
                manager.start_quorum()
                manager.wait_quorum()
            transport.is_ill = True
            with pytest.raises(RuntimeError, match="the transport is ill"):
                manager.start_quorum()
            assert was_told.wait(LIMIT_S / 2), "b waits for a state that does not come"

    with lighthouse_here(min_replicas=1) as lighthouse:
        on_both(train)
    assert torch.equal(models["a"].weight, models["b"].weight) == offers


def test_a_manager_that_did_not_start_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with lighthouse_here(min_replicas=1, join_timeout_ms=600_000) as lighthouse:
        with monkeypatch.context() as fault:
            # The lighthouse knows the replica by then.
            fault.setattr(group_store, "publish_manager", raising(RuntimeError("the store is gone")))
            with pytest.raises(RuntimeError, match="the store is gone"):
                make_manager(lighthouse, "a", nn.Linear(1, 1))
        with make_manager(lighthouse, "b", nn.Linear(1, 1), quorum_timeout=LIMIT_S / 2) as manager:
            manager.start_quorum()
            manager.wait_quorum()
            assert manager.replica_world_size() == 1


def test_a_manager_that_is_interrupted_while_its_group_is_prepared_leaves_no_thread(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_manager(lighthouse, "a", nn.Linear(1, 1)).shutdown()  # what a process has once
    before = set(threading.enumerate())
    monkeypatch.setattr(ProcessGroupGloo, "prepare", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make_manager(lighthouse, "b", nn.Linear(1, 1))
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), thread.name


# A source refuses its state.


def test_a_replica_whose_source_refuses_heals_from_another_one(lighthouse: LighthouseServer) -> None:
    newcomer_is_due, newcomer_is_here = threading.Event(), threading.Event()
    asked, last_step = list[str](), list[int]()

    def train(name: str) -> tuple[str, list[int]]:
        model, healed_to = nn.Linear(4, 4), list[int]()

        def save() -> dict[str, Any]:
            if newcomer_is_due.is_set() and name != "c":
                asked.append(name)
                if name == "a":
                    raise RuntimeError("no memory for a copy")
            return model.state_dict()

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state)
            healed_to.append(manager.current_step())

        if name == "c":
            assert newcomer_is_due.wait(LIMIT_S)
        with make_manager(lighthouse, name, model, load_state_dict=load, state_dict=save) as manager:
            parallel = PureDistributedDataParallel(manager, model)
            optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
            if name == "c":
                newcomer_is_here.set()
            while not last_step or manager.current_step() < last_step[0]:
                if manager.current_step() == 2 and name != "c":
                    newcomer_is_due.set()
                    assert newcomer_is_here.wait(LIMIT_S)
                optimizer.zero_grad()
                parallel(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if name == "c" and healed_to and not last_step:
                    last_step.append(manager.current_step() + 3)  # the others are no further than one step
            return state_digest(model.state_dict()), healed_to

    torch.manual_seed(3)
    (a, _), (b, _), (c, healed_to) = each_in_a_thread("abc", train)
    assert sorted(asked) == ["a", "a", "b", "b"], "each offers twice, as the source or to help it"
    assert a == b == c
    assert len(healed_to) == 1


def test_a_job_goes_back_to_a_checkpoint_that_all_groups_load_before_the_same_step(tmp_path: Path) -> None:
    """The block of docs/restart.md is a step of each group; the loss of one of them runs away once."""
    text = next(b.text for b in blocks(ROOT / "docs" / "restart.md") if b.language == "python")
    saved_at, until = 2, 6
    before = [0, 1, 2, 3, 4]  # the steps before the one that is too much
    committed = threading.Barrier(3)

    def load(path: str) -> Any:
        """One that was quicker would break the connections of another one's last allreduce."""
        committed.wait(LIMIT_S)
        return torch.load(path)

    def train(name: str) -> tuple[str, list[int]]:
        model, steps, path = nn.Linear(4, 4), [0], tmp_path / name
        adamw = torch.optim.AdamW(model.parameters())
        code = compile(text.replace("step-100.pt", str(path)), "restart.md", "exec")

        def loss(outputs: torch.Tensor) -> torch.Tensor:
            return outputs.square().mean() * (1e6 if name == "b" and steps == before else 1.0)

        with make_manager(lighthouse, name, model, min_replica_size=3) as manager:
            manager.register_state_dict_fn("optim", adamw.load_state_dict, adamw.state_dict)
            names = {"torch": SimpleNamespace(load=load), "model": model, "adamw": adamw, "loss": loss}
            names |= {"batches": repeat(torch.ones(2, 4)), "manager": manager}
            names["optimizer"] = Optimizer(manager, adamw)
            names["ddp_model"] = DistributedDataParallel(manager, model)
            while manager.current_step() < until:
                exec(code, names)
                if manager.current_step() != steps[-1]:  # or it was lost, as on a busy machine
                    steps.append(manager.current_step())
                if steps[-1] == saved_at and not path.exists():
                    parts = {"model": model.state_dict(), "optim": adamw.state_dict()}
                    torch.save({**parts, "manager": manager.state_dict()}, path)
            return state_digest({"model": model.state_dict(), "optim": adamw.state_dict()}), steps

    with lighthouse_here(min_replicas=3) as lighthouse:
        results = each_in_a_thread("abc", train)
    assert [steps for _, steps in results] == [[*before, 2, 3, 4, 5, 6]] * 3
    assert len({digest for digest, _ in results}) == 1
