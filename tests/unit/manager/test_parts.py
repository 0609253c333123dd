"""The small parts of the Manager: attempts, managed works, the user's state, signals."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._distributed_c10d import AllreduceCoalescedOptions, _make_nccl_premul_sum
from torch.distributed import AllreduceOptions, ReduceOp, Work

from tests.faults import raising
from tests.unit.manager.test_step import quorum
from tests.unit.process_group.failing import Promise
from torchft_like import OptimizerWrapper, stop_on_signals
from torchft_like.core.replica_group import LossNotice, Verdict
from torchft_like.core.step import StepProtocol, StepRules, WorldSizeMode
from torchft_like.errors import (
    CheckpointError,
    CollectiveRefusedError,
    ConfigError,
    MemberLostError,
    NotSupportedError,
    ProcessGroupAbortedError,
    QuorumTimeoutError,
    ShutdownError,
    StepLostError,
)
from torchft_like.manager import ExceptionWithTraceback, managed_work
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.managed_work import (
    AVERAGE,
    GroupReduction,
    Reducer,
    Reduction,
    is_average,
    options_for,
    summing,
)
from torchft_like.manager.state_exchange import state_bytes
from torchft_like.manager.state_registry import StateRegistry
from torchft_like.process_group import ProcessGroup, ProcessGroupDummy, ProcessGroupWrapper
from torchft_like.process_group.collectives import ALLREDUCE, BY_NAME, Collective
from torchft_like.process_group.work import FinishedOperation
from torchft_like.writing import divide

LIMIT_S = 30.0
ASK = [Reduction.wait, Reduction.is_completed, Reduction.get_future]


class TestAttempt:
    def test_a_quorum_that_does_not_come_is_an_error_that_tells_why(self) -> None:
        with pytest.raises(QuorumTimeoutError, match=r"within 0.01 s: the lighthouse is away"):
            Attempt(True, 0.01).wait_configured(lambda: "the lighthouse is away")

    def test_a_quorum_that_does_without_this_replica_is_waited_for_until_it_is_asked_to_stop(self) -> None:
        attempt, outcomes = Attempt(True, 0.01), list[str]()
        attempt.is_patient = True

        def wait() -> None:
            try:
                attempt.wait_configured(lambda: "left out")
            except QuorumTimeoutError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)  # many times as long as a quorum is waited for otherwise
        assert thread.is_alive()
        attempt.is_patient = False
        thread.join(LIMIT_S)
        assert outcomes == ["no quorum within 0.01 s: left out"]

    @pytest.mark.progress
    def test_a_failed_attempt_wakes_whoever_waits(self) -> None:
        attempt, seen = Attempt(True, LIMIT_S), list[Exception]()

        def wait() -> None:
            try:
                attempt.wait_configured(str)
            except ShutdownError as error:
                seen.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        attempt.fail(ShutdownError("over"))
        thread.join(LIMIT_S)
        assert len(seen) == 1
        assert not attempt.is_agreed
        with pytest.raises(ShutdownError):
            attempt.wait_decided(LIMIT_S)

    def test_a_verdict_that_is_known_is_not_lost_to_the_end(self) -> None:
        attempt = Attempt(True, LIMIT_S)
        attempt.decide(Verdict(4, committed=True))
        attempt.fail(ShutdownError("rank 0 has ended"))
        assert attempt.wait_decided(LIMIT_S) == Verdict(4, committed=True)


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


def following(kind: type[Reduction], work: Work, tensor: Any, divide_by: Any, report: Any) -> Reduction:
    """The handle of a reduction of the kind that follows a backend's work."""
    reduction = kind([tensor], divide_by, report)
    reduction.follow(work)
    return reduction


def leaf() -> torch.Tensor:
    return torch.nn.Parameter(torch.full((2,), 6.0))


def view_of_a_leaf() -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.full((2, 1), 6.0))
    with torch.no_grad():
        return parameter.view(-1)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.full((2,), 6.0)


def sixes() -> torch.Tensor:
    return torch.full((2,), 6.0)


HARD_TO_WRITE = [leaf, view_of_a_leaf, made_in_inference_mode]


class Rank:
    """A rank in a step whose quorum is there; its own quorum driver."""

    fatal = None

    def __init__(self, pg: ProcessGroup, rules: StepRules, **about: Any) -> None:
        self.protocol = StepProtocol(rules)
        self.group = ManagedGroup(pg, self.protocol, lambda *_, **__: None)
        self.attempt = Attempt(True, LIMIT_S)
        self.protocol.begin()
        result = quorum(**about)
        self.group.agree(result, allow_heal=True)
        self.group.configure(result, "s:1/p", "a:1", (0, 1))
        self.attempt.agree(result)
        self.attempt.open_configured()
        self.reducer = Reducer(self.protocol, self.group, self)  # type: ignore[arg-type] # it has what is asked

    def wait_configured(self, attempt: Attempt) -> None:
        attempt.wait_configured(lambda: "there is one")

    def wait_for_turn(self) -> None:
        """Nothing is deferred."""


def spare() -> Rank:
    """Return a rank that takes part in the collectives of a step, and adds nothing."""
    rules = StepRules(2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    return Rank(ProcessGroupDummy(0, 1), rules, replica_rank=2, max_replica_rank=2)


@pytest.mark.one_quorum_per_step
@pytest.mark.parametrize("elements", [0, 2])
def test_a_step_is_one_of_all_members_if_some_tensor_has_elements(elements: int) -> None:
    rank = Rank(ProcessGroupDummy(0, 1), StepRules(1))
    rank.protocol.stand()
    rank.reducer.start([torch.ones(0)], AVERAGE, Reduction)
    assert rank.protocol.needs_asking
    rank.reducer.start([torch.ones(0), torch.ones(elements)], AVERAGE, Reduction)
    assert rank.protocol.needs_asking == (elements == 0)


class TestReduction:
    @pytest.mark.parametrize("ask", ASK)
    def test_an_error_goes_to_the_manager(self, ask: Callable[[Reduction], object]) -> None:
        tensor, work, errors = torch.ones(2), Promise(), list[Exception]()
        result = following(Reduction, work, tensor, 2, errors.append)
        work.future.set_exception(RuntimeError("Connection reset by peer"))  # type: ignore[arg-type]
        ask(result)
        assert result.wait()
        assert result.is_success()
        assert [str(error) for error in errors] == ["Connection reset by peer"]

    def test_nothing_runs_on_the_backends_thread_unless_the_future_was_asked_for(self) -> None:
        """Python there costs more than a small allreduce."""
        work = Promise()
        work.get_future = unexpected  # type: ignore[method-assign,assignment]
        work.future.set_result([torch.ones(1)])
        assert following(Reduction, work, torch.ones(1), 2, unexpected).wait()

    def test_a_wait_can_be_bounded(self) -> None:
        with pytest.raises(TimeoutError):
            following(Reduction, Promise(), torch.ones(1), None, unexpected).wait(timedelta(milliseconds=10))

    def test_a_wait_of_a_groups_work_that_ends_too_early_loses_the_step(self) -> None:
        tensor, work, errors = torch.ones(2), Promise(), list[Exception]()
        result = following(GroupReduction, work, tensor, None, errors.append)
        assert not result.is_success()
        assert result.wait(timedelta(milliseconds=10))
        assert isinstance(errors[0], TimeoutError)
        work.future.set_result([tensor])
        assert result.wait()
        assert result.is_success()
        assert result.get_future().value() == result.result() == [tensor]

    @pytest.mark.no_zombie
    @pytest.mark.parametrize("make", [*HARD_TO_WRITE, sixes], ids=lambda make: make.__name__)
    @pytest.mark.parametrize("ask", ASK)
    def test_an_average_is_divided_once_on_any_thread_whatever_autograd_says(
        self, make: Callable[[], torch.Tensor], ask: Callable[[Reduction], object]
    ) -> None:
        tensor, work, pending = make(), Promise(), dict[Reduction, float]()
        result = Reduction([tensor], 3, unexpected, pending)
        result.follow(work)
        if ask is Reduction.get_future:
            result.get_future()
        assert not result.is_completed()
        thread = threading.Thread(target=work.future.set_result, args=([tensor],))
        thread.start()
        thread.join(LIMIT_S)
        assert ask(result) is not False
        assert result.wait()
        assert result.is_completed()
        assert result.get_future().wait() is tensor
        assert tensor.tolist() == [2.0, 2.0]
        assert pending == {}

    def test_an_average_that_cannot_be_divided_goes_to_the_manager_and_is_over(self) -> None:
        for ask in (Reduction.wait, lambda work: work.get_future().wait(), Reduction.is_completed):
            tensor, work = torch.ones(1).expand(2), Promise()
            errors, pending = list[Exception](), dict[Reduction, float]()
            result = Reduction([tensor], 3, errors.append, pending)
            result.follow(work)
            work.future.set_result([tensor])
            assert ask(result) is not False
            assert result.wait()
            assert result.is_success()
            assert ["single memory location" in str(error) for error in errors] == [True]
            assert pending == {}

    @pytest.mark.agreement
    def test_an_average_that_ctrl_c_leaves_divided_loses_the_step_and_is_not_divided_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(tensors: Sequence[torch.Tensor], divisor: int) -> None:
            divide(tensors, divisor)
            raise KeyboardInterrupt

        tensor, work, errors = sixes(), Promise(), list[Exception]()
        result = following(Reduction, work, tensor, 3, errors.append)
        work.future.set_result([tensor])
        with monkeypatch.context() as patch:
            patch.setattr(managed_work, "divide", interrupted)
            with pytest.raises(KeyboardInterrupt):
                result.wait()
        assert result.wait()
        assert tensor.tolist() == [2.0, 2.0]
        assert [type(error) for error in errors] == [StepLostError]

    @pytest.mark.no_zombie
    @pytest.mark.parametrize("ask", [Reduction.wait, Reduction.get_future])
    @pytest.mark.parametrize("is_inference", [False, True])
    def test_memory_that_several_tensors_share_is_divided_once(
        self, ask: Callable[[Reduction], object], is_inference: bool
    ) -> None:
        with torch.inference_mode(is_inference):
            whole = torch.full((6,), 6.0)
            tensors = [whole[:4], whole[2:], whole[:4], torch.full((1,), 9.0)]
        work = Promise()
        result = GroupReduction(tensors, 3, unexpected)
        result.follow(work)
        work.future.set_result(tensors)
        ask(result)
        assert result.wait()
        assert whole.tolist() == [2.0] * 6
        assert tensors[-1].tolist() == [3.0]
        carried = result.get_future().wait()
        assert all(given is tensor for given, tensor in zip(carried, tensors, strict=True))


class TestReducer:
    @pytest.mark.heal_is_clean
    @pytest.mark.parametrize("make", HARD_TO_WRITE, ids=lambda make: make.__name__)
    def test_a_spare_adds_zeros_whatever_autograd_says(self, make: Callable[[], torch.Tensor]) -> None:
        tensor = make()
        rank = spare()
        assert rank.reducer.start([tensor], options_for(ReduceOp.AVG), Reduction).wait()
        assert tensor.tolist() == [0.0, 0.0]
        assert rank.protocol.vote()

    @pytest.mark.heal_is_clean
    @pytest.mark.parametrize(
        "operation", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64])
    def test_a_spare_changes_no_result(self, operation: Any, dtype: torch.dtype) -> None:
        of_the_others = torch.tensor([-3, 0, 5]).to(dtype)
        if of_the_others.is_floating_point() and operation in (ReduceOp.BAND, ReduceOp.BOR):
            return
        combine: dict[Any, Callable[..., torch.Tensor]] = {
            ReduceOp.SUM: torch.add,
            ReduceOp.PRODUCT: torch.mul,
            ReduceOp.MIN: torch.minimum,
            ReduceOp.MAX: torch.maximum,
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
        }
        tensor, rank = of_the_others.clone(), spare()
        assert rank.reducer.start([tensor], options_for(operation), Reduction).wait()
        assert torch.equal(combine[operation](tensor, of_the_others), of_the_others)
        assert rank.protocol.vote()

    @pytest.mark.heal_is_clean
    @pytest.mark.parametrize("collective", [ALLREDUCE, BY_NAME["allreduce_coalesced"]])
    def test_a_spare_adds_nothing_by_any_of_several_tensors(self, collective: Collective) -> None:
        for operation, neutral in ((ReduceOp.SUM, 0), (ReduceOp.AVG, 0), (ReduceOp.MIN, math.inf)):
            rank, tensors = spare(), [torch.ones(3), torch.ones(3)]
            work = rank.reducer.start(tensors, options_for(operation), GroupReduction, collective)
            assert work.wait()
            assert torch.cat(tensors).tolist() == [neutral] * 6
            calls = rank.group.pg.calls  # type: ignore[attr-defined] # it is a dummy
            assert calls == {collective.name: 1}
            assert rank.protocol.vote()

    def test_tensors_that_overlap_lose_the_step_and_are_not_touched(self) -> None:
        rank, whole = spare(), torch.ones(4)
        tensors = [whole[:3], whole[1:]]
        work = rank.reducer.start(tensors, options_for(ReduceOp.SUM), GroupReduction, of_all_members=True)
        assert work.wait()
        assert whole.tolist() == [1.0] * 4
        assert isinstance(rank.protocol.failure, CollectiveRefusedError)
        assert not rank.protocol.vote()

    def test_after_the_step_is_lost_several_tensors_are_left_alone(self) -> None:
        rank, tensors = spare(), [torch.ones(2), torch.ones(3)]
        rank.group.fail_current(RuntimeError("lost"))
        work = rank.reducer.start(tensors, options_for(ReduceOp.AVG), GroupReduction)
        assert work.wait()
        assert work.result()[1] is tensors[1]
        assert torch.cat(tensors).tolist() == [1.0] * 5

    @pytest.mark.heal_is_clean
    def test_a_spare_whose_tensor_cannot_be_written_to_loses_the_step(self) -> None:
        rank = spare()
        assert rank.reducer.start([torch.ones(1).expand(2)], options_for(ReduceOp.AVG), Reduction).wait()
        assert not rank.protocol.vote()
        assert rank.attempt.pending_collectives == {}

    @pytest.mark.agreement
    @pytest.mark.parametrize("is_configured", [True, False])
    def test_an_allreduce_that_ctrl_c_keeps_from_the_group_loses_the_step(self, is_configured: bool) -> None:
        rank, interrupt = Rank(ProcessGroupDummy(0, 1), StepRules(1)), raising(KeyboardInterrupt)
        rank.group.pg.allreduce = interrupt  # type: ignore[method-assign]
        rank.wait_configured = interrupt  # type: ignore[method-assign]
        rank.attempt.is_configured = is_configured
        with pytest.raises(KeyboardInterrupt):
            rank.reducer.start([torch.ones(2)], AVERAGE, Reduction)
        assert isinstance(rank.protocol.failure, StepLostError)
        assert rank.attempt.pending_collectives == {}

    def test_what_is_no_tensor_is_refused(self) -> None:
        rank = Rank(ProcessGroupDummy(0, 1), StepRules(1))
        with pytest.raises(ConfigError, match=r"a torch\.Tensor, not 'x'"):
            rank.reducer.start(["x"], AVERAGE, Reduction)  # type: ignore[list-item]

    @pytest.mark.no_zombie
    def test_a_group_that_forgets_to_return_its_work_loses_the_step(self) -> None:
        class Forgetful(ProcessGroupDummy):
            def allreduce(self, tensors: Any, opts: Any) -> Work:  # type: ignore[override,return]
                super().allreduce(tensors, opts)

        rank = Rank(Forgetful(0, 1), StepRules(1))
        assert rank.reducer.start([torch.ones(2)], AVERAGE, Reduction).wait()
        assert "allreduce" in str(rank.protocol.failure)
        assert not rank.protocol.vote()


class TestOptions:
    @pytest.mark.parametrize("spell", [lambda op: op, ReduceOp])
    def test_every_operation_is_known_however_it_is_spelled(self, spell: Callable[[Any], Any]) -> None:
        for operation in ReduceOp.RedOpType.__members__.values():
            if operation != ReduceOp.PREMUL_SUM:
                assert options_for(spell(operation)).reduceOp == ReduceOp(operation)
                assert is_average(spell(operation)) == (operation == ReduceOp.AVG)

    def test_a_sum_that_multiplies_keeps_its_factor(self) -> None:
        operation = _make_nccl_premul_sum(0.25)
        assert not is_average(operation)
        assert options_for(operation).reduceOp.__getstate__()[1] == 0.25  # type: ignore[index] # the stub knows object's

    @pytest.mark.parametrize("kind", [AllreduceOptions, AllreduceCoalescedOptions])
    def test_the_sum_of_an_average_keeps_everything_else_that_the_caller_asked_for(self, kind: Any) -> None:
        options = kind()
        options.reduceOp, options.timeout, options.asyncOp = ReduceOp.AVG, timedelta(seconds=7), False
        made = summing(options)
        assert type(made) is kind
        assert made.reduceOp == ReduceOp(ReduceOp.SUM)
        assert (made.timeout, made.asyncOp) == (timedelta(seconds=7), False)
        assert options.reduceOp == ReduceOp.AVG


class TestStateRegistry:
    def test_a_key_is_taken_once(self) -> None:
        registry = StateRegistry()
        registry.register("model", lambda _: None, dict)
        with pytest.raises(ConfigError, match="'model'"):
            registry.register("model", lambda _: None, dict)

    def test_what_a_function_returns_is_no_function(self) -> None:
        with pytest.raises(ConfigError, match=r"state_dict is of type dict: pass a function, as model\."):
            StateRegistry().register("model", lambda _: None, {"weight": 1})  # type: ignore[arg-type]

    @pytest.mark.heal_is_clean
    def test_a_peer_with_other_keys_is_refused_before_anything_is_loaded(self) -> None:
        registry, loaded = StateRegistry(), list[object]()
        registry.register("model", loaded.append, dict)
        with pytest.raises(CheckpointError, match=r"\['model', 'optim'\].*\['model'\]"):
            registry.load({"model": 1, "optim": 2})
        assert loaded == []

    @pytest.mark.heal_is_clean
    def test_while_reading_is_disallowed_nobody_is_served(self) -> None:
        registry = StateRegistry()
        registry.disallow_read()
        registry.disallow_read()
        with pytest.raises(CheckpointError, match="allow_state_dict_read"), registry.reading():
            pass
        registry.allow_read()
        registry.allow_read()
        with registry.reading() as state:
            assert state == {}

    @pytest.mark.heal_is_clean
    def test_who_was_interrupted_while_it_waited_for_readers_does_not_let_others_in(self) -> None:
        """A script says `allow_state_dict_read` in a `finally`."""

        class Interrupted:
            def acquire(self) -> None:
                raise KeyboardInterrupt

            def release(self) -> None:
                raise AssertionError("whoever reads has it, and gives it back")

        registry = StateRegistry()
        registry._reading = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            registry.disallow_read()
        registry.allow_read()


def test_the_bytes_of_a_state_are_those_of_its_tensors() -> None:
    assert state_bytes({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int8), 5, ("x",)]}) == 14


def test_a_closure_is_evaluated_once_and_before_the_vote() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    calls: list[str] = []

    def should_commit() -> bool:
        calls.append("should_commit")
        return True

    manager = SimpleNamespace(
        current_step=lambda: 0,
        start_quorum=lambda: calls.append("start_quorum"),
        should_commit=should_commit,
    )
    optimizer = OptimizerWrapper(manager, torch.optim.SGD([parameter], lr=1.0))  # type: ignore[arg-type]
    parameter.grad = torch.full((1,), 0.5)

    def closure() -> float:
        calls.append("closure")
        optimizer.zero_grad()
        assert parameter.grad is None
        parameter.grad = torch.full((1,), 0.25)
        return 7.0

    assert optimizer.step(closure) is True
    assert calls == ["closure", "start_quorum", "should_commit"]
    assert parameter.item() == 0.75


def test_an_optimizer_that_evaluates_the_model_as_often_as_it_likes_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="LBFGS evaluates the model"):
        OptimizerWrapper(None, torch.optim.LBFGS([torch.zeros(1)]))  # type: ignore[arg-type]


def test_hooks_of_an_optimizer_are_called_in_steps_that_are_committed() -> None:
    weight = torch.zeros(1, requires_grad=True)
    inner, stepped = torch.optim.SGD([weight], lr=1.0), []
    votes = iter([True, False])
    manager = SimpleNamespace(current_step=lambda: 0, should_commit=lambda: next(votes))
    optimizer = OptimizerWrapper(manager, inner)  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda optim, *args: stepped.append(("before", optim)))
    handle = optimizer.register_step_post_hook(lambda optim, *args: stepped.append(("after", optim)))
    assert [optimizer.step(), optimizer.step()] == [True, False]
    assert stepped == [("before", inner), ("after", inner)]
    handle.remove()
    assert not inner._optimizer_step_post_hooks


def test_an_optimizer_has_the_methods_of_a_schedule_free_one_and_no_promise_to_unscale_gradients() -> None:
    inner = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    inner.train = lambda: "trains"  # type: ignore[attr-defined]
    optimizer = OptimizerWrapper(SimpleNamespace(_use_async_quorum=False), inner)  # type: ignore[arg-type]
    assert optimizer.train() == "trains"
    assert inner._step_supports_amp_scaling
    assert not optimizer._step_supports_amp_scaling, "a GradScaler would leave it to the inner one"
    assert not hasattr(optimizer, "no_such_name")
    inner._of_its_own = True  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "_of_its_own")


def test_an_optimizer_has_the_state_of_the_wrapped_one() -> None:
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.5)
    optimizer = OptimizerWrapper(None, inner)  # type: ignore[arg-type]
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert optimizer.param_groups is inner.param_groups
    assert len(inner.param_groups) == 2
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    state = optimizer.state_dict()
    assert state == inner.state_dict()
    state["param_groups"][1]["lr"] = 7.0
    optimizer.load_state_dict(state)
    assert inner.param_groups[1]["lr"] == 7.0
    assert repr(optimizer) == f"OptimizerWrapper({inner!r})"


def test_steps_change_parameters_and_the_tensors_of_an_optimizers_state_only() -> None:
    weight, momentum = torch.zeros(1, requires_grad=True), torch.zeros(1)
    inner = torch.optim.SGD([weight], lr=1.0)
    inner.state[weight] = {"momentum_buffer": momentum, "count": 3}
    inner.state["skipped"] = 7  # type: ignore[index]
    changed = OptimizerWrapper(None, inner).replay().changed_by_steps()  # type: ignore[arg-type]
    assert [id(tensor) for tensor in changed] == [id(weight), id(momentum)]


@pytest.mark.parametrize("broken", ["vote", "step"])
def test_a_state_that_may_lack_a_committed_step_is_disowned(broken: str) -> None:
    """An error before the verdict leaves the state as it is."""
    calls: list[str] = []

    def should_commit() -> bool:
        if broken == "vote":
            raise KeyError
        calls.append("committed")
        return True

    manager = SimpleNamespace(
        current_step=lambda: len(calls),
        should_commit=should_commit,
        disown_state=lambda: calls.append("disowned"),
    )
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    inner.register_step_pre_hook(raising(KeyError()))
    with pytest.raises(KeyError):
        OptimizerWrapper(manager, inner).step()  # type: ignore[arg-type]
    assert calls == ([] if broken == "vote" else ["committed", "disowned"])


@pytest.mark.parametrize(
    ("is_async", "is_enabled"), [(True, True), (True, False), (False, True)], ids=["refused", "off", "sync"]
)
def test_a_scaler_steps_no_optimizer_that_heals_once_gradients_are_unscaled(
    is_async: bool, is_enabled: bool
) -> None:
    weight = torch.zeros(1, requires_grad=True)
    manager = SimpleNamespace(current_step=lambda: 0, should_commit=lambda: True, _use_async_quorum=is_async)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD([weight], lr=1.0))  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_enabled)
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    is_refused = is_async and is_enabled
    assert not optimizer._step_supports_amp_scaling, "Lightning asks this before it clips, without a scaler"
    with pytest.raises(NotSupportedError, match="use_async_quorum") if is_refused else nullcontext():
        assert scaler.step(optimizer)
        assert weight.item() == -1.0


class Around:
    """A script's optimizer around another one, of which it has what a GradScaler needs, and no more."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.step = inner.step


def test_a_scaler_steps_no_optimizer_around_one_that_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the outer one alone whether that divides the gradients."""
    weight = torch.zeros(1, requires_grad=True)
    manager = SimpleNamespace(current_step=lambda: 0, should_commit=lambda: True, _use_async_quorum=True)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD([weight], lr=1.0))  # type: ignore[arg-type]
    around: Any = Around(optimizer)
    for is_async in (True, False):
        monkeypatch.setattr(manager, "_use_async_quorum", is_async)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(NotSupportedError, match="use_async_quorum") if is_async else nullcontext():
            scaler.step(around)
        assert weight.item() == (0.0 if is_async else -1.0)
        weight.grad = None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_optimizer_is_refused_and_leaves_it_as_it_was(
    copied: Callable[[object], object],
) -> None:
    manager = SimpleNamespace(current_step=lambda: 0, should_commit=lambda: True)
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer = OptimizerWrapper(manager, inner)  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="copy or save its `optim`"):
        copied(optimizer)
    assert optimizer.step()


class HealedIn(NamedTuple):
    """The part of a Manager that an optimizer asks, which heals in each step."""

    steps: list[int]
    committed: bool

    def current_step(self) -> int:
        return self.steps[-1]

    def should_commit(self) -> bool:
        self.steps.append(9)
        return self.committed


@pytest.mark.parametrize("committed", [True, False])
def test_an_optimizer_tells_whether_the_step_was_committed_in_which_the_replica_healed(
    committed: bool,
) -> None:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    optimizer = OptimizerWrapper(
        HealedIn([0], committed),  # type: ignore[arg-type]
        torch.optim.SGD([weight], lr=1.0),
    )
    assert optimizer.step() is committed
    assert weight.item() == -float(committed)


class TestSignals:
    def test_sigterm_asks_to_stop_and_a_second_one_insists(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stop_on_signals() as stop:
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_the_second_sigterm_ends_what_the_manager_waits_for_in_native_code(self) -> None:
        """There Python runs no handler: a thread hears of the signal from the operating system."""
        errors: list[Exception] = []
        interrupted = threading.Event()

        def interrupt(error: Exception) -> None:
            errors.append(error)
            interrupted.set()

        manager = SimpleNamespace(interrupt=interrupt, request_stop=lambda: None, stop_agreed=False)
        with stop_on_signals(manager):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not interrupted.is_set()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            assert interrupted.wait(LIMIT_S)
        assert [type(error) for error in errors] == [ShutdownError]


# Averages that the backend divides itself, and those that it would divide by something else.


NARROW = (torch.bfloat16, torch.float16)


class Dividing(ProcessGroupDummy):
    """Remembers what it was asked for; a sum is that of as many equal tensors as there are members."""

    def __init__(self, members: int, divides: bool) -> None:
        super().__init__(0, 1)
        self._members = members
        self.divides = divides
        self.asked: list[str] = []

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        tensors, options = args
        self.asked.append("AVG" if options.reduceOp == ReduceOp.AVG else "SUM")
        if options.reduceOp == ReduceOp.SUM:
            tensors[0].mul_(self._members)
        return FinishedOperation(tensors)


@pytest.mark.no_zombie
@pytest.mark.heal_is_clean
@pytest.mark.parametrize(
    ("members", "participants", "dtype", "divides", "expected"),
    [
        *((n, n, dtype, True, ("AVG", 6.0)) for n in (1, 2, 4) for dtype in (torch.float32, *NARROW)),
        (3, 3, torch.float32, True, ("AVG", 6.0)),  # wide numbers are divided by any number of members
        *((3, 3, dtype, True, ("SUM", 6.0)) for dtype in NARROW),  # whose factor is not exact
        (4, 2, torch.float32, True, ("SUM", 12.0)),  # where somebody heals, the participants count
        (2, 2, torch.float32, False, ("SUM", 6.0)),  # another backend adds, and the result is divided
    ],
)
def test_an_average_is_left_to_a_backend_that_divides_by_the_right_number(
    members: int, participants: int, dtype: torch.dtype, divides: bool, expected: tuple[str, float]
) -> None:
    """What the group of a step is asked for, and the result where every member has a six."""
    dividing = Dividing(members, divides)
    pg = ProcessGroupWrapper(pg=dividing)
    rank = Rank(pg, StepRules(1), max_world_size=participants, replica_world_size=members)
    tensor = torch.full((4,), 6.0, dtype=dtype)
    rank.reducer.start([tensor], options_for(ReduceOp.AVG), Reduction).wait()
    assert rank.protocol.failure is None
    assert (dividing.asked[0], tensor[0].item()) == expected


# What `Manager.errored` returns keeps the error and its traceback, and is an exception like any other.


def an_error() -> ValueError:
    with pytest.raises(ValueError, match="no loss") as caught:
        raise ValueError("no loss")
    return caught.value


def test_what_errored_returns_keeps_the_error_and_its_traceback() -> None:
    error = an_error()
    wrapped, again = ExceptionWithTraceback(error), ExceptionWithTraceback(error)
    assert wrapped.original_exception is error
    assert (wrapped, len({wrapped, again})) == (again, 1)
    assert wrapped != ExceptionWithTraceback(an_error())
    assert str(wrapped) == str(copy.copy(wrapped)) == "ValueError: no loss"  # copied as between processes
    assert "in an_error" in wrapped.stack_trace
    with pytest.raises(ExceptionWithTraceback) as caught:
        raise wrapped
    assert "in an_error" in "".join(traceback.format_exception(caught.value))


# The order of abort and configure, driven step by step with a process group that blocks on command.


class BlockingGroup(ProcessGroupDummy):
    """`configure` waits until it is released, aborted, or to end with its signal; aborts are counted.

    A deaf one hears no abort: those come before it has begun to listen.
    """

    def __init__(self, is_deaf: bool = False) -> None:
        super().__init__(0, 1)
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.aborts: list[str] = []
        self._aborted = threading.Event()
        self._is_deaf = is_deaf

    def configure(self, *_args: Any, **about: Any) -> None:
        about["ends_with"].add(self._aborted.set)
        self.entered.set()
        while not self.proceed.wait(0.001):
            if self._aborted.is_set():
                raise ProcessGroupAbortedError(self.aborts[-1])

    def abort(self, reason: str = "", *, errored: bool = True) -> None:
        self.aborts.append(reason)
        if not self._is_deaf:
            self._aborted.set()


class Setting:
    def __init__(self, pg: BlockingGroup) -> None:
        self.pg = pg
        self.protocol = StepProtocol(StepRules(1))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.group = ManagedGroup(pg, self.protocol, self._record)
        self.configured: bool | None = None

    def agree(self, quorum_id: int) -> None:
        self.protocol.begin()
        self.group.agree(quorum(quorum_id), allow_heal=True)

    def configure(self, quorum_id: int) -> None:
        self.configured = self.group.configure(quorum(quorum_id), "s:1/p", "a:1", (0, 1))

    def is_ready_in(self, quorum_id: int) -> None:
        self.pg.proceed.set()
        self.agree(quorum_id)
        self.configure(quorum_id)

    def _record(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting(BlockingGroup())
    yield setting
    setting.pg.proceed.set()


@pytest.mark.progress
@pytest.mark.parametrize("is_deaf", [False, True], ids=["it listens", "before it listens"])
def test_a_loss_during_configure_ends_it(is_deaf: bool) -> None:
    setting = Setting(BlockingGroup(is_deaf))
    setting.agree(1)
    thread = threading.Thread(target=setting.configure, args=(1,))
    thread.start()
    assert setting.pg.entered.wait(LIMIT_S)
    setting.group.member_lost(LossNotice(1, "b:1", "connection closed"))
    thread.join(LIMIT_S)
    assert setting.configured is False
    assert setting.pg.aborts == ["lost b:1: connection closed"]
    assert setting.group.refuse()
    assert setting.kinds()[:2] == ["loss", "abort"]


@pytest.mark.progress
def test_a_quorum_that_broke_before_configure_is_not_configured(setting: Setting) -> None:
    setting.agree(1)
    setting.group.member_lost(LossNotice(1, "b:1", "gone"))
    setting.configure(1)
    assert setting.configured is False
    assert not setting.pg.entered.is_set()


@pytest.mark.no_zombie
def test_an_abort_for_an_old_quorum_does_not_touch_the_new_one(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.is_ready_in(2)
    setting.group.fail(1, RuntimeError("late callback"))
    setting.group.member_lost(LossNotice(1, "b:1", "late notice"))
    assert setting.pg.aborts == []
    assert not setting.group.refuse()
    assert setting.protocol.vote()


@pytest.mark.progress
def test_a_local_error_releases_the_peers_at_once(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.fail_current(ValueError("loss is nan"))
    assert len(setting.pg.aborts) == 1
    assert not setting.protocol.vote()
    assert setting.kinds() == ["error"]


def test_an_error_that_only_this_replica_has_does_not_disturb_the_peers(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.fail(1, RuntimeError("heal failed"), group_broken=False)
    assert setting.pg.aborts == []
    assert not setting.group.refuse()
    assert not setting.protocol.vote()


def test_a_collective_in_a_broken_quorum_spoils_the_step_with_a_clear_reason(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.member_lost(LossNotice(1, "b:1", "gone"))
    assert setting.protocol.vote(), "its collectives may all have succeeded"
    assert setting.group.refuse()
    assert isinstance(setting.protocol.failure, MemberLostError)
    assert not setting.protocol.vote()


def test_a_configure_that_fails_is_told_and_spoils_the_step(setting: Setting) -> None:
    setting.pg.configure = raising(OSError("Too many open files"))  # type: ignore[method-assign]
    setting.agree(1)
    setting.configure(1)
    assert setting.configured is False
    assert setting.events == [("error", {"quorum_id": 1, "reason": "OSError: Too many open files"})]
    assert not setting.protocol.vote()


@pytest.mark.progress
def test_an_error_reported_before_the_quorum_is_known_releases_the_peers_in_it(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.protocol.decide(committed=True)
    setting.protocol.begin()
    setting.group.fail_current(ValueError("a bad batch"))
    assert setting.pg.aborts == []
    setting.group.agree(quorum(1), allow_heal=True)
    assert len(setting.pg.aborts) == 1
    assert setting.group.refuse()
