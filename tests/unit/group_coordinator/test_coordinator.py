"""Coordinators whose members live in threads of one process: over which groups, for how long, and handles."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from lighthouse.address import LOOPBACK, Address
from lighthouse.tls import TLS_ENV
from tests.certificates import certify
from tests.faults import raising
from tests.managers import error_of
from tests.unit.process_group.conftest import Party
from torchft_like.core.agreement.statements import RECORD_BYTES
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupCoordinatorError,
    PlainDataError,
    StillUnderWayError,
)
from torchft_like.gang import ProcessGroupGang, ReduceOperation
from torchft_like.group_coordinator import CoordinatorOptions, GroupCoordinator, Handle
from torchft_like.group_coordinator.coordinator import coordinator_named
from torchft_like.group_coordinator.creation import device_of, unique_name
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from torchft_like.process_group.store_server import StoreServer

pytestmark = pytest.mark.usefixtures("no_operator")

LIMIT_S = 30.0


def gloo() -> ProcessGroup:
    return ProcessGroupGloo(LIMIT_S, check_collectives=False)


def over(groups: list[ProcessGroup], **options: Any) -> list[GroupCoordinator]:
    """A coordinator over each."""
    told = CoordinatorOptions(timeout=LIMIT_S, **options)
    return [GroupCoordinator.from_groups(group, group_name="test", options=told) for group in groups]


def errors(
    party: Party, coordinators: list[GroupCoordinator], act: Callable[[int, GroupCoordinator], object]
) -> list[Exception]:
    """What everybody's call fails with."""

    def caught(rank: int, coordinator: GroupCoordinator) -> Exception:
        error = error_of(lambda: act(rank, coordinator))
        assert error is not None
        return error

    return party.together(coordinators, caught)


WRAPPED: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": gloo,
    "checked": lambda: ProcessGroupGloo(LIMIT_S, check_collectives=True),
    "wrapper": lambda: ProcessGroupWrapper(pg=gloo()),
    "swallowing": lambda: ErrorSwallowingProcessGroupWrapper(gloo()),
    "fault injecting": lambda: FaultInjectingProcessGroup(gloo()),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_any_group_of_ours_carries_a_coordinator(party: Party, kind: str) -> None:
    coordinators = over(party.meet(2, WRAPPED[kind]))

    def talk(rank: int, c: GroupCoordinator) -> object:
        c.barrier()
        sizes = [len(c.all_gatherv(torch.ones(rank))), len(c.reduce_scatterv(torch.ones(3), 0))]
        found, [handle], _ = c.irecv_tensor_dict()
        c.send_tensor_dict({"rank": rank})
        told = c.broadcast_object({"from": rank}, 1)
        assert handle.wait(LIMIT_S) is found
        return [*sizes, told, found]

    assert party.together(coordinators, talk) == [
        [1, 2, {"from": 1}, {"rank": 1}],
        [1, 1, {"from": 1}, {"rank": 0}],
    ]


def test_a_barrier_names_who_is_missing_in_a_store_with_tls(
    party: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_ENV, str(certify(tmp_path / "job")))
    groups = [party.own(gloo()) for _ in range(2)]
    with closing(StoreServer(Address(LOOPBACK, 0))) as server:
        party.together(groups, lambda rank, group: group.configure(f"{server.address}/a/b", rank, 2))
        coordinators = over(groups)
        late = party.aside(lambda: errors(party, coordinators[:1], lambda _, c: c.barrier(0.1)))
        (error,) = late.result(LIMIT_S)
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1,)
        coordinators[1].barrier()


def test_a_dtype_that_cannot_be_added_can_be_moved() -> None:
    alone = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1))
    tensor = torch.ones(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for add in (alone.all_reduce, alone.reduce_scatter, alone.reduce_scatterv):
        with pytest.raises(ValueError, match="cannot be added"):
            add(tensor)
    assert alone.all_gather(tensor).view(torch.uint8).tolist() == [1, 1]


def test_any_true_value_says_that_the_ranks_hold_chunks_of_the_same_sequences() -> None:
    alone, tokens = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1)), torch.ones(2, 3)
    alone.dispatch(tokens, tokens, np.bool_(True))  # type: ignore[call-overload]
    assert torch.equal(alone.combine(tokens, True), tokens)
    with pytest.raises(ValueError, match="it was True in dispatch"):
        alone.combine(tokens)


def test_a_group_of_one_sends_only_what_a_larger_one_would() -> None:
    alone = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1))
    alone.send(torch.ones(2))
    assert alone.isend_tensor_dict({"x": torch.ones(2)}) == []
    sends: tuple[Callable[[Any], object], ...] = alone.send, alone.send_tensor_dict, alone.isend_tensor_dict
    for send in sends:
        with pytest.raises(TypeError, match="expected, not"):
            send([1])
    with pytest.raises(PlainDataError):
        alone.send_object(object(), 0)


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # it is a prototype of torch's
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch will do without
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(2, device="meta"), lambda: torch.eye(2).to_sparse(), nested, quantized]
)
def test_what_is_no_dense_tensor_is_refused_by_everything(make: Callable[[], torch.Tensor]) -> None:
    alone = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1))
    acts: list[Callable[[torch.Tensor], object]] = [
        alone.all_reduce,
        alone.all_gather,
        alone.all_gatherv,
        alone.reduce_scatter,
        alone.reduce_scatterv,
        alone.gather,
        alone.broadcast,
        lambda tensor: alone.dispatch(tensor, tensor),
    ]
    for act in acts:
        with pytest.raises(TypeError, match="a dense torch tensor was expected, not"):
            act(make())


def test_an_expanded_tensor_is_refused_where_it_would_be_overwritten(party: Party) -> None:
    coordinators = over(party.meet(2, gloo), check_collectives=True)
    found = errors(party, coordinators, lambda _, c: c.broadcast(torch.ones(1).expand(2)))
    assert [type(error) for error in found] == [CollectiveMismatchError, ValueError]

    def broadcast(rank: int, c: GroupCoordinator) -> list[float]:
        return c.broadcast(torch.zeros(2) if rank else torch.ones(1).expand(2)).tolist()

    assert party.together(coordinators, broadcast) == [[1.0, 1.0]] * 2


def test_a_column_of_a_matrix_made_in_inference_mode_is_overwritten(party: Party) -> None:
    def broadcast(rank: int, c: GroupCoordinator) -> list[list[float]]:
        with torch.inference_mode():
            matrix = torch.full((2, 2), float(rank))
        c.broadcast(matrix[:, 0])
        return matrix.tolist()

    coordinators = over(party.meet(2, gloo))
    assert party.together(coordinators, broadcast)[1] == [[0.0, 1.0]] * 2


def test_groups_and_ranks_that_do_not_fit_are_refused(party: Party) -> None:
    two, other = party.meet(2, gloo), party.meet(2, gloo)
    with pytest.raises(ValueError, match="3 ranks for a group of 2"):
        GroupCoordinator.from_groups(two[0], ranks=[0, 1, 2])
    with pytest.raises(ValueError, match="differs in the two groups"):
        GroupCoordinator.from_groups(two[0], other[1])
    (one,) = over(two[:1])
    with pytest.raises(ValueError, match="rank 1 of 2 in the given group"):
        one.broadcast_tensor_dict({}, 0, other[1])


def test_ranks_of_the_job_are_told_from_ranks_of_the_group(party: Party) -> None:
    groups = party.meet(2, gloo)
    coordinators = [GroupCoordinator.from_groups(group, ranks=[7, 3]) for group in groups]
    assert [c.rank for c in coordinators] == [7, 3]
    assert [(c.first_rank, c.last_rank, c.next_rank, c.prev_rank) for c in coordinators] == [
        (7, 3, 3, 3),
        (7, 3, 7, 7),
    ]
    group = party.own(gloo())  # one that knows its ranks
    group.configure(party.prefix(), 0, 1, global_ranks=[5])
    assert GroupCoordinator.from_groups(group).rank == 5


def test_tensors_go_over_the_device_group_and_words_over_the_other(party: Party) -> None:
    quiet, busy = party.meet(2, gloo), party.meet(2, lambda: FaultInjectingProcessGroup(gloo()))
    coordinators = [
        GroupCoordinator.from_groups(*pair, group_name="two") for pair in zip(quiet, busy, strict=True)
    ]
    found = party.together(coordinators, lambda rank, c: c.broadcast_tensor_dict({"x": torch.ones(9)}))
    assert [len(one["x"]) for one in found] == [9, 9]
    for group in busy:
        group.report_future_error(RuntimeError("injected"))  # type: ignore[attr-defined]
    assert party.together(coordinators, lambda rank, c: c.broadcast_object(rank)) == [0, 0]
    for error in errors(party, coordinators, lambda _, c: c.all_reduce(torch.ones(1))):
        assert isinstance(error, GroupCoordinatorError)
        assert isinstance(error.__cause__, RuntimeError)


def test_a_coordinator_ends_with_the_configuration_of_its_group(party: Party) -> None:
    groups = party.meet(2, gloo)
    coordinators = over(groups)
    party.together(coordinators, lambda _, c: c.barrier())
    party.configure(groups)
    for error in errors(party, coordinators, lambda _, c: c.all_reduce(torch.ones(1))):
        assert isinstance(error, GroupCoordinatorError)
        assert "configured anew" in str(error)
    anew = over(groups)  # which the old one has not broken
    assert party.together(anew, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]


def test_a_call_left_half_way_releases_the_others(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinators = over(party.meet(2, gloo))
    monkeypatch.setattr(
        coordinators[1]._communicator, "empty", raising(MemoryError("no memory for what comes"))
    )
    value = {"x": torch.ones(1 << 22)}
    found = errors(party, coordinators, lambda _, c: c.broadcast_tensor_dict(value))
    assert isinstance(found[1].__cause__, MemoryError)
    assert all(isinstance(error, GroupCoordinatorError) for error in found)


def test_a_message_that_is_too_large_is_refused_at_both_ends(party: Party) -> None:
    large = {"x": torch.ones(1000)}
    for error in errors(
        party, over(party.meet(2, gloo), message_bytes_max=100), lambda _, c: c.broadcast_tensor_dict(large)
    ):
        assert isinstance(error, PlainDataError | CollectiveMismatchError)
        assert "message_bytes_max" in str(error)
    groups = party.meet(2, gloo)
    wide, narrow = over(groups[:1])[0], over(groups[1:], message_bytes_max=100)[0]
    found = errors(party, [wide, narrow], lambda _, c: c.broadcast_tensor_dict({"x": torch.ones(1 << 22)}))
    assert "message_bytes_max is 100 here" in str(found[1])


def test_calls_beside_the_coordinators_on_its_group_are_told_from_statements(party: Party) -> None:
    groups = party.meet(2, gloo)
    coordinators = over(groups)

    def foreign(rank: int, c: GroupCoordinator) -> object:
        if rank == 0:
            return c.broadcast_object(1)
        noise = torch.full((RECORD_BYTES,), 255, dtype=torch.uint8)
        return groups[1].gather([], [noise]).wait()

    with pytest.raises(GroupCoordinatorError, match="no statement"):
        party.together(coordinators, foreign)


# ------------------------------------------------------------------------ handles


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_handle_that_is_waited_for_too_briefly_goes_on(gate: threading.Event) -> None:
    handle = Handle("reading", lambda: gate.wait(LIMIT_S) and 7, lambda found: [found()])
    with pytest.raises(StillUnderWayError, match="reading is not done after"):
        handle.wait(0.01)
    assert not handle.is_completed()
    assert "under way" in repr(handle)
    gate.set()
    first = handle.wait(LIMIT_S)
    assert first == [7]
    assert handle.wait() is first  # the result is made once
    assert handle.is_completed()


def test_a_handle_raises_what_the_operation_failed_with_every_time() -> None:
    handle: Handle[object] = Handle("reading", raising(TimeoutError("its own")))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="its own"):
            handle.wait(LIMIT_S)
    assert handle.is_completed()


def test_what_is_called_on_all_ranks_to_make_a_result_is_called_once_though_it_failed() -> None:
    made: list[object] = []

    def settle(found: Callable[[], object]) -> object:
        made.append(found())
        raise CollectiveMismatchError("shape", {0: "its", 1: "other"})

    handle = Handle("reading", lambda: 7, settle)
    for _ in range(2):
        with pytest.raises(CollectiveMismatchError, match="shape"):
            handle.wait(LIMIT_S)
    assert made == [7]


def test_ctrl_c_while_a_result_is_made_ends_that_wait_alone() -> None:
    interrupts = [KeyboardInterrupt]

    def settle(found: Callable[[], object]) -> object:
        if interrupts:
            raise interrupts.pop()
        return found()

    handle = Handle("reading", lambda: 7, settle)
    with pytest.raises(KeyboardInterrupt):
        handle.wait(LIMIT_S)
    assert handle.wait(LIMIT_S) == 7


def test_a_handle_for_which_a_stream_waits_has_no_thread() -> None:
    waited: list[int] = []
    over_yet = [False]
    handle = Handle("moving", lambda: waited.append(1), lambda _: "there", lambda: over_yet[0])
    assert not handle.is_completed()
    assert waited == []
    assert handle.wait() == handle.wait() == "there"
    assert waited == [1]


def test_tensors_are_not_there_before_the_handle_is_done(party: Party) -> None:
    coordinators = over(party.meet(2, gloo))
    found, [receiving], _ = coordinators[1].irecv_tensor_dict(0)
    with pytest.raises(StillUnderWayError):
        receiving.wait(0.05)
    assert not receiving.is_completed()
    [sending] = coordinators[0].isend_tensor_dict({"x": torch.arange(3), 7: "a number as a key"}, 1)  # type: ignore[dict-item]
    assert receiving.wait(LIMIT_S) is found
    assert found is not None
    assert (found["x"].tolist(), found[7]) == ([0, 1, 2], "a number as a key")  # type: ignore[index]
    sending.wait(LIMIT_S)


def test_ranks_that_cannot_send_to_each_other_hear_why_at_once_and_the_group_goes_on(party: Party) -> None:
    coordinators = over(party.meet(2, lambda: ProcessGroupGloo(3600, check_collectives=False)))
    for found in (
        errors(party, coordinators, lambda _, c: c.isend_tensor_dict({"x": object()})),
        errors(party, coordinators, lambda rank, c: c.send_object(object(), 1 - rank)),
    ):
        assert [type(error) for error in found] == [PlainDataError] * 2
    for receive in (GroupCoordinator.recv_tensor_dict, lambda c: c.recv_object(1 - c.rank_in_group)):
        for error in errors(party, coordinators, lambda _, c, receive=receive: receive(c)):  # type: ignore[misc]
            assert isinstance(error, CollectiveMismatchError)
            assert "is an object, which does not travel" in str(error)
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]


def test_a_handle_ends_with_its_group(party: Party) -> None:
    groups = party.meet(2, gloo)
    _, [receiving], _ = over(groups)[1].irecv_tensor_dict(0)
    groups[1].abort("enough")
    with pytest.raises(GroupCoordinatorError, match="enough"):
        receiving.wait(LIMIT_S)


# -------------------------------------------------------------------------- names


def test_names_are_numbered_and_forgotten_with_their_coordinators() -> None:
    alone = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1), group_name="solo")
    again = GroupCoordinator.from_groups(ProcessGroupDummy(0, 1), group_name="solo")
    assert alone.unique_name != again.unique_name
    name = alone.unique_name
    assert coordinator_named(name) is alone
    del alone
    with pytest.raises(GroupCoordinatorError, match="no coordinator named"):
        coordinator_named(name)
    with pytest.raises(ValueError, match="101 characters"):
        unique_name("x" * 101)


def test_a_coordinator_needs_torchs_default_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        GroupCoordinator([[0]], 0, "gloo", True)


@pytest.mark.parametrize("local_rank", [-1, True, "0"])
def test_a_local_rank_is_a_number_of_a_device(local_rank: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        device_of("torchft-gloo", local_rank)


def test_a_device_that_is_not_there_is_refused() -> None:
    for backend in ("torchft-nccl", "cuda:nccl"):
        with pytest.raises(ValueError, match="CUDA devices"):
            device_of(backend, 99)
    for backend in ("torchft-gloo", "cpu:gloo", "torchft-baby-gloo"):
        assert device_of(backend, 99) == torch.device("cpu")


@pytest.mark.parametrize("backend", ["nope", "cpu:nope", "cpu:gloo,cuda:nope"])
def test_a_backend_that_torch_does_not_know_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="torch has no backend nope"):
        device_of(backend, 0)


def test_options_are_checked() -> None:
    assert CoordinatorOptions(timeout=2).timeout == timedelta(seconds=2)
    for wrong in ({"timeout": 0}, {"message_bytes_max": 0}):
        with pytest.raises(ValueError, match="positive"):
            CoordinatorOptions(**wrong)  # type: ignore[arg-type]


# How many functions of the library one call of a coordinator or a gang goes through.


TRIES = 200  # a call that has to wait for the other rank takes a few more: on a busy machine most do


def calls_in_library(act: Callable[[], object]) -> int:
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("torchft_like.")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "calls_max"), [("reduce_scatter", 25), ("broadcast_object", 45), ("gang.all_reduce", 16)]
)
def test_a_call_takes_few_steps(party: Party, name: str, calls_max: int) -> None:
    groups = party.meet(2, gloo)
    coordinators = over(groups)
    gangs = [ProcessGroupGang(group, torch.device("cpu")) for group in groups]
    tensor = torch.ones(4, 4)

    def fewest(rank: int, _: object) -> int:
        acts: dict[str, Callable[[], object]] = {
            "reduce_scatter": lambda: coordinators[rank].reduce_scatter(tensor, 0),
            "broadcast_object": lambda: coordinators[rank].broadcast_object(None if rank else {"a": 1}),
            "gang.all_reduce": lambda: gangs[rank].all_reduce(torch.ones(4, 4), ReduceOperation.SUM),
        }
        act = acts[name]
        act()
        return min(calls_in_library(act) for _ in range(TRIES))

    found = party.together(groups, fewest)
    assert 0 < found[0] <= calls_max
