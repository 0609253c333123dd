"""Message queues between the members of a group: the writer, the readers, through shared memory or a socket.

Readers on the writer's machine, in its network namespace and of its user read shared memory; the others get a
socket. The caller need not say which: the members tell each other where they are.

INVARIANT: an end that a member has been given ends with the communicator, when a call over that fails.
A thread that waits in one hears of a member's death from the rank that breaks off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from lighthouse.address import LOOPBACK
from torchft_like.communicator.communicator import (
    HARMLESS,
    Communicator,
    CoordinatorOptions,
    Group,
    ranks_in_job,
)
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.messages import start_broadcast
from torchft_like.communicator.tensors import checked_rank
from torchft_like.core.agreement.statements import PAYLOAD_BYTES_MAX, Statement, Terms
from torchft_like.errors import (
    CollectiveMismatchError,
    GroupCoordinatorError,
    PlainDataError,
    QueueDescriptorsError,
    QueueError,
)
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.message_queue.queue import MessageQueue
from torchft_like.plain_data import decode, dissect, encode
from torchft_like.runtime.durations import as_timedelta
from torchft_like.runtime.hosts import local_host_towards, own_place

_RETRY_S = 0.01


def members_of(pg: Group, max_chunk_bytes: int, max_chunks: int) -> Communicator:
    """Return the members of a process group, for queues of that size."""
    if not isinstance(pg, dist.ProcessGroup | Backend):
        raise TypeError(f"a process group of torch's or of ours was expected, not a {type(pg).__name__}")
    options = CoordinatorOptions(max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks)
    return Communicator.over("of a message queue", torch.device("cpu"), (pg, None), options)


def rank_in(pg: Group, rank: int) -> int:
    """Return the rank in the group of a member with that rank in the whole job."""
    ranks = ranks_in_job(pg)
    if rank not in ranks:
        raise ValueError(f"rank {rank} of the job is not in the group, which has the ranks {ranks[:16]}")
    return ranks.index(rank)


def create_broadcaster(
    group: Communicator, writer_rank: int, external: object, blocking: bool
) -> MessageQueue:
    """Do what `MessageQueue.create_from_process_group` says."""
    operation = "create_mq_broadcaster"
    made: list[MessageQueue] = []

    def terms() -> Terms:
        writer = checked_rank(writer_rank, group.world_size, "the writer's rank")
        return ("writer", str(writer)), ("blocking", str(bool(blocking)))

    def handle() -> object:
        if external is not None:
            return QueueHandle.from_plain(external).to_plain()
        readers = {rank: rank for rank in range(group.world_size) if rank != writer_rank}
        made.append(_queue_for(group, readers, places))
        return made[0].export_handle()

    with group.guard(operation), _ended_if_it_fails(made):
        places = _places(group, operation, terms)
        known = start_broadcast(group, operation, None, writer_rank, make=handle).wait()
        if group.rank == writer_rank:
            known = external
        return _met(group, operation, made, known, blocking)


def create_single_reader(
    group: Communicator, find_reader: Callable[[], int], blocking: bool
) -> tuple[MessageQueue, list[object]]:
    """Do what `MessageQueue.create_from_process_group_single_reader` says; `find_reader` returns the reader's
    rank in the group, or raises an error that refuses the call.
    """
    operation = "create_single_reader_mq_broadcasters"
    made: list[MessageQueue] = []
    reader = -1

    def terms() -> Terms:
        nonlocal reader
        if blocking:
            raise ValueError(
                "blocking: the queues can be opened only once this call has returned their handles; call "
                "wait_until_ready on each of their ends"
            )
        reader = checked_rank(find_reader(), group.world_size, "the reader's rank")
        return (("reader", str(reader)),)

    def prepare() -> tuple[Statement, int, bytes, MessageQueue]:
        made.append(_queue_for(group, {reader: 0}, places))
        handle = encode([made[0].export_handle()])
        if len(handle) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"the handle of a queue has {len(handle)} bytes")
        return Statement(operation), 0, handle, made[0]

    with group.guard(operation), _ended_if_it_fails(made):
        places = _places(group, operation, terms)
        said, queue = group.agree(operation, prepare)
        group.keep(queue)
        return queue, [decode(each.payload)[0] for each in said] if group.rank == reader else []


@contextlib.contextmanager
def _ended_if_it_fails(made: list[MessageQueue]) -> Iterator[None]:
    """Run a call that makes ends of queues: if it fails they are ended, however long its error is kept."""
    try:
        yield
    except BaseException:
        for end in made:
            end.shutdown(timeout=0)
        raise


def _met(
    group: Communicator, operation: str, made: list[MessageQueue], handle: object, blocking: bool
) -> MessageQueue:
    """Return the caller's end, once every member has its own; if `blocking`, once the writer has let all in.

    The writer lets its readers in on another thread, and waits in the group, where it hears of a member that
    will not come. No reader waits before all have opened their ends: a writer outside the group may let them
    in much later.

    Args:
        made: the writer's end; a reader's is added.
    """
    written = made[0] if made else None

    def opened() -> tuple[Statement, int, bytes, MessageQueue]:
        if written is None:
            made.append(MessageQueue.create_from_handle(handle, group.rank))
        return Statement(operation), 0, b"", made[0]

    def joined() -> tuple[Statement, int, bytes, None]:
        if blocking and written is None:
            own.wait_until_ready(_timeout_s(group))
        return Statement(operation), 0, b"", None

    def let_in() -> None:
        if written is not None and blocking:
            _let_in(written, _timeout_s(group))

    letting_in: Handle[None] = Handle(operation, let_in)
    _, own = group.agree(operation, opened)
    group.agree(operation, joined)
    letting_in.wait()
    group.keep(own)
    return own


def _let_in(queue: MessageQueue, seconds: float) -> None:
    """Let all readers in, until the queue is ended; try again where descriptors are short."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return queue.wait_until_ready(max(0.0, deadline - time.monotonic()))
        except QueueDescriptorsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def broadcast_object(group: Communicator, queue: MessageQueue, obj: object) -> Any:
    """Return the writer's object, on every rank.

    Raises:
        PlainDataError: the writer's object does not travel; the readers get a CollectiveMismatchError.
        QueueMemoryError, QueueDescriptorsError: the writer has no memory for it, or no file; so do they.
        GroupCoordinatorError: a member is gone, or this reader has no memory for it.
    """
    with group.guard("broadcast_object"):
        if queue.is_writer:
            return _written(group, queue, obj)
        try:
            read: Any = queue.dequeue(_timeout_s(group))  # a pair, which `_written` writes
        except HARMLESS as error:  # the others go on: this rank would take the object for the next one
            raise GroupCoordinatorError(f"the object that came could not be read: {error}") from error
        is_object, value = read
        if not is_object:
            raise CollectiveMismatchError("arguments", {0: str(value), group.rank: "broadcast_object"})
        return value


def _written(group: Communicator, queue: MessageQueue, obj: object) -> object:
    left = queue.left_readers  # a reader that leaves later may have read the present message
    try:
        try:
            queue.enqueue((True, obj), _timeout_s(group))
        except PlainDataError:
            dissect(obj)  # raises an error that names the place in the object, not that in the message
            raise
    except HARMLESS as error:  # nothing was written: the readers would take the next object for this one
        try:
            queue.enqueue((False, f"broadcast_object: {error}"[:1000]), _timeout_s(group))
        except QueueError as unsaid:
            raise GroupCoordinatorError(f"the readers could not be told of this: {error}") from unsaid
        raise
    if gone := left + queue.lost_readers:
        raise GroupCoordinatorError(f"ranks {gone} do not read the message queue any more")
    return obj


def _queue_for(group: Communicator, readers: Mapping[int, int], places: list[bytes]) -> MessageQueue:
    """Return a queue from the caller to `readers`: the members that read, and the queue's rank for each."""
    here = places[group.rank]
    near = [called for rank, called in readers.items() if places[rank] == here]
    # The others reach this machine at the address from which it reaches their store. Without such a store it
    # is that of this host's name, which is None.
    if (store := group.control.store_address()) is not None:
        host: str | None = local_host_towards(store.server.host, store.server.port)
    else:
        are_elsewhere = any(_machine(places[rank]) != _machine(here) for rank in readers)
        host = None if are_elsewhere else LOOPBACK
    options = group.options
    return MessageQueue(len(readers), len(near), near, options.max_chunk_bytes, options.max_chunks, host)


def _places(group: Communicator, operation: str, choose: Callable[[], Terms]) -> list[bytes]:
    """Return the places of the members, the same bytes for members that can share memory, once they agree on
    the terms that `choose` returns.
    """
    said, _ = group.agree(operation, lambda: (Statement(operation, terms=choose()), 0, own_place(), None))
    return [record.payload for record in said]


def _machine(place: bytes) -> bytes:
    """A place without its user: what the loopback interface is common to."""
    return place.rpartition(b"/")[0]


def _timeout_s(group: Communicator) -> float:
    return as_timedelta(group.options.timeout).total_seconds()
