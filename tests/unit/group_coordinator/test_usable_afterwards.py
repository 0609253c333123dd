"""What leaves a coordinator as usable as before: a barrier that nobody came to, a refusal to send."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.errors import CollectiveMismatchError, CollectiveTimeoutError, PlainDataError
from torchft_like.group_coordinator import Handle, barrier
from torchft_like.process_group import ProcessGroupGloo

pytestmark = pytest.mark.usefixtures("no_operator")

__all__ = ["party", "store"]


def test_a_barrier_that_was_waited_for_in_vain_is_the_one_that_is_waited_for_again(party: Party) -> None:
    early, late = coordinators = over(party.meet(2, gloo))
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
            early.barrier(0.05)
    late.barrier()
    early.barrier()
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]  # type: ignore[arg-type]
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        early.barrier(0.05)  # another one
    party.together(coordinators, lambda _, c: c.barrier())  # type: ignore[arg-type]


def test_a_barrier_without_a_store_says_that_it_does_not_know_who_is_missing(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "_store_of", lambda _: None)
    early, late = over(party.meet(2, gloo))
    with pytest.raises(CollectiveTimeoutError, match="who did not come is not known"):
        early.barrier(0.05)
    late.barrier()
    early.barrier()


def test_a_barrier_that_was_interrupted_is_the_one_that_is_waited_for_again(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    interrupted, other = coordinators = over(party.meet(2, gloo))
    with monkeypatch.context() as fault:
        fault.setattr(Handle, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.barrier()
    other.barrier()
    interrupted.barrier()
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]  # type: ignore[arg-type]


def test_a_barrier_that_was_refused_is_none(party: Party) -> None:
    one, other = coordinators = over(party.meet(2, lambda: ProcessGroupGloo(LIMIT_S, check_collectives=True)))

    found = errors(party, coordinators, lambda rank, c: c.all_reduce(torch.ones(1)) if rank else c.barrier())
    assert [type(error) for error in found] == [CollectiveMismatchError] * 2
    with pytest.raises(CollectiveTimeoutError, match="rank 0 did not come"):
        other.barrier(0.05)
    one.barrier()
    other.barrier()
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]  # type: ignore[arg-type]
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        one.barrier(0.05)
    other.barrier()


def test_a_refusal_that_nobody_has_received_within_the_timeout_leaves_the_group_alone(party: Party) -> None:
    groups = party.meet(2, lambda: ProcessGroupGloo(3, check_collectives=False))
    refusing, other = coordinators = over(groups)
    with pytest.raises(PlainDataError):
        refusing.send_object({1, 2}, 1)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        refusing.barrier(4)  # the timeout passes
    party.together(coordinators, lambda _, c: c.barrier())  # type: ignore[arg-type]
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]  # type: ignore[arg-type]
    with pytest.raises(CollectiveMismatchError, match="does not travel"):
        other.recv_object(0)


def test_a_refusal_that_nobody_receives_ends_with_its_group(party: Party) -> None:
    groups = party.meet(2, gloo)
    known = set(threading.enumerate())
    with pytest.raises(PlainDataError):
        over(groups)[0].send_object(object(), 1)
    (waiting,) = [thread for thread in threading.enumerate() if thread not in known]
    groups[0].abort("enough")
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
