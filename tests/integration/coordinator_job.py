"""The functions that test_group_coordinator runs on its ranks."""

from __future__ import annotations

import errno
import os
import resource
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.integration.coordinator_cases import CASES
from torchft_like.errors import FaultToleranceError
from torchft_like.group_coordinator import CoordinatorOptions, ElasticCoordinator, GroupCoordinator
from torchft_like.group_coordinator.creation import KEEPS_ORDER
from torchft_like.message_queue import MessageQueue, members
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft_like.process_group.generation import Generation

Here = SimpleNamespace
LIMIT_S = 60.0
# Gloo waits for its timeout where a write itself finds the connection broken; nobody aborts these groups.
GROUP_LIMIT_S = 15.0
CHECKED = CoordinatorOptions(check_collectives=True)
OTHERS = [3, 1] if KEEPS_ORDER else [1, 3]
SHARES = {4: [[0, 1, 2, 3]], 3: [[0, 1, 2], [3]], 2: [[0, 2], OTHERS], 1: [[0], [1], [2], [3]]}


def init(here: Here, rank: int, port: int) -> list[list[int]]:
    """Make torch's default group, and a coordinator of every size; return the ranks of each."""
    torch.set_num_threads(1)
    os.environ.pop("TORCHFT_CHECK_COLLECTIVES", None)  # only the coordinator's own checks are to be seen
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("default", store), rank=rank, world_size=4)
    here.coordinators = {
        str(size): GroupCoordinator(groups, rank, "gloo", True, group_name=f"of {size}")
        for size, groups in SHARES.items()
    }
    theirs = dist.distributed_c10d._world.pg_map  # torch's groups, in the order of their making
    assert GroupCoordinator.from_groups(list(theirs)[-1]).ranks == [rank]
    here.coordinators["torch's own"] = GroupCoordinator.from_groups(dist.group.WORLD)
    here.coordinators["queue"] = GroupCoordinator(SHARES[3], rank, "gloo", True, True)
    assert all(coordinator.rank == rank for coordinator in here.coordinators.values())
    return [here.coordinators[str(size)].ranks for size in SHARES]


def run(here: Here, rank: int, case: str, which: str) -> str | None:
    """Run a case on one of the coordinators; return how it failed, None if it holds."""
    coordinator = here.coordinators[which]
    if "checked" in case:
        coordinator = GroupCoordinator.from_groups(coordinator.cpu_group, options=CHECKED)
    try:
        CASES[case](coordinator)
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return None


def start(here: Here, rank: int, port: int, prefix: str, world_size: int) -> None:
    """Make torch's default group, and nothing else."""
    torch.set_num_threads(1)
    here.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = PrefixStore(prefix, here.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def start_again(here: Here, rank: int, prefix: str) -> None:
    """Replace the default group by a new one of the same ranks."""
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore(prefix, here.store), rank=rank, world_size=world_size)


def make(here: Here, rank: int, *arguments: Any) -> str:
    """Make a coordinator, and return how that ended; the last argument may be a dict of options."""
    told: dict[str, Any] = {"timeout": 5}
    if isinstance(arguments[-1], dict):
        told |= arguments[-1]
        arguments = arguments[:-1]
    return outcome_of(lambda: GroupCoordinator(*arguments, options=CoordinatorOptions(**told)))


def make_some_alone(here: Here, rank: int) -> None:
    """Make coordinators that the other ranks know nothing of."""
    GroupCoordinator.from_groups(ProcessGroupDummy(0, 1))
    ElasticCoordinator("alone")


def make_with(here: Here, rank: int, arguments: list[list[Any]]) -> str:
    """Make a coordinator with arguments that differ between the ranks."""
    return make(here, rank, *arguments[rank])


def destroy(here: Here, rank: int) -> list[str]:
    """Destroy a coordinator twice, and return what its calls raise afterwards."""
    coordinator = here.coordinators.pop("queue")
    known = len(dist.distributed_c10d._world.pg_map)
    coordinator.destroy()
    coordinator.destroy()
    forgotten = known - len(dist.distributed_c10d._world.pg_map)
    calls: tuple[Callable[[], object], ...] = (
        lambda: coordinator.all_reduce(torch.ones(1)),
        lambda: coordinator.broadcast_object(1),
        coordinator.barrier,
    )
    return [f"{forgotten} groups", *map(outcome_of, calls)]


def slices(here: Here, rank: int, are_replicated: bool, declared: bool) -> Any:
    """Send from ranks 0 and 2 to ranks 1 and 3; each pair has a tensor in common."""
    pairs = GroupCoordinator([[0, 2], [1, 3]], rank, "gloo", True, group_name="pairs")
    whole = here.coordinators["4"]
    names = {"shared": True} if declared else {}
    if rank % 2:
        try:
            found = whole.recv_tensor_dict(rank - 1, pairs, names)
        except FaultToleranceError as error:
            return f"{type(error).__name__}: {error}"
        return [found["shared"].tolist(), found["own"].tolist(), found["text"]]
    shared = torch.arange(15.0).view(5, 3) + (0 if are_replicated else rank)
    sent = {"shared": shared, "own": torch.tensor([rank]), "text": f"from {rank}"}
    whole.send_tensor_dict(sent, rank + 1, pairs, names)
    return None


def slices_without_one(here: Here, rank: int, by_handle: bool) -> tuple[str, float]:
    """Send as `slices` does, but without the tensor from rank 2; return the outcome, and what the pairs add
    up afterwards.
    """
    pairs = GroupCoordinator([[0, 2], [1, 3]], rank, "gloo", True, group_name="pairs")
    whole = here.coordinators["4"]

    def receive() -> object:
        if by_handle:
            return whole.irecv_tensor_dict(rank - 1, pairs)[1][0].wait()
        return whole.recv_tensor_dict(rank - 1, pairs)

    def send() -> object:
        sent = {"other" if rank == 2 else "shared": torch.ones(3)}
        return whole.send_tensor_dict(sent, rank + 1, pairs, {"shared": True})

    return outcome_of(receive if rank % 2 else send), pairs.all_reduce(torch.ones(1)).item()


def compiled(here: Here, rank: int) -> tuple[int, list[float]]:
    """Return how many graphs torch makes of a function with collectives in it, and the function's result."""
    coordinator, graphs = here.coordinators["2"], []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        everyones = coordinator.all_gather(coordinator.all_reduce(x * 2), 0)
        own: torch.Tensor = coordinator.reduce_scatter(everyones, 0)
        return own + 1

    found = torch.compile(function, backend=keep, fullgraph=True)(torch.full((2,), float(rank)))
    assert torch.equal(found, function(torch.full((2,), float(rank))))
    return len(graphs), found.tolist()


# ------------------------------------------------------------------------ faults


def meet(here: Here, rank: int, address: str, swallows: bool) -> None:
    """Make a group of three with a coordinator, for one fault; each member has passed a barrier."""
    torch.set_num_threads(1)
    group: ProcessGroup = ProcessGroupGloo(GROUP_LIMIT_S, check_collectives=False)
    if swallows:
        group = ErrorSwallowingProcessGroupWrapper(group)
    group.configure(address, rank, 3)
    here.coordinator = GroupCoordinator.from_groups(group, group_name="doomed")
    here.coordinator.barrier()
    # A later `combine` needs a `dispatch` before it.
    here.coordinator.dispatch(torch.ones(2, 4), torch.ones(2, 1))


def use_a_queue(here: Here, rank: int, *geometry: int) -> Any:
    """Let rank 0 broadcast objects through a queue from now on; return its first object."""
    make_a_queue(here, rank, [1, 2], *geometry)
    return here.coordinator.broadcast_object(["first"])


def make_a_queue(here: Here, rank: int, local: list[int], *geometry: int) -> None:
    """Let rank 0 write to the others; the ranks in `local` count as being on its machine."""
    sizes = dict(zip(("max_chunk_bytes", "max_chunks"), geometry, strict=False))
    group, options = here.coordinator.cpu_group, CoordinatorOptions(**sizes)  # type: ignore[arg-type]
    here.coordinator = GroupCoordinator.from_groups(group, group_name="doomed", options=options)
    find_places = members._places
    members._places = lambda *_: [b"near" if place in (0, *local) else b"far" for place in range(3)]
    try:
        here.coordinator.mq_broadcaster = here.coordinator.create_mq_broadcaster()
    finally:
        members._places = find_places


def read_another_writers_queue(here: Here, rank: int, readers: list[int]) -> str:
    """Use a queue that the group does not write, with readers of these ranks; return how that ended."""
    if rank > 0:
        return outcome_of(here.coordinator.create_mq_broadcaster)
    with MessageQueue(len(readers), len(readers), readers) as outside:
        handle = outside.export_handle()
        return outcome_of(lambda: here.coordinator.create_mq_broadcaster(0, handle))


def make_a_queue_in_vain(here: Here, rank: int, local: list[int], fails: str) -> str:
    """Make a queue while something fails on rank 2, and return how that ended."""
    method = getattr(MessageQueue, fails)
    if rank == 2:
        setattr(MessageQueue, fails, no_descriptors)
    try:
        return outcome_of(lambda: make_a_queue(here, rank, local))
    finally:
        setattr(MessageQueue, fails, method)


def no_descriptors(*_: object) -> None:
    raise OSError(errno.EMFILE, "no descriptors are left")


def give_up(here: Here, rank: int, how: str) -> None:
    """Stop taking part, without telling the others."""
    if how == "destroys":
        here.coordinator.destroy()
    else:
        here.coordinator._communicator.break_off("this rank gives up")


def broadcast_object(here: Here, rank: int) -> str:
    """Broadcast one more object, and return how that ended."""
    return outcome_of(lambda: here.coordinator.broadcast_object(["second"]))


def broadcast_beyond_a_limit(
    here: Here, rank: int, nbytes: int, limit: int = resource.RLIMIT_FSIZE
) -> list[str]:
    """Broadcast an object that no file can hold, or that no file can be opened for, and another; return how
    both ended.
    """
    unlimited = resource.getrlimit(limit)
    if rank == 0:
        resource.setrlimit(limit, (3, unlimited[1]))
    try:
        too_large = b"x" * nbytes if rank == 0 else None
        first = outcome_of(lambda: here.coordinator.broadcast_object(too_large))
        return [first, broadcast_object(here, rank)]
    finally:
        resource.setrlimit(limit, unlimited)


def broadcast_a_set(here: Here, rank: int) -> str:
    """Broadcast a value of a type that cannot be sent, and return how that ended."""
    return outcome_of(lambda: here.coordinator.broadcast_object({"a": {1}}))


def begin(here: Here, rank: int, name: str) -> None:
    """Call something in another thread; return when the call has begun a collective."""
    entered, start = threading.Event(), Generation.run

    def announce(generation: Generation, *args: Any) -> Any:
        work = start(generation, *args)
        entered.set()
        return work

    def call() -> None:
        here.outcome = outcome_of(lambda: CALLS[name](here.coordinator))
        entered.set()

    setattr(Generation, "run", announce)  # noqa: B010 - on purpose
    try:
        here.calling = threading.Thread(target=call, daemon=True)
        here.calling.start()
        assert entered.wait(LIMIT_S)
    finally:
        setattr(Generation, "run", start)  # noqa: B010 - on purpose


def is_blocked(here: Here, rank: int) -> bool:
    return here.calling.is_alive()  # type: ignore[no-any-return]


def end(here: Here, rank: int) -> str:
    """Return how the call that was begun ended."""
    here.calling.join(LIMIT_S)
    return "it hangs" if here.calling.is_alive() else here.outcome


def outcome_of(act: Callable[[], object]) -> str:
    """Return the error that `act` ends with, in words."""
    try:
        return f"no error: {act()}"
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"


def big(c: GroupCoordinator) -> dict[str, Any]:
    """Return more data than fits into a socket's buffers."""
    return {"x": torch.ones(1 << 22), "y": c.rank}


Call = Callable[[GroupCoordinator], object]
CALLS: dict[str, Call] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(4)),
    "all_gather": lambda c: c.all_gather(torch.ones(4)),
    "all_gatherv": lambda c: c.all_gatherv(torch.ones(c.rank, 4)),
    "reduce_scatter": lambda c: c.reduce_scatter(torch.ones(6)),
    "reduce_scatterv": lambda c: c.reduce_scatterv(torch.ones(7)),
    "gather": lambda c: c.gather(torch.ones(4), 0),
    "broadcast": lambda c: c.broadcast(torch.ones(4), 0),
    "broadcast_object": lambda c: c.broadcast_object({"a": 1}),
    "broadcast_object_list": lambda c: c.broadcast_object_list([1]),
    "broadcast_tensor_dict": lambda c: c.broadcast_tensor_dict({"a": torch.ones(1)}),
    "ibroadcast_tensor_dict": lambda c: c.ibroadcast_tensor_dict({"a": torch.ones(1)}).wait(),
    "recv": lambda c: c.recv((4,), torch.float32),
    "recv_object": lambda c: c.recv_object((c.rank - 1) % 3),
    "recv_tensor_dict": lambda c: c.recv_tensor_dict(),
    "irecv_tensor_dict": lambda c: c.irecv_tensor_dict()[1][0].wait(),
    "send": lambda c: c.send(big(c)["x"]),
    "send_tensor_dict": lambda c: c.send_tensor_dict(big(c)),
    "isend_tensor_dict": lambda c: c.isend_tensor_dict(big(c))[0].wait(),
    "barrier": lambda c: c.barrier(),
    "dispatch": lambda c: c.dispatch(torch.ones(c.rank, 4), torch.ones(c.rank, 2)),
    "combine": lambda c: c.combine(torch.ones(6, 4)),
    "create_mq_broadcaster": lambda c: c.create_mq_broadcaster(),
    "create_single_reader_mq_broadcasters": lambda c: c.create_single_reader_mq_broadcasters(),
}
