"""Every collective as a method of the group, under each of its names, and calls that are wrong."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchft_like.process_group.collectives import BY_NAME, tensors_of

from .scene import Case, Scene

LIMIT_S = 20.0
THREADS = 4
ROUNDS = 8

# The arguments of each row, without options; without them torch reduces, gathers and scatters at rank 0.
ARGUMENTS: dict[str, Callable[[Scene], tuple[Any, ...]]] = {
    "allreduce": lambda s: ([s.tensor()],),
    "allreduce_coalesced": lambda s: ([s.tensor(), s.tensor(1)],),
    "broadcast": lambda s: ([s.tensor()],),
    "reduce": lambda s: ([s.tensor()],),
    "allgather": lambda s: ([s.blanks()], [s.tensor()]),
    "allgather_coalesced": lambda s: ([[s.blank(), s.blank()] for _ in s.ranks], [s.tensor(), s.tensor(1)]),
    "_allgather_base": lambda s: (s.blank(s.joined()), s.tensor()),
    "allgather_into_tensor_coalesced": lambda s: (
        [s.blank(s.joined()), s.blank(s.joined())],
        [s.tensor(), s.tensor(1)],
    ),
    "gather": lambda s: ([s.blanks()] if s.rank == 0 else [], [s.tensor()]),
    "scatter": lambda s: ([s.blank()], [[s.tensor(r) for r in s.ranks]] if s.rank == 0 else []),
    "reduce_scatter": lambda s: ([s.blank()], [[s.tensor(r) for r in s.ranks]]),
    "_reduce_scatter_base": lambda s: (s.blank(), s.tensor(shape=s.joined())),
    "reduce_scatter_tensor_coalesced": lambda s: (
        [s.blank(), s.blank()],
        [s.tensor(shape=s.joined()), s.tensor(1, s.joined())],
    ),
    "alltoall": lambda s: (s.blanks(), [s.tensor(r) for r in s.ranks]),
    "alltoall_base": lambda s: (s.blank(s.joined()), s.tensor(shape=s.joined()), [], []),
    "barrier": lambda s: (),
    "monitored_barrier": lambda s: (timedelta(seconds=LIMIT_S),),
}
_NAMES = [name for name in BY_NAME if hasattr(dist.ProcessGroup, name)]  # the names that this torch has
METHODS = [name for name in _NAMES if BY_NAME[name].name in ARGUMENTS]


def method(name: str) -> Case:
    """Return a case that calls a method and returns its outputs; a reduction has one at rank 0 only."""

    def case(s: Scene) -> Any:
        row, arguments = BY_NAME[name], ARGUMENTS[BY_NAME[name].name](s)
        work = getattr(s.group, name)(*arguments)
        if work is not None:
            work.wait()
        if row.output is None or (row.name == "reduce" and s.rank != 0):
            return None
        return list(tensors_of(arguments[0]))

    return case


def taking_turns(s: Scene) -> Any:
    """Let threads begin collectives in the same order on all ranks, and wait for them at the same time."""
    turn, changed = [0], threading.Condition()
    tensors = [s.tensor(salt) for salt in range(THREADS * ROUNDS)]

    def run(thread: int) -> None:
        for number in range(thread, len(tensors), THREADS):
            with changed:
                assert changed.wait_for(functools.partial(_is, turn, number), LIMIT_S)
                work = dist.all_reduce(tensors[number], group=s.group, async_op=True)
                turn[0] += 1
                changed.notify_all()
            assert work is not None
            work.wait()

    _together(run)
    return tensors


def _is(turn: list[int], number: int) -> bool:
    return turn[0] == number


def tagged(s: Scene) -> Any:
    """Let threads send and receive in no order, each with a tag of its own."""
    received = [[s.blank() for _ in range(ROUNDS)] for _ in range(THREADS)]

    def run(thread: int) -> None:
        for number, target in enumerate(received[thread]):
            tensor = s.tensor(thread * ROUNDS + number)
            work = dist.isend(tensor, s.following, s.group, tag=thread)
            dist.recv(target, s.preceding, s.group, tag=thread)
            assert work is not None
            work.wait()

    if s.world > 1:
        _together(run)
    return received


def _together(run: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for future in [threads.submit(run, thread) for thread in range(THREADS)]:
            future.result(LIMIT_S)


THREADED: dict[str, Case] = {"threads taking turns": taking_turns, "threads with tags": tagged}

# Mistakes that every rank makes in the same way.
WRONG: dict[str, Case] = {
    "all_reduce of a list": lambda s: dist.all_reduce([s.tensor()], group=s.group),
    "all_reduce with no such reduction": lambda s: dist.all_reduce(s.tensor(), "sum", s.group),
    "all_reduce_coalesced of nothing": lambda s: dist.all_reduce_coalesced([], group=s.group),
    "broadcast from nobody": lambda s: dist.broadcast(s.tensor(), s.world + 7, s.group),
    "broadcast from no rank": lambda s: dist.broadcast(s.tensor(), group=s.group, group_src=s.world + 7),
    "broadcast from two": lambda s: dist.broadcast(s.tensor(), 0, s.group, group_src=0),
    "reduce to no rank": lambda s: dist.reduce(s.tensor(), group=s.group, group_dst=s.world + 7),
    "all_gather into too few": lambda s: dist.all_gather(s.blanks()[1:], s.tensor(), s.group),
    "all_gather into too many": lambda s: dist.all_gather([*s.blanks(), s.blank()], s.tensor(), s.group),
    "all_gather into another shape": lambda s: dist.all_gather(
        [s.blank((5,)) for _ in s.ranks], s.tensor(), s.group
    ),
    "all_gather into another dtype": lambda s: dist.all_gather(
        [t.long() for t in s.blanks()], s.tensor(), s.group
    ),
    "all_gather_into_tensor of another size": lambda s: dist.all_gather_into_tensor(
        s.blank((s.world + 1, 5)), s.tensor(), s.group
    ),
    "all_gather_into_tensor of another dtype": lambda s: dist.all_gather_into_tensor(
        s.blank(s.joined()).long(), s.tensor(), s.group
    ),
    "gather to no rank": lambda s: dist.gather(s.tensor(), None, group=s.group, group_dst=s.world + 7),
    "reduce_scatter of too few": lambda s: dist.reduce_scatter(s.blank(), s.blanks()[1:], group=s.group),
    "reduce_scatter of another shape": lambda s: dist.reduce_scatter(
        s.blank((5,)), s.blanks(), group=s.group
    ),
    "reduce_scatter_tensor of another size": lambda s: dist.reduce_scatter_tensor(
        s.blank(), s.blank((s.world + 1, 5)), group=s.group
    ),
    "reduce_scatter_tensor of another dtype": lambda s: dist.reduce_scatter_tensor(
        s.blank(), s.blank(s.joined()).long(), group=s.group
    ),
    "all_to_all of too few": lambda s: dist.all_to_all(s.blanks()[1:], s.blanks()[1:], s.group),
    "all_to_all_single with wrong splits": lambda s: dist.all_to_all_single(
        s.blank((s.world, 2)), s.tensor(shape=(s.world, 2)), [9] * s.world, [9] * s.world, s.group
    ),
    "all_to_all_single that cannot be split": lambda s: dist.all_to_all_single(
        s.blank((s.world + 1,)), s.tensor(shape=(s.world + 1,)), group=s.group
    ),
    "send to itself": lambda s: dist.send(s.tensor(), s.rank, s.group),
    "send to nobody": lambda s: dist.send(s.tensor(), s.world + 7, s.group),
    "recv from itself": lambda s: dist.recv(s.blank(), s.rank, s.group),
    "barrier of wrong devices": lambda s: dist.barrier(s.group, device_ids="cpu"),
    "scatter_object_list of no list": lambda s: dist.scatter_object_list([], None, s.root, s.group),
}
