"""The process groups of a coordinator, made by all ranks of torch's default group at once.

The ranks first tell each other, by records in the default group's store, which groups they mean. `new_group`
does not compare that, and waits for its whole timeout where one rank means others. One key is written once,
by the first rank that can decide, with the ranks that are missing: the last rank to come writes that none is,
a rank whose time is up writes the ranks that have not come. The key binds every rank, also one that comes
later: either all ranks go on or none does. A rank that went on alone would count torch's groups otherwise
than the others from then on.

The groups are of our own kind, because no wait of torch's own can be ended: the backends gloo and nccl mean
torchft-gloo and torchft-nccl. Any other name is taken as it is, and `cpu:gloo` and `cuda:nccl` are names for
torch's own.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from lighthouse.core.json_text import read_json
from torchft_like.backends import BACKENDS
from torchft_like.communicator.communicator import CoordinatorOptions, Group, check
from torchft_like.core.agreement.statements import Statement, decode, encode_briefly
from torchft_like.errors import CollectiveTimeoutError, GroupCoordinatorError
from torchft_like.process_group.checking import check_wanted
from torchft_like.process_group.store import ask_within
from torchft_like.runtime.durations import as_timedelta

CPU_BACKEND = "torchft-gloo"
ANONYMOUS = "anonymous"
OURS = {"gloo": CPU_BACKEND, "nccl": "torchft-nccl"}
NAME_CHARACTERS_MAX = 100
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # newer versions of torch do
_MISSING = "missing"
_numbers: Counter[str] = Counter()


class Place(NamedTuple):
    """The caller's place among the members of a coordinator, and the groups that join them. `ranks` are those
    of the members in the whole job; without a device group `device_group` is None, and where the device is a
    CPU it is the CPU group.
    """

    name: str
    rank_in_group: int
    ranks: list[int]
    device: torch.device
    cpu_group: Group
    device_group: Group | None


def make_groups(
    group_ranks: Sequence[Sequence[int]],
    local_rank: int,
    backend: str,
    use_device_communicator: bool,
    use_message_queue_broadcaster: bool,
    group_name: str,
    options: CoordinatorOptions,
) -> Place:
    """Make the groups; block until all ranks of the default group have made them.

    The arguments and the errors are those of `GroupCoordinator`; but for `local_rank` all ranks must pass the
    arguments alike.
    """
    if not dist.is_initialized():
        raise ValueError("there is no default process group: call torch.distributed.init_process_group first")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timeout = as_timedelta(options.timeout)
    store = c10d._get_default_store()
    with _asking():
        # A rank's n-th agreement is with the n-th of the others. The store counts them, not the process:
        # coordinators that only some ranks have made do not count, nor those of another job.
        number = ask_within(timeout, store, lambda: store.add(f"coordinator/made/{rank}", 1))
    place = PrefixStore(f"coordinator/{number}", store)
    backend = OURS.get(str(backend).lower(), str(backend).lower())
    try:
        name = unique_name(group_name)
        groups = checked_groups(group_ranks, world_size)
        device = device_of(backend, local_rank)
        told = {
            "group_ranks": groups,
            "torch_distributed_backend": backend,
            "use_device_communicator": bool(use_device_communicator),
            "use_message_queue_broadcaster": bool(use_message_queue_broadcaster),
            "group_name": group_name,
            **vars(options),
            "check_collectives": check_wanted(options.check_collectives) is True,
        }
        terms = tuple((argument, str(value)) for argument, value in told.items())
    except (ValueError, TypeError) as error:
        agree(place, rank, world_size, timeout, Statement("GroupCoordinator").refused(error))
        raise
    agree(place, rank, world_size, timeout, Statement("GroupCoordinator", terms=terms))
    with contextlib.ExitStack() as undo:
        try:
            cpu_group = _made(groups, CPU_BACKEND, timeout, f"{name}/cpu")
            undo.callback(destroy_group, cpu_group)
            device_group = cpu_group
            if backend != CPU_BACKEND:
                device_group = None
                if use_device_communicator:
                    device_group = _made(groups, backend, timeout, f"{name}/device")
        except RuntimeError as error:
            raise GroupCoordinatorError(f"the groups of {name} could not be made: {error}") from error
        undo.pop_all()
    ranks = next(ranks for ranks in groups if rank in ranks)
    return Place(name, cpu_group.rank(), ranks, device, cpu_group, device_group)


def checked_groups(group_ranks: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """Return the groups, in which every rank of the default group occurs once."""
    groups = [[int(rank) for rank in ranks] for ranks in group_ranks]
    if not groups or not all(groups):
        raise ValueError(f"group_ranks {group_ranks!r:.200} has an empty group")
    counted = Counter(rank for ranks in groups for rank in ranks)
    if twice := sorted(rank for rank, count in counted.items() if count > 1):
        raise ValueError(f"group_ranks has ranks more than once: {twice[:16]}")
    if foreign := sorted(counted.keys() - set(range(world_size))):
        raise ValueError(f"group_ranks has ranks that the default group has not: {foreign[:16]}")
    if missing := sorted(set(range(world_size)) - counted.keys()):
        raise ValueError(f"group_ranks leaves out ranks of the default group: {missing[:16]}")
    if not KEEPS_ORDER and groups != [sorted(ranks) for ranks in groups]:
        raise ValueError(f"torch {torch.__version__} sorts the ranks of a group: name them in that order")
    return groups


def device_of(backend: str, local_rank: int) -> torch.device:
    """Return the device of a backend's tensors, on the rank with this number on its host."""
    if not isinstance(local_rank, int) or isinstance(local_rank, bool) or local_rank < 0:
        raise ValueError(f"local_rank is {local_rank!r}: it must be a whole number from 0 on")
    is_cuda = "cuda" in BACKENDS[backend].devices if backend in BACKENDS else "nccl" in backend
    if is_cuda and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local_rank is {local_rank}, and there are {torch.cuda.device_count()} CUDA devices"
        )
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    if unknown := [name for name in names if not dist.is_backend_available(name)]:
        raise ValueError(f"torch_distributed_backend {backend!r}: torch has no backend {', '.join(unknown)}")
    return torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")


def unique_name(name: str) -> str:
    """Return `name:number`, where the number counts the coordinators of that name in this process."""
    if len(name) > NAME_CHARACTERS_MAX:
        raise ValueError(f"group_name has {len(name)} characters, {NAME_CHARACTERS_MAX} at the most")
    number = _numbers[name]
    _numbers[name] += 1
    return f"{name}:{number}"


def destroy_group(group: Any) -> None:
    """Destroy a group that `make_groups` made, unless torch has forgotten it since."""
    if dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def _made(groups: list[list[int]], backend: str, timeout: timedelta, name: str) -> Any:
    """Make the groups, as all ranks do in the same order, and return the caller's."""
    own = None
    for ranks in groups:
        more: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        group = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=name, **more)
        if dist.get_rank() in ranks:
            own = group
    return own


def agree(store: Store, rank: int, world_size: int, timeout: timedelta, statement: Statement) -> None:
    """Compare a rank's statement with those of the others, in a part of a store; wait for them.

    A rank that refuses says so, and does not wait.
    """
    keys = [str(rank) for rank in range(world_size)]

    def ask() -> tuple[list[int], list[bytes]]:
        store.set(str(rank), encode_briefly(statement).decode())
        if store.check(keys):
            store.compare_set(_MISSING, "", "[]")
        if statement.refusal is not None:
            return [], []
        try:
            store.wait([_MISSING], timeout)
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            store.compare_set(_MISSING, "", json.dumps(absent))  # unless it is decided already
        missing = _ranks_in(store.get(_MISSING))
        return missing, [] if missing else store.multi_get(keys)

    with _asking():
        missing, said = ask_within(timeout, store, ask)
    if statement.refusal is not None:
        return
    if missing:
        came = {*range(world_size)} - {*missing}
        waiting = dict.fromkeys(came, (f"{statement.operation}()",))
        raise CollectiveTimeoutError(timeout.total_seconds(), missing, waiting)
    check({rank: decode(record) for rank, record in enumerate(said)})


def _ranks_in(value: bytes) -> list[int]:
    match read_json(value):
        case [*ranks] if all(type(rank) is int for rank in ranks):
            return ranks
    raise ValueError(f"it holds {value!r:.100}, and not which ranks are missing")


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise GroupCoordinatorError(f"the default group's store failed: {error}") from error
