"""Dummy, managed and fault-injecting groups; what forwards and swallows is in test_error_semantics and in
tests/conformance."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from tests.faults import raising
from tests.waiting import wait_for
from torchft_like.errors import (
    CollectiveRefusedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
)
from torchft_like.process_group import (
    FakeProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
    ReconfigureOptions,
)
from torchft_like.process_group.collectives import COLLECTIVES
from torchft_like.process_group.configuration import AbortSignal

from .conftest import LIMIT_S, Party
from .failing import FakeManager, OopsError
from .test_collectives import ALONE


def ones() -> Tensor:
    return torch.ones(2)


# Dummy


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (0, 2), (1, 2)])
def test_a_dummy_is_a_group_of_one(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="world of 1"):
        ProcessGroupDummy(rank, world)


def test_a_dummy_counts_and_gives_what_a_group_of_one_gives() -> None:
    group = ProcessGroupDummy(0, 1)
    group.configure("anything", 3, 7)
    outputs = [torch.zeros(2)]
    dist.all_gather(outputs, ones(), group=group)
    work = group.allreduce([ones()])
    assert torch.equal(work.get_future().wait()[0], ones())
    assert torch.equal(outputs[0], ones())
    assert dict(group.calls) == {"allgather": 1, "allreduce": 1}
    assert (group.configure_count, group.wait_count, group.get_future_count) == (1, 1, 1)
    assert (group.rank(), group.size(), group.errored()) == (0, 1, None)


# Forwarding


def test_a_wrapper_without_an_inner_group_says_so() -> None:
    group = ProcessGroupWrapper()
    for call in (lambda: group.allreduce([ones()]), lambda: group.configure("127.0.0.1:1/x", 0, 1)):
        with pytest.raises(
            ProcessGroupNotConfiguredError, match="ProcessGroupWrapper has no inner group: pass"
        ):
            call()


# Managed


def manager_of(pg: ProcessGroup, participants: int = 1) -> FakeManager:
    return FakeManager(pg, participants, rank=0, factor=10)


def test_an_allreduce_of_a_managed_group_is_the_managers() -> None:
    manager = manager_of(ProcessGroupDummy(0, 1))
    group = ManagedProcessGroup(manager)
    first, second, third = ones(), ones(), ones()
    group.allreduce([first, second]).wait()
    group.allreduce_coalesced([third]).wait()
    dist.all_reduce(third, ReduceOp.MAX, group=group)
    assert [first[0].item(), second[0].item(), third[0].item()] == [10, 10, 100]
    single, coalesced = "allreduce", "allreduce_coalesced"
    assert manager.reduced == [
        (single, ReduceOp.SUM),  # one of two tensors, not two of one
        (coalesced, ReduceOp.SUM),
        (single, ReduceOp.MAX),
    ]
    result = group.allreduce([first, second]).get_future().wait()
    assert result[1] is second
    assert manager.quorums_waited_for == 0, "the manager's allreduce does that itself"


def test_while_a_state_is_loaded_a_managed_group_has_one_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `set_state_dict` broadcasts over every dimension of a mesh: the others would not come."""
    pg = ProcessGroupDummy(0, 1)
    manager = manager_of(pg)
    group, manager.is_alone = ManagedProcessGroup(manager), True
    monkeypatch.setattr(pg, "broadcast", lambda *_: pytest.fail("it reached the other members"))
    tensor = torch.full((2,), 5.0)
    assert group.broadcast_one(tensor, 0).wait()
    assert tensor.tolist() == [5.0, 5.0]
    with pytest.raises(CollectiveRefusedError, match="allgather needs other replicas"):
        group.allgather([[ones(), ones()]], [ones()])
    assert manager.error is None


@pytest.mark.heal_is_clean
def test_a_member_that_heals_does_not_broadcast_its_old_state() -> None:
    manager = manager_of(ProcessGroupDummy(0, 1), participants=2)
    group = ManagedProcessGroup(manager)
    manager.healing = frozenset({2})
    assert group.broadcast_one(ones(), 0).wait()
    assert manager.error is None
    assert group.broadcast_one(ones(), 2).wait()
    assert "rank 2 heals in this step" in str(manager.error)


@pytest.mark.parametrize("name", [row.name for row in COLLECTIVES if row.everyone])
def test_what_needs_every_member_is_skipped_while_one_does_not_participate_or_heals(name: str) -> None:
    for participants, healing, told in (
        (3, frozenset[int](), ""),
        (1, frozenset({0}), "init_sync=False"),  # in the first step they count as participants
    ):
        inner = ProcessGroupDummy(0, 1)
        manager = manager_of(inner, participants)
        manager.healing = healing
        getattr(ManagedProcessGroup(manager), name)(*ALONE[name][0])
        assert inner.calls[name] == 0
        assert isinstance(manager.error, ProcessGroupError)
        assert told in str(manager.error)


def test_a_managed_group_is_configured_by_its_manager_only() -> None:
    group: Any = ManagedProcessGroup(manager_of(ProcessGroupDummy(0, 1)))
    assert not group.supports_reconfigure
    for call in (
        lambda: group.configure("127.0.0.1:1/x", 0, 1),
        group.get_reconfigure_handle,
        lambda: group.reconfigure(ReconfigureOptions()),
    ):
        with pytest.raises(ProcessGroupError, match="configured by its Manager"):
            call()


# Fault injection


def test_the_peers_name_is_an_alias() -> None:
    assert FakeProcessGroupWrapper is FaultInjectingProcessGroup


def test_a_reported_future_error_reaches_wait_and_future_of_the_next_collective_only() -> None:
    for ask in ("wait", "get_future"):
        inner = ProcessGroupDummy(0, 1)
        group = FaultInjectingProcessGroup(inner)
        group.report_future_error(OopsError("planted"))
        work = group.allreduce([ones()])
        with pytest.raises(OopsError, match="planted"):
            work.wait() if ask == "wait" else work.get_future().wait()
        assert group.allreduce([ones()]).wait()
        assert inner.calls["allreduce"] == 2, "the faulty one was run, too"
        assert group.injected == 1


def test_the_nth_call_of_a_named_collective_fails() -> None:
    group = FaultInjectingProcessGroup(ProcessGroupDummy(0, 1))
    group.fail("allreduce", OopsError(), call=3)
    felt = []
    for number in range(1, 6):
        group.broadcast_one(ones(), 0).wait()
        try:
            group.allreduce([ones()]).wait()
        except OopsError:
            felt.append(number)
    assert felt == [3]
    assert group.injected == 1


def test_a_refused_call_raises_and_never_runs() -> None:
    inner = ProcessGroupDummy(0, 1)
    group = FaultInjectingProcessGroup(inner)
    group.refuse("all_gather_single", OopsError())
    with pytest.raises(OopsError):
        group._allgather_base(torch.zeros(2), ones())
    assert inner.calls["_allgather_base"] == 0


def test_a_hung_collective_hangs_until_an_abort(party: Party) -> None:
    inner = ProcessGroupDummy(0, 1)
    group = FaultInjectingProcessGroup(inner)
    group.hang("allreduce")
    group.hang("broadcast")
    work, other = group.allreduce([ones()]), group.broadcast_one(ones(), 0)
    with pytest.raises(TimeoutError):
        work.wait(timedelta(milliseconds=50))
    told = threading.Event()
    other.get_future().add_done_callback(lambda _: told.set())
    assert not work.is_completed()
    assert not told.is_set()
    waiting = party.aside(work.wait)
    group.abort()
    with pytest.raises(ProcessGroupAbortedError):
        waiting.result(LIMIT_S)
    assert told.wait(LIMIT_S)
    assert not inner.calls


def test_a_delayed_call_begins_late_and_an_abort_ends_the_delay(party: Party) -> None:
    inner = ProcessGroupDummy(0, 1)
    group = FaultInjectingProcessGroup(inner)
    group.delay("barrier", seconds=0.05)
    group.barrier().wait()
    assert (inner.calls["barrier"], group.injected) == (1, 1)
    group.delay("allreduce", seconds=1000)
    delayed = party.aside(lambda: group.allreduce([ones()]).wait())
    wait_for(lambda: group.injected == 2)
    assert inner.calls["allreduce"] == 0
    group.abort()
    assert delayed.result(LIMIT_S)


def test_planting_a_fault_for_what_does_not_exist_is_a_value_error() -> None:
    group = FaultInjectingProcessGroup(ProcessGroupDummy(0, 1))
    with pytest.raises(ValueError, match="all_reduce"):
        group.fail("all_reduce", OopsError())
    with pytest.raises(ValueError, match="count from 1"):
        group.hang("allreduce", call=0)


# `configure` in the order of its own documentation, and in torchft 0.2.0's.


class _Told(ProcessGroupDummy):
    """Keeps what it is configured with."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.told: dict[str, Any] = {}

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Any) -> None:
        self.told = {"store_addr": store_addr, "rank": rank, "world_size": world_size, **about}


class _OfTorchft(ProcessGroupDummy):
    """A subclass that somebody wrote for torchft 0.2.0."""

    told: tuple[Any, ...] = ()

    def configure(  # type: ignore[override] # the other order is the point
        self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int | None = None
    ) -> None:
        self.told = (store_addr, replica_id, rank, world_size, quorum_id)


def test_both_orders_mean_the_same() -> None:
    group: Any = _Told()
    also: Any = _Told()
    group.configure("host:1/x", 1, 2, replica_id="me", quorum_id=7, group_rank=0)
    also.configure("host:1/x", "me", 1, 2, 7, 0)
    assert group.told == also.told
    assert (also.told["rank"], also.told["replica_id"], also.told["quorum_id"]) == (1, "me", 7)


def test_a_subclass_in_torchfts_order_is_called_by_name_and_by_place() -> None:
    group: Any = _OfTorchft(0, 1)
    group.configure("host:1/x", "me", 1, 2)
    assert group.told == ("host:1/x", "me", 1, 2, None)
    group.configure("host:1/x", rank=1, world_size=2, replica_id="me", quorum_id=7)
    assert group.told == ("host:1/x", "me", 1, 2, 7)


def test_an_argument_that_comes_twice_or_is_one_too_many_is_refused() -> None:
    group: Any = _Told()
    with pytest.raises(TypeError, match="replica_id"):
        group.configure("host:1/x", "me", 1, 2, replica_id="you")
    with pytest.raises(TypeError):
        group.configure("host:1/x", "me", 1, 2, 3, 4, 5, [6], 7)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_subclass_that_knows_no_signal_is_aborted_when_it_is_set(when: str) -> None:
    class Waiting(_OfTorchft):
        aborts: tuple[str, ...] = ()

        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:  # type: ignore[override]
            if when == "during":
                signal.set("the caller has enough")

        def abort(self, reason: str = "") -> None:  # type: ignore[override]
            self.aborts += (reason,)

    group: Any = Waiting(0, 1)
    signal = AbortSignal()
    if when == "before":
        signal.set("the caller has enough")
    group.configure("host:1/x", "me", 1, 2, ends_with=signal)
    assert group.aborts == ("the caller has enough",)


def test_what_fails_to_end_with_a_configuration_keeps_nothing_else_from_ending() -> None:
    signal, told = AbortSignal(), list[str | None]()
    signal.add(raising(RuntimeError("can't start new thread")))
    signal.add(lambda: told.append(signal.reason))
    with pytest.raises(RuntimeError, match="new thread"):
        signal.set("it is over")
    assert told == ["it is over"]
    assert not signal.set("again")


def test_a_subclass_that_says_nothing_of_configurations_begins_one_with_each_configure() -> None:
    group: Any = _OfTorchft(0, 1)
    seen = [group.configuration]
    for _ in range(2):
        group.configure("host:1/x", "me", 1, 2)
        seen.append(group.configuration)
    assert [each.number for each in seen] == [0, 1, 2]
    assert [each.reason is None for each in seen] == [False, False, True]


def test_abort_takes_torchfts_argument() -> None:
    group = ProcessGroupDummy(0, 1)
    group.configure("host:1/x", 0, 1)
    group.abort(errored=False)
    assert group.configuration.reason is not None


def test_a_subclass_is_aborted_whichever_of_the_arguments_it_takes() -> None:
    told: list[bool | str | None] = []

    class Plain(_OfTorchft):
        def abort(self) -> None:  # type: ignore[override]
            told.append(None)

    class WithErrored(_OfTorchft):
        def abort(self, errored: bool = True) -> None:  # type: ignore[override]
            told.append(errored)

    class WithReason(_OfTorchft):
        def abort(self, reason: str = "none") -> None:  # type: ignore[override]
            told.append(reason)

    for kind in (Plain, WithErrored, WithReason):
        group: Any = kind(0, 1)
        group.abort("a member is lost")
        group.abort(errored=False)
        group.abort(False)
    assert told == [None, None, None, True, False, False, "a member is lost", "none", "none"]
