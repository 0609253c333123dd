"""What the calls of coordinators give, whose members live in threads of one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from tests.stores import serve_store
from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.process_group.conftest import Party
from tests.waiting import wait_for
from torchft_like.communicator.tensors import device_terms
from torchft_like.core.agreement.statements import Statement
from torchft_like.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupCoordinatorError
from torchft_like.futures import future_timeout
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.group_coordinator.creation import agree
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.runtime import long_waits


def test_groups_that_compare_calls_serve_in_inference_mode(party: Party) -> None:
    """They start collectives on a thread of theirs, which is in no such mode."""

    def infer(rank: int, c: GroupCoordinator) -> list[object]:
        with torch.inference_mode():
            row = torch.full((1, 2), float(rank))
            joined = [c.all_gather(row, 0), c.all_gatherv(row), c.gather(row, 1, 0)]
            told = [c.broadcast_object("a"), c.broadcast_tensor_dict({"b": 1})]
            return [*(None if tensor is None else tensor.tolist() for tensor in joined), *told]

    groups = party.meet(2, lambda: ProcessGroupGloo(LIMIT_S, check_collectives=True))
    both = [[0.0, 0.0], [1.0, 1.0]]
    for rank, found in enumerate(party.together(over(groups), infer)):
        assert found == [both, both, both if rank else None, "a", {"b": 1}]


def test_what_the_members_tell_each_other_is_on_the_cpu_whatever_the_default_device_is(party: Party) -> None:
    def tell(rank: int, c: GroupCoordinator) -> list[object]:
        row = torch.full((1, 2), float(rank))
        with torch.device("meta"):
            _, [handle], _ = c.irecv_tensor_dict()
            c.send_tensor_dict({"a": row, "b": b"", "c": [0] * 2000})
            told = [c.broadcast_object("a"), c.broadcast_object([0] * 2000)]
            return [c.all_gatherv(row).tolist(), *told, handle.wait(LIMIT_S)["a"].tolist()]

    for rank, found in enumerate(party.together(over(party.meet(2, gloo)), tell)):
        assert found == [[[0, 0], [1, 1]], "a", [0] * 2000, [[1 - rank] * 2]]


def test_the_device_group_is_one_of_the_members_where_there_is_no_other_for_the_device(party: Party) -> None:
    """torch takes a group of None for the whole job, and adds up what others have."""
    groups = party.meet(2, gloo)
    for device in ("cpu", "meta"):
        coordinators = [GroupCoordinator.from_groups(group, device=device) for group in groups]
        assert [c.device_group for c in coordinators] == groups


def test_a_call_that_takes_long_says_so_in_the_log_and_one_that_has_returned_does_not(
    party: Party, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_waits, "LONG_WAIT_S", 0.04)
    monkeypatch.setattr(long_waits._watch, "_has_begun", False)
    coordinators = [GroupCoordinator.from_groups(pg, group_name="slow") for pg in party.meet(2, gloo)]
    with caplog.at_level(logging.INFO, long_waits.__name__):
        waiting = party.aside(coordinators[1].recv_object, 0)
        wait_for(
            lambda: len([text for text in caplog.messages if "s: recv_object over group slow" in text]) > 1
        )
        tensor = party.aside(coordinators[0].recv, 1, torch.int64, 1)
        wait_for(lambda: any("s: recv over group slow" in text for text in caplog.messages))
        coordinators[0].send_object("at last", 1)
        coordinators[1].send(torch.tensor([7]), 0)
        assert (waiting.result(LIMIT_S), tensor.result(LIMIT_S).tolist()) == ("at last", [7])
    assert not [over for _, _, over in list(long_waits.calls.values()) if "group slow" in str(over)]


class _BlockedHandler(logging.Handler):
    """A log whose lines are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked, self.is_read = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_blocked.set()
        self.is_read.wait(LIMIT_S)


def test_a_log_that_blocks_holds_up_no_timeout(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, log = _BlockedHandler(), logging.Logger("blocked", logging.INFO)
    monkeypatch.setattr(long_waits, "LONG_WAIT_S", 0.04)
    monkeypatch.setattr(long_waits._watch, "_has_begun", False)
    monkeypatch.setitem(long_waits.calls, "a test's", (0.0, "recv", "a group"))
    monkeypatch.setattr(long_waits, "_log", log)
    log.addHandler(handler)
    expired = threading.Event()
    try:
        GroupCoordinator.from_groups(*party.meet(1, gloo))
        assert handler.is_blocked.wait(LIMIT_S)
        late: Future[None] = Future()
        future_timeout(late, timedelta(milliseconds=1)).add_done_callback(lambda _: expired.set())
        assert expired.wait(LIMIT_S / 4)
    finally:
        handler.is_read.set()


# What the ranks must agree on about their tensors.


HERE, THERE = torch.ones(2), torch.ones(2, device="meta")


def test_where_tensors_move_is_told_if_there_is_a_choice() -> None:
    assert device_terms([HERE, THERE], {"cpu", "meta"}) == (("device", "cpu, meta"),)
    assert device_terms([HERE, THERE], {"cpu", "cuda"}) == (("device", "cpu, cpu"),)
    assert device_terms([HERE, THERE], {"cpu"}) == ()


@pytest.mark.parametrize(
    "act",
    [
        GroupCoordinator.all_reduce,
        GroupCoordinator.all_gather,
        GroupCoordinator.broadcast,
        GroupCoordinator.all_gatherv,
        GroupCoordinator.reduce_scatterv,
    ],
)
def test_ranks_that_would_wait_in_different_groups_are_told(
    party: Party, monkeypatch: pytest.MonkeyPatch, act: Callable[[GroupCoordinator, torch.Tensor], object]
) -> None:
    monkeypatch.setattr("torchft_like.communicator.tensors.is_dense", lambda _: True)
    coordinators = over(party.meet(2, gloo), check_collectives=True)
    for coordinator in coordinators:
        communicator = coordinator._current()
        communicator.channels["meta"] = communicator.control  # type: ignore[index] # stands for a device that has a group
    found = errors(party, coordinators, lambda rank, c: act(c, THERE if rank else HERE))
    assert [(type(error), error.aspect) for error in found] == [(CollectiveMismatchError, "device")] * 2  # type: ignore[attr-defined]


# Making the groups of a coordinator, in a job of one rank.


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("torchft-dummy", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "failure", [RuntimeError("no device group"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_a_failed_device_group_leaves_none(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    make, known = dist.new_group, set(c10d._world.pg_map)
    made: list[Any] = []

    def new_group(*arguments: Any, **more: Any) -> Any:
        if more["group_desc"].endswith("/device"):
            raise failure
        made.append(make(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises((GroupCoordinatorError, KeyboardInterrupt)):
        GroupCoordinator([[0]], 0, "torchft-dummy", True)
    assert len(made) == 1
    assert set(c10d._world.pg_map) == known


# Ranks that agree in a store before they make groups together: all of them go on, or none does.


PATIENT = timedelta(seconds=60)
SHORT = timedelta(seconds=0.05)


class Interrupted:
    """A store in which something happens when the time of who waits is up."""

    def __init__(self, store: Store, happens: Callable[[], object]) -> None:
        self._store = store
        self._happens = happens

    def wait(self, *_: Any) -> None:
        self._happens()
        raise RuntimeError("the time is up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def reach(store: Any, rank: int, timeout: timedelta = PATIENT, of: int = 2) -> int:
    """Return the rank once it may go on."""
    agree(store, rank, of, timeout, Statement("making", terms=(("name", "é" * 5000),)))
    return rank


def test_ranks_that_ask_for_the_same_go_on() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        reaching = [threads.submit(reach, store, rank, of=3) for rank in range(3)]
        assert [future.result(60) for future in reaching] == [0, 1, 2]


def test_who_comes_after_the_first_has_given_up_does_not_go_on_either() -> None:
    store = HashStore()
    for rank, timeout in ((0, SHORT), (2, PATIENT), (1, PATIENT)):
        with pytest.raises(CollectiveTimeoutError) as raised:
            reach(store, rank, timeout=timeout, of=3)
        assert raised.value.missing == (1, 2)


def test_whose_time_is_up_when_the_last_has_come_goes_on_with_it() -> None:
    store = HashStore()
    last = Interrupted(store, lambda: None)  # whose own time is up at once
    gone_on: list[int] = []
    gone_on.append(reach(Interrupted(store, lambda: gone_on.append(reach(last, 1))), 0))
    assert gone_on == [1, 0]


def test_a_rank_that_refuses_has_come() -> None:
    store = HashStore()
    agree(store, 1, 2, PATIENT, Statement("making").refused(ValueError("no such device")))
    with pytest.raises(CollectiveMismatchError, match="no such device"):
        reach(store, 0)


def test_a_store_that_is_gone_is_an_error() -> None:
    store = serve_store()
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    del store
    with pytest.raises(GroupCoordinatorError, match="the default group's store failed"):
        reach(client, 0)
