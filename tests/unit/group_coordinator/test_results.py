"""What the calls of coordinators give, whose members live in threads of one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.futures import Future

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.process_group.conftest import Party
from tests.waiting import wait_for
from torchft_like.communicator.tensors import device_terms
from torchft_like.errors import CollectiveMismatchError
from torchft_like.futures import future_timeout
from torchft_like.group_coordinator import GroupCoordinator
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
