"""Calls of those functions of `torch.distributed` that have no `async_op`; each case returns what it saw."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed import distributed_c10d as c10d

from .scene import Case, Scene, finish

OBJECTS: tuple[Any, ...] = (None, 7, "text", b"", [1.5, {"a": (1, 2)}], torch.arange(3), "x" * 3000)
COALESCED = tuple(
    name for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor") if hasattr(dist, name)
)


def own_object(s: Scene) -> Any:
    return OBJECTS[s.rank % len(OBJECTS)], s.rank


def all_gather_object(s: Scene) -> Any:
    found: list[Any] = [None] * s.world
    dist.all_gather_object(found, own_object(s), group=s.group)
    return found


def gather_object(s: Scene) -> Any:
    found: list[Any] | None = [None] * s.world if s.is_root else None
    dist.gather_object(own_object(s), found, s.root, group=s.group)
    return found


def broadcast_object_list(s: Scene) -> Any:
    found = list(OBJECTS) if s.is_root else [None] * len(OBJECTS)
    dist.broadcast_object_list(found, s.root, group=s.group)
    return found


def scatter_object_list(s: Scene) -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, list(OBJECTS[: s.world]) if s.is_root else None, s.root, group=s.group)
    return found


def objects_in_a_ring(s: Scene) -> Any:
    """Pass objects around the ring; rank 0 sends first, so that the ranks do not all wait to receive."""
    found: list[Any] = [None, None]
    if s.world == 1:
        return found
    if s.rank == 0:
        dist.send_object_list([own_object(s), 1], s.following, group=s.group)
    dist.recv_object_list(found, s.preceding, group=s.group)
    if s.rank != 0:
        dist.send_object_list([own_object(s), 1], s.following, group=s.group)
    return found


def isend_irecv(s: Scene) -> Any:
    """Exchange tensors around the ring, and wait for the works: those of Gloo have no future."""
    received = s.blank()
    if s.world > 1:
        works = [dist.isend(s.tensor(), s.following, s.group), dist.irecv(received, s.preceding, s.group)]
        return [finish(work, "wait")[0] for work in works], received
    return received


def send_recv(s: Scene) -> Any:
    received, source = s.blank(), None
    if s.world > 1:
        if s.rank == 0:
            dist.send(s.tensor(), s.following, s.group)
        source = dist.recv(received, s.preceding, s.group)
        if s.rank != 0:
            dist.send(s.tensor(), s.following, s.group)
    return received, source


def send_recv_with_tags(s: Scene) -> Any:
    """Receive in the reverse order of sending, told apart by tags."""
    first, second = s.blank(), s.blank()
    if s.world > 1:
        works = [dist.isend(s.tensor(tag), s.following, s.group, tag=tag) for tag in (1, 2)]
        dist.recv(second, s.preceding, s.group, tag=2)
        dist.recv(first, s.preceding, s.group, tag=1)
        for work in works:
            assert work is not None
            work.wait()
    return first, second


def recv_from_anybody(s: Scene) -> Any:
    """Let rank 0 receive from any rank, in any order; it returns what it got, by sender."""
    found: dict[int, Tensor] = {}
    for _ in range(s.world - 1 if s.rank == 0 else 0):
        received = s.blank()
        found[dist.recv(received, group=s.group)] = received
    if s.rank != 0:
        dist.send(s.tensor(), 0, s.group)
    dist.barrier(s.group)  # Without this barrier, what is sent next could come before what was sent now.
    return found


def batch_isend_irecv(s: Scene) -> Any:
    """Exchange tensors around the ring twice: with peers by their global ranks, and by those in the group."""
    received = [s.blank(), s.blank()]
    if s.world == 1:
        return received
    for target, by in zip(received, ("peer", "group_peer"), strict=True):
        ends = {by: s.following}, {by: s.preceding}
        operations = [
            P2POp(dist.isend, s.tensor(), group=s.group, **ends[0]),
            P2POp(dist.irecv, target, group=s.group, **ends[1]),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received


def coalesced(name: str) -> Case:
    """Return a case of two calls in `_coalescing_manager`, which makes one call of them, in each of its
    modes.
    """

    def case(s: Scene) -> Any:
        calls: list[tuple[Any, ...]] = []
        for salt in (0, 1):
            whole, part = s.tensor(salt, s.joined()), s.tensor(salt)
            arguments = {
                "all_reduce": (part,),
                "all_gather_into_tensor": (s.blank(s.joined()), part),
                "reduce_scatter_tensor": (s.blank(), whole),
            }
            calls.append(arguments[name])
        function = getattr(dist, name)
        with c10d._coalescing_manager(s.group, async_ops=s.mode != "sync") as manager:
            for arguments_of_one in calls:
                function(*arguments_of_one, group=s.group)
        if s.mode != "sync":
            manager.wait()
        return [arguments_of_one[0] for arguments_of_one in calls]

    return case


def coalesced_on_a_device(s: Scene) -> Any:
    """Coalesce different operations: torch's own Gloo cannot, so the reference runs them one by one."""
    tensor, received = s.tensor(), s.blank()
    operations: tuple[Callable[[], Any], ...] = (
        lambda: s.group.allreduce([tensor]),
        lambda: s.group.broadcast(received, s.root),
    )
    if s.is_reference:
        for operation in operations:
            operation().wait()
        return tensor, received
    s.group._start_coalescing(torch.device(s.device))
    for operation in operations:
        operation()
    work = s.group._end_coalescing(torch.device(s.device))
    seen = finish(work, "wait" if s.mode == "sync" else s.mode)
    if s.mode in ("sync", "wait"):
        assert seen == (True, True, True)
    else:
        assert [item.data_ptr() for item in seen] == [tensor.data_ptr(), received.data_ptr()]
    return tensor, received


def point_to_point_coalesced_on_a_device(s: Scene) -> Any:
    received = s.blank()
    if s.world == 1:
        return received
    if s.is_reference:
        work = dist.isend(s.tensor(), s.following, s.group)
        dist.recv(received, s.preceding, s.group)
        assert work is not None
        work.wait()
        return received
    with c10d._coalescing_manager(s.group, torch.device(s.device), async_ops=s.mode != "sync") as manager:
        dist.isend(s.tensor(), s.following, s.group)
        dist.irecv(received, s.preceding, s.group)
    if s.mode != "sync":
        manager.wait()
    return received


def monitored_barrier(s: Scene) -> Any:
    return dist.monitored_barrier(s.group, timedelta(seconds=20))


def who_is_who(s: Scene) -> Any:
    """Ask a group everything that moves no data."""
    group = s.group
    return {
        "rank": dist.get_rank(group),
        "world": dist.get_world_size(group),
        "members": dist.get_process_group_ranks(group),
        "global": [dist.get_global_rank(group, rank) for rank in s.ranks],
        "local": [dist.get_group_rank(group, rank) for rank in s.ranks],
        "outside": c10d._rank_not_in_group(group),
        "has a name": bool(c10d._get_process_group_name(group)),
        "has a backend": bool(dist.get_backend(group)) and bool(dist.get_backend_config(group)),
    }


def shrink_group(s: Scene) -> Any:
    return dist.shrink_group([s.world - 1], group=s.group)


def estimated_time(s: Scene) -> Any:
    with c10d._time_estimator(group=s.group, device=torch.device(s.device)):
        dist.all_reduce(s.tensor(), group=s.group)


# What is called, in words; the first word is the function.
CASES: dict[str, Case] = {
    "all_gather_object": all_gather_object,
    "gather_object": gather_object,
    "broadcast_object_list": broadcast_object_list,
    "scatter_object_list": scatter_object_list,
    "send_object_list and recv_object_list": objects_in_a_ring,
    "isend and irecv": isend_irecv,
    "send and recv": send_recv,
    "send and recv with tags": send_recv_with_tags,
    "recv from anybody": recv_from_anybody,
    "batch_isend_irecv of P2POp": batch_isend_irecv,
    **{f"_coalescing_manager of {name}": coalesced(name) for name in COALESCED},
    "_coalescing_manager of different operations": coalesced_on_a_device,
    "_coalescing_manager of sends and receives": point_to_point_coalesced_on_a_device,
    "monitored_barrier": monitored_barrier,
    "get_rank, get_world_size and so on": who_is_who,
    "shrink_group": shrink_group,
    "_time_estimator": estimated_time,
}
