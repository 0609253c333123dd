"""The calls that every member of a coordinator makes in a test, all at once, and their expected results.

A case is a function of the coordinator; it raises an AssertionError where the result is not the one that is
computed here without any communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests import equality
from torchft_like.errors import CollectiveMismatchError, CollectiveTimeoutError, PlainDataError
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.message_queue import MessageQueue

Case = Callable[[GroupCoordinator], None]
CASES: dict[str, Case] = {}

ADDED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
MOVED = (*ADDED, torch.uint16, torch.uint64, torch.complex128, torch.float8_e4m3fn)


def case(function: Case) -> Case:
    """Add a function to the cases, under its name."""
    CASES[function.__name__] = function
    return function


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Return a rank's contribution: small numbers that differ by rank and place."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 5
    if dtype == torch.bool:
        return (numbers == rank % 5).view(shape)
    return numbers.to(torch.float32).to(dtype).view(shape)


def total(world: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of all ranks' parts."""
    parts = [part(rank, shape, dtype) for rank in range(world)]
    if dtype == torch.bool:
        return torch.stack(parts).any(0)
    wide = torch.stack(parts).to(torch.complex128 if dtype.is_complex else torch.float64)
    return wide.sum(0).to(dtype)


def same(found: Any, expected: Any) -> None:
    """Check that two values are of the same type, dtype, shape and bits, in tensors without gaps."""
    assert equality.same(found, expected), (found, expected)
    assert all(leaf.is_contiguous() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))


def raised(act: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return the text of the error that `act` must raise."""
    try:
        result = act()
    except kinds as error:
        return str(error)
    raise AssertionError(f"no error, but {result!r:.200}")


# ----------------------------------------------------------------------------- tensors


@case
def all_reduce_adds(c: GroupCoordinator) -> None:
    for dtype in ADDED:
        mine = part(c.rank_in_group, (3, 4), dtype)
        before = mine.clone()
        found = c.all_reduce(mine)
        same(found, total(c.world_size, (3, 4), dtype))
        same(mine, before)
        assert found.data_ptr() != mine.data_ptr()
    same(c._all_reduce_out_place(part(c.rank_in_group, ())), total(c.world_size, ()))
    same(c.all_reduce(torch.empty(0, 3)), torch.empty(0, 3))
    same(c.all_reduce(part(c.rank_in_group, (4, 3)).t()), total(c.world_size, (4, 3)).t().contiguous())


@case
def a_conjugate_is_added_like_any_tensor(c: GroupCoordinator) -> None:
    turned = torch.full((c.world_size, 2), 1 + 2j).conj()
    expected = c.world_size * torch.full((1, 2), 1 - 2j)
    same(c.reduce_scatter(turned, 0), expected)
    same(c.reduce_scatterv(turned, 0), expected)
    c.dispatch(torch.ones(1, 3), torch.ones(1, 3))
    same(c.combine(turned), expected)


@case
def all_gather_joins_along_any_dim(c: GroupCoordinator) -> None:
    for dtype in MOVED:
        for dim in (0, 1, -1, -3) if dtype == torch.float32 else (1,):
            parts = [part(rank, (2, 3, 2), dtype) for rank in range(c.world_size)]
            found = c.all_gather(parts[c.rank_in_group], dim)
            assert found.dtype == dtype
            wide = torch.complex128 if dtype.is_complex else torch.float64
            same(found.to(wide), torch.cat([p.to(wide) for p in parts], dim))
    same(c.all_gather(torch.empty(2, 0)), torch.empty(2, 0))
    turned = [part(rank, (3, 2)).t() for rank in range(c.world_size)]
    same(c._all_gather_out_place(turned[c.rank_in_group], 0), torch.cat(turned, 0))
    columns = [part(rank, (3, 2, 1)) for rank in range(c.world_size)]  # whose join could be left with gaps
    for found in (c.all_gather(columns[c.rank_in_group], 2), c.all_gatherv(columns[c.rank_in_group], 2)):
        same(found, torch.cat(columns, 2))


def rows_of(rank: int) -> int:
    """Return the number of rows of a rank; rank 1 has none."""
    return (2, 0, 5, 1)[rank]


@case
def all_gatherv_joins_what_the_ranks_have(c: GroupCoordinator) -> None:
    sizes = [rows_of(rank) for rank in range(c.world_size)]
    for dtype in MOVED:
        for dim in (0, 1, -1) if dtype == torch.float32 else (0,):
            shape = [3, 4, 2]
            parts = []
            for rank, size in enumerate(sizes):
                shape[dim] = size
                parts.append(part(rank, (shape[0], shape[1], shape[2]), dtype))
            wide = torch.complex128 if dtype.is_complex else torch.float64
            expected = torch.cat([p.to(wide) for p in parts], dim)
            for known in (None, sizes) if dtype == torch.float32 else (None,):
                found = c.all_gatherv(parts[c.rank_in_group], dim, known)
                assert found.dtype == dtype
                same(found.to(wide), expected)
    several = [[part(rank, (size, 2)), part(rank, (size,), torch.int64)] for rank, size in enumerate(sizes)]
    same(c.all_gatherv(several[c.rank_in_group]), [torch.cat(ps) for ps in zip(*several, strict=True)])
    turned = [part(rank, (3, size)).t() for rank, size in enumerate(sizes)]
    same(c.all_gatherv(turned[c.rank_in_group]), torch.cat(turned))
    same(c.all_gatherv(torch.empty(0, 3)), torch.empty(0, 3))


@case
def reduce_scatter_adds_and_shares_out(c: GroupCoordinator) -> None:
    rows, rank = 2 * c.world_size, c.rank_in_group
    for dtype in ADDED:
        for dim in (0, 1, -1) if dtype == torch.float32 else (1,):
            shape = [3, 4, 5]
            shape[dim] = rows
            whole = total(c.world_size, (shape[0], shape[1], shape[2]), dtype)
            expected = whole.narrow(dim, 2 * rank, 2).contiguous()
            mine = part(rank, (shape[0], shape[1], shape[2]), dtype)
            same(c.reduce_scatter(mine, dim), expected)
            same(c._reduce_scatter_out_place(mine, dim), expected)


@case
def reduce_scatterv_adds_and_shares_out_as_told(c: GroupCoordinator) -> None:
    rank = c.rank_in_group
    sizes = [rows_of(r) for r in range(c.world_size)]
    for dtype in ADDED:
        for dim in (0, 1, -1) if dtype == torch.float32 else (1,):
            shape = [3, 4, 5]
            shape[dim] = sum(sizes)
            mine = part(rank, (shape[0], shape[1], shape[2]), dtype)
            expected = total(c.world_size, (shape[0], shape[1], shape[2]), dtype)
            own = expected.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()
            same(c.reduce_scatterv(mine, dim, sizes), own)
            same(c.reduce_scatterv([mine, mine], dim, sizes), [own, own])
    large = part(rank, (100_000,))  # so large that uneven work is shared out
    for wants in range(c.world_size):
        sizes = [100_000 if r == wants else 0 for r in range(c.world_size)]
        own = total(c.world_size, (100_000,))[: sizes[rank]]
        same(c.reduce_scatterv(large, 0, sizes), own)
    uneven = part(rank, (c.world_size + 1, 2))
    expected = total(c.world_size, (c.world_size + 1, 2)).tensor_split(c.world_size)[rank]
    same(c.reduce_scatterv(uneven, 0), expected.contiguous())
    same(c.reduce_scatterv([uneven, uneven], 0), [expected.contiguous()] * 2)
    same(c.reduce_scatterv(torch.empty(0, 2), 0), torch.empty(0, 2))


@case
def gather_joins_on_one_rank(c: GroupCoordinator) -> None:
    for dst in range(c.world_size):
        for dim in (0, -1):
            parts = [part(rank, (2, 3)) for rank in range(c.world_size)]
            found = c.gather(parts[c.rank_in_group], dst, dim)
            if c.rank_in_group == dst:
                same(found, torch.cat(parts, dim))
            else:
                assert found is None


@case
def broadcast_overwrites(c: GroupCoordinator) -> None:
    for src in range(c.world_size):
        for dtype in MOVED:
            mine = part(c.rank_in_group, (2, 3), dtype)
            assert c.broadcast(mine, src) is mine
            same(mine.view(torch.uint8), part(src, (2, 3), dtype).view(torch.uint8))
    turned = part(c.rank_in_group, (3, 2)).t()
    c.broadcast(turned, c.world_size - 1)
    same(turned.contiguous(), part(c.world_size - 1, (3, 2)).t().contiguous())


@case
def send_and_recv_go_round(c: GroupCoordinator) -> None:
    if c.world_size == 1:
        c.send(torch.ones(2))
        same(c.recv((2,), torch.float32), torch.zeros(2))
        return
    previous = (c.rank_in_group - 1) % c.world_size
    for dtype in MOVED:
        mine, theirs = part(c.rank_in_group, (2, 3), dtype), part(previous, (2, 3), dtype)
        if c.is_first_rank:
            c.send(mine)
            found = c.recv((2, 3), dtype)
        else:
            found = c.recv((2, 3), dtype)
            c.send(mine)
        same(found.view(torch.uint8), theirs.view(torch.uint8))
    if c.is_first_rank:
        c.send(torch.arange(3), 1)
    elif c.rank_in_group == 1:
        same(c.recv(3, torch.int64, 0), torch.arange(3))  # a number is the size of one dimension


# ----------------------------------------------------------------------------- objects


def something(rank: int) -> dict[str, Any]:
    """Return a dict with a value of every type that can be sent."""
    return {
        "none": None,
        "numbers": [True, rank, -(2**70), 0.5, float("inf")],
        "text": "grüß" * rank,
        "bytes": b"\0\1" * 3000,
        "nested": ({"a": [(), {}]}, [[1], "x"]),
        "tensor": part(rank, (2, 3), torch.bfloat16),
        "array": np.arange(rank + 2, dtype=np.int16),
        "none of it": torch.empty(0, 4),
    }


@case
def objects_are_broadcast(c: GroupCoordinator) -> None:
    for src in range(c.world_size):
        mine = something(src) if c.rank_in_group == src else None
        same(c.broadcast_object(mine, src), something(src))
        listed: list[Any] = [something(c.rank_in_group), c.rank_in_group]
        assert c.broadcast_object_list(listed, src) is listed
        same(listed, [something(src), src])


@case
def objects_are_sent(c: GroupCoordinator) -> None:
    if c.world_size == 1:
        c.send_object(1, 0)
        assert c.recv_object(0) is None
        return
    if c.is_first_rank:
        for dst in range(1, c.world_size):
            c.send_object(something(dst), dst)
            same(c.recv_object(dst), ["back", dst])
    else:
        same(c.recv_object(0), something(c.rank_in_group))
        c.send_object(["back", c.rank_in_group], 0)


@case
def tensor_dicts_are_broadcast(c: GroupCoordinator) -> None:
    for src in range(c.world_size):
        mine = many_tensors(src) if c.rank_in_group == src else None
        same(c.broadcast_tensor_dict(mine, src), many_tensors(src))
        handle = c.ibroadcast_tensor_dict(mine, src, c.device_group, c.cpu_group)
        same(handle.wait(60), many_tensors(src))
        assert handle.is_completed()


def many_tensors(rank: int) -> dict[str, Any]:
    """Return a dict of small tensors, a large one, one without elements, and a value that is no tensor."""
    small = {f"small {n}": part(rank, (n + 1, 3), dtype) for n, dtype in enumerate(ADDED)}
    large = part(rank, (300, 300))
    return {**small, "large": large, "turned": large.t().contiguous(), "rank": rank, "empty": torch.empty(0)}


@case
def tensor_dicts_are_sent(c: GroupCoordinator) -> None:
    if c.world_size == 1:
        c.send_tensor_dict({"a": torch.ones(1)})
        assert c.isend_tensor_dict({"a": torch.ones(1)}) == []
        assert c.recv_tensor_dict() is None
        assert c.irecv_tensor_dict() == (None, [], [])
        return
    previous = (c.rank_in_group - 1) % c.world_size
    coming = [c.irecv_tensor_dict() for _ in range(3)]  # before any member has sent
    going = [c.isend_tensor_dict({"n": n, **many_tensors(c.rank_in_group)}) for n in range(3)]
    for n in (2, 0, 1):
        found, handles, postprocess = coming[n]  # as vLLM's callers go on
        for handle in handles:
            handle.wait()
        for finish in postprocess:
            finish()
        same(found, {"n": n, **many_tensors(previous)})
    for sending in [handle for handles in going for handle in handles]:
        sending.wait()
        assert sending.is_completed()
    if c.is_first_rank:
        c.send_tensor_dict(many_tensors(7), c.world_size - 1)
    elif c.is_last_rank:
        same(c.recv_tensor_dict(0), many_tensors(7))


# ---------------------------------------------------------------------------- the rest


@case
def tokens_come_home(c: GroupCoordinator) -> None:
    tokens = [rows_of(rank) for rank in range(c.world_size)]
    hidden = [part(rank, (count, 4)) for rank, count in enumerate(tokens)]
    logits = [part(rank, (count, 2)) for rank, count in enumerate(tokens)]
    scales = [part(rank, (count,)) for rank, count in enumerate(tokens)]
    mine = c.rank_in_group
    for flag in (False, True):
        same(c.dispatch(hidden[mine], logits[mine], flag), (torch.cat(hidden), torch.cat(logits)))
        same(c.combine(torch.cat(hidden), flag), c.world_size * hidden[mine])
        routed = c.dispatch_router_logits(hidden[mine], logits[mine], flag)
        same(routed, (torch.cat(hidden), torch.cat(logits)))
        weights, experts, extra = scales[mine], logits[mine].long(), [scales[mine]]
        gathered = torch.cat(hidden), torch.cat(scales), torch.cat(logits).long()
        same(c.dispatch(hidden[mine], weights, experts, flag), gathered)
        found = c.dispatch(hidden[mine], weights, topk_ids=experts, extra_tensors=extra)
        same(found, (*gathered, [torch.cat(scales)]))
        found = c.dispatch(hidden[mine], logits[mine], flag, [scales[mine]])
        same(found, (torch.cat(hidden), torch.cat(logits), [torch.cat(scales)]))
        only_mine = torch.zeros(sum(tokens), 4)
        start = sum(tokens[:mine])
        only_mine[start : start + tokens[mine]] = hidden[mine]
        same(c.combine(only_mine, flag), hidden[mine])


@case
def barriers_are_passed(c: GroupCoordinator) -> None:
    for timeout in (None, 30):
        c.barrier(timeout)
    raised(lambda: c.barrier(0), ValueError)


@case
def a_barrier_names_who_is_missing(c: GroupCoordinator) -> None:
    if c.world_size == 1:
        return
    if c.is_last_rank:
        for rank in range(c.world_size - 1):
            assert c.recv_object(rank) == "waited in vain"
        c.barrier()
    else:
        error = raised(lambda: c.barrier(0.2), CollectiveTimeoutError)
        assert f"rank {c.world_size - 1} did not come" in error
        c.send_object("waited in vain", c.world_size - 1)
        c.barrier()  # the same one
    c.barrier()
    same(c.all_reduce(torch.ones(1)), torch.ones(1) * c.world_size)


@case
def queues_carry_objects(c: GroupCoordinator) -> None:
    writer = c.world_size - 1
    queue = c.create_mq_broadcaster(writer)
    if c.world_size > 1:
        mine = {"x": 1} if c.rank_in_group == writer else None
        same(queue.broadcast_object(mine, 60), {"x": 1})
    made, handles = c.create_single_reader_mq_broadcasters(0)
    ends = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    made.wait_until_ready(60)
    made.enqueue(c.rank_in_group, 60)
    same([end.dequeue(60) for end in ends], list(range(c.world_size)) if c.is_first_rank else [])
    c.barrier()


@case
def a_graph_is_captured_nowhere_on_a_cpu(c: GroupCoordinator) -> None:
    with c.graph_capture() as context:
        assert context.stream is None
        same(c.all_reduce(torch.ones(1)), torch.ones(1) * c.world_size)
    c.prepare_communication_buffer_for_model(nn.Linear(1, 1))
    raised(lambda: c.prepare_communication_buffer_for_model(3), TypeError)  # type: ignore[arg-type]


@case
def neighbours_are_known(c: GroupCoordinator) -> None:
    place = c.ranks.index(c.rank)
    assert (c.rank_in_group, c.world_size) == (place, len(c.ranks))
    assert (c.first_rank, c.last_rank) == (c.ranks[0], c.ranks[-1])
    assert (c.is_first_rank, c.is_last_rank) == (place == 0, place == len(c.ranks) - 1)
    assert c.next_rank == c.ranks[(place + 1) % len(c.ranks)]
    assert c.prev_rank == c.ranks[place - 1]
    assert c.device == torch.device("cpu")
    assert c.ranks in c.group_ranks
    assert c.device_communicator is (c if c.world_size > 1 else None)


# --------------------------------------------- wrong arguments, most of them of one rank alone


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
