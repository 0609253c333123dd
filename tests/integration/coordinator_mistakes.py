"""Cases of wrong arguments for coordinators, most of them on one rank alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.integration.coordinator_cases import CASES, case, raised, same
from torchft_like.errors import CollectiveMismatchError, PlainDataError
from torchft_like.group_coordinator import GroupCoordinator

__all__ = ["CASES"]


def odd(c: GroupCoordinator) -> bool:
    """Return whether the caller is the rank that makes the mistake."""
    return c.is_last_rank


def refused(c: GroupCoordinator, act: Callable[[bool], object], *own: type[Exception]) -> None:
    """Check that every rank gets an error, and that the group stays usable.

    Args:
        act: the call, right or wrong.
        own: what the one that is wrong may get instead.
    """
    if c.world_size == 1:
        if own:
            raised(lambda: act(True), *own)
        return
    error = raised(lambda: act(odd(c)), CollectiveMismatchError, *(own if odd(c) else ()))
    if not (odd(c) and own):
        assert f"rank {c.world_size - 1}" in error, error
    same(c.all_gatherv(torch.ones(1)), torch.ones(c.world_size))


@case
def a_wrong_argument_of_one_rank_is_an_error_on_all(c: GroupCoordinator) -> None:
    ones = torch.ones
    refused(c, lambda wrong: c.all_gatherv(ones(2, 3 + wrong)))
    refused(c, lambda wrong: c.all_gatherv(ones(2, 3, dtype=torch.int32 if wrong else torch.float32)))
    refused(c, lambda wrong: c.all_gatherv(ones(3, 3), dim=int(wrong)))
    refused(c, lambda wrong: c.all_gatherv(ones(3, 3), dim=7 if wrong else 0), ValueError)
    refused(c, lambda wrong: c.all_gatherv([ones(3)] * (1 + wrong)))
    refused(c, lambda wrong: c.all_gatherv([ones(3), ones(4 if wrong else 3)]), ValueError)
    sizes = [2] * c.world_size
    refused(c, lambda wrong: c.all_gatherv(ones(3 if wrong else 2), sizes=sizes), ValueError)
    refused(c, lambda wrong: c.all_gatherv("no" if wrong else ones(2)), TypeError)  # type: ignore[type-var]
    refused(c, lambda wrong: c.all_gatherv(torch.empty(2, device="meta") if wrong else ones(2)), TypeError)
    rows = 2 * c.world_size
    refused(c, lambda wrong: c.reduce_scatterv(ones(rows, 3 + wrong), 0))
    refused(c, lambda wrong: c.reduce_scatterv(ones(rows), 0, [*sizes[1:], 3 if wrong else 2]), ValueError)
    refused(c, lambda wrong: c.dispatch(ones(2, 3), ones(2, 4 + wrong)))
    refused(c, lambda wrong: c.dispatch(ones(2, 3), ones(3 if wrong else 2, 4)), ValueError)
    refused(c, lambda wrong: c.dispatch(ones(2, 3), ones(2, 4), wrong))
    refused(c, lambda wrong: c.dispatch(ones(2, 3), ones(2, 4), ones(2, 3) if wrong else False))
    for others in (ones(2, 3), 3):  # not in a list
        refused(
            c,
            lambda wrong, others=others: c.dispatch(  # type: ignore[misc]
                ones(2, 3), ones(2, 4), extra_tensors=others if wrong else [ones(2, 3)]
            ),
            TypeError,
        )
    c.dispatch(ones(2, 3), ones(2, 4))
    refused(c, lambda wrong: c.combine(ones(rows + wrong, 3)), ValueError)
    refused(c, lambda wrong: c.combine(ones(rows, 3), wrong), ValueError)


@case
def a_wrong_object_of_one_rank_is_an_error_on_all(c: GroupCoordinator) -> None:
    source = c.world_size - 1
    refused(c, lambda wrong: c.broadcast_object(object() if wrong else None, source), PlainDataError)
    refused(c, lambda wrong: c.broadcast_object(1, 0 if wrong else source))
    refused(c, lambda wrong: c.broadcast_object(1, c.world_size if wrong else 0), ValueError)
    refused(c, lambda wrong: c.broadcast_object(1, -1 if wrong else 0), ValueError)
    refused(c, lambda wrong: c.broadcast_object_list([1] * (2 + wrong)))
    refused(c, lambda wrong: c.broadcast_object_list((1,) if wrong else [1]), TypeError)  # type: ignore[arg-type]
    refused(c, lambda wrong: c.broadcast_tensor_dict([1] if wrong else None, source), TypeError)  # type: ignore[arg-type]
    refused(
        c, lambda wrong: c.broadcast_tensor_dict({"a": object()} if wrong else None, source), PlainDataError
    )
    refused(c, lambda wrong: c.create_mq_broadcaster(9 if wrong else 0), ValueError)
    refused(c, lambda wrong: c.create_single_reader_mq_broadcasters(0, blocking=wrong), ValueError)
    refused(c, lambda wrong: c.broadcast_object(1) if wrong else c.all_gatherv(torch.ones(1)))


@case
def a_wrong_tensor_of_one_rank_is_an_error_on_all_where_calls_are_checked(c: GroupCoordinator) -> None:
    ones, rows = torch.ones, c.world_size
    refused(c, lambda wrong: c.all_reduce(ones(2 + wrong)))
    refused(c, lambda wrong: c.all_reduce(ones(2, dtype=torch.int32 if wrong else torch.float32)))
    refused(c, lambda wrong: c.all_gather(ones(2, 2), int(wrong)))
    refused(c, lambda wrong: c.all_gather(ones(2, 2), 2 if wrong else 0), ValueError)
    refused(c, lambda wrong: c.reduce_scatter(ones(rows, rows), int(wrong)))
    refused(c, lambda wrong: c.gather(ones(2), 0 if wrong else c.world_size - 1))
    refused(c, lambda wrong: c.gather(ones(2), 9 if wrong else 0), ValueError)
    refused(c, lambda wrong: c.broadcast(ones(2), 0 if wrong else c.world_size - 1))
    refused(c, lambda wrong: c.broadcast(ones(2 + wrong)))
    refused(c, lambda wrong: c.all_reduce(ones(2)) if wrong else c.broadcast(ones(2)))


@case
def a_receiver_that_expects_something_else_is_told(c: GroupCoordinator) -> None:
    if c.world_size == 1:
        return
    if c.is_first_rank:
        c.send(torch.ones(2), 1)
        c.send(torch.ones(2), 1)
        c.send_object("object", 1)
        raised(lambda: c.send_object(object(), 1), PlainDataError)
        raised(lambda: c.send_tensor_dict([1], 1), TypeError)  # type: ignore[arg-type]
        raised(lambda: c.send_tensor_dict({"x": torch.ones(2)}, 1, all_gather_tensors=["x"]), TypeError)  # type: ignore[arg-type]
        raised(lambda: c.send_tensor_dict({"x": torch.ones(2)}, 1, all_gather_group=7), TypeError)  # type: ignore[arg-type]
        c.send_object("all is well", 1)
    elif c.rank_in_group == 1:
        assert "dtype" in raised(lambda: c.recv((2,), torch.int32, 0), CollectiveMismatchError)
        assert "shape" in raised(lambda: c.recv((1,), torch.float32, 0), CollectiveMismatchError)
        assert "operation" in raised(lambda: c.recv_tensor_dict(0), CollectiveMismatchError)
        assert "object" in raised(lambda: c.recv_object(0), CollectiveMismatchError)
        for _ in range(3):
            raised(lambda: c.recv_tensor_dict(0), CollectiveMismatchError)
        assert c.recv_object(0) == "all is well"


@case
def ranks_that_are_none_are_refused(c: GroupCoordinator) -> None:
    for rank in (-1, c.world_size, True, "0"):
        raised(lambda rank=rank: c.send(torch.ones(1), rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.recv((1,), torch.float32, rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.send_object(1, rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.recv_object(rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.send_tensor_dict({}, rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.recv_tensor_dict(rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.broadcast(torch.ones(1), rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.gather(torch.ones(1), rank), ValueError)  # type: ignore[misc]
        raised(lambda rank=rank: c.broadcast_object(1, rank), ValueError)  # type: ignore[misc]
    if c.world_size > 1:
        raised(lambda: c.send(torch.ones(1), c.rank_in_group), ValueError)
        raised(lambda: c.recv_object(c.rank_in_group), ValueError)
