"""Message queues between the members: who writes, who reads, and through shared memory or a socket.

Readers that are on the writer's machine, in its network namespace and of its user read shared memory; the
others get a socket. Nobody has to say so: the members tell each other where they are.

INVARIANT: a queue that all have joined ends with its groups, one that was handed over, too. Who waits in one
hears of a member's death from whoever breaks off.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

from lighthouse.address import LOOPBACK
from torchft_like.agreement.statements import PAYLOAD_BYTES_MAX, Statement
from torchft_like.communicator.communicator import HARMLESS, Communicator
from torchft_like.communicator.handle import Handle
from torchft_like.communicator.messages import start_broadcast
from torchft_like.communicator.sizes import checked_rank
from torchft_like.errors import (
    CollectiveMismatchError,
    GroupCoordinatorError,
    NotSupportedError,
    QueueDescriptorsError,
    QueueError,
    QueueTimeoutError,
)
from torchft_like.message_queue import MessageQueue
from torchft_like.plain_data import PlainDataError, assemble, disassemble, dissect
from torchft_like.process_group.wrapper import as_timedelta
from torchft_like.runtime.hosts import local_host_towards

_LOOK_S = 0.01


def create_broadcaster(
    group: Communicator, writer_rank: int, external: MessageQueue | None, blocking: bool
) -> MessageQueue:
    """The caller's end of a queue that one member writes and all others read."""
    operation = "create_mq_broadcaster"
    queue: MessageQueue | None = None

    def handle() -> object:
        nonlocal queue
        readers = [rank for rank in range(group.world_size) if rank != writer_rank]
        made = _queue_for(group, readers, writer_rank, places) if external is None else external
        queue = _written_end(made)
        return queue.export_handle()

    with group.guard(operation):
        places = _places(group, operation, "writer", writer_rank)
        known = start_broadcast(group, operation, None, writer_rank, make=handle).wait()
        handles = [known] if queue is None else []
        read = _met(group, operation, queue, handles, blocking, is_own=external is None)
    return read[0] if queue is None else queue


def create_single_reader(
    group: Communicator, reader_rank: int, blocking: bool
) -> tuple[MessageQueue | None, list[MessageQueue]]:
    """A queue from each other member to one: the caller's to write, and those to read."""
    operation = "create_single_reader_mq_broadcasters"
    made: MessageQueue | None = None

    def prepare() -> tuple[Statement, int, bytes, None]:
        nonlocal made
        handle = b""
        if group.rank != reader_rank:
            made = _queue_for(group, [reader_rank], group.rank, places)
            handle = disassemble(made.export_handle()).structure
            if len(handle) > PAYLOAD_BYTES_MAX:
                raise ValueError(f"the handle of a queue has {len(handle)} bytes")
        return Statement(operation), 0, handle, None

    with group.guard(operation):
        places = _places(group, operation, "reader", reader_rank)
        said, _ = group.agree(operation, prepare)
        writers = [rank for rank in range(group.world_size) if rank != reader_rank]
        handles = [assemble(said[rank].payload, []) for rank in writers] if made is None else []
        return made, _met(group, operation, made, handles, blocking)


def _met(
    group: Communicator,
    operation: str,
    written: MessageQueue | None,
    handles: list[object],
    blocking: bool,
    *,
    is_own: bool = True,
) -> list[MessageQueue]:
    """The ends to read, once every member has opened its own; if `blocking`, once the writers have let it in.

    A writer lets its readers in aside, and waits in the group, where it hears of one that will not come.
    """
    read: list[MessageQueue] = []
    nobody_knocks = threading.Event()

    def prepare() -> tuple[Statement, int, bytes, None]:
        read.extend(MessageQueue.create_from_handle(handle, group.rank) for handle in handles)
        for end in read if blocking else ():
            end.wait_until_ready(_patience_s(group))
        return Statement(operation), 0, b"", None

    def let_in() -> None:
        if written is not None and blocking:
            _let_in(written, _patience_s(group), nobody_knocks)

    try:
        letting_in = Handle(operation, let_in, lambda _: None)
        group.agree(operation, prepare)
        letting_in.wait()
    except BaseException as error:
        if isinstance(error, HARMLESS):  # all have said their part
            nobody_knocks.set()
        for end in [*read, written] if written is not None and is_own else read:
            end.shutdown(timeout=0)
        raise
    for end in read if written is None else [*read, written]:
        group.when_broken_off(end)
    return read


def _let_in(queue: MessageQueue, seconds: float, nobody_knocks: threading.Event) -> None:
    """Let all readers in, and leave the queue to its owner in between.

    Goes on when the groups are broken off: a reader that is let in hears of that in its group.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return queue.wait_until_ready(0)
        except (QueueTimeoutError, QueueDescriptorsError):
            if time.monotonic() > deadline or nobody_knocks.wait(_LOOK_S):
                raise


def broadcast_object(group: Communicator, queue: MessageQueue, obj: object) -> Any:
    """The writer's object, on every rank.

    Raises:
        PlainDataError: the writer's object does not travel; the readers get a CollectiveMismatchError.
        QueueMemoryError, QueueDescriptorsError: the writer has no memory for it, or no file; so do they.
        GroupCoordinatorError: a member is gone, or this reader has no memory for it.
    """
    with group.guard("broadcast_object"):
        if queue.is_writer:
            return _written(group, queue, obj)
        is_object, value = _read(group, queue)
        if not is_object:
            raise CollectiveMismatchError("arguments", {0: str(value), group.rank: "broadcast_object"})
        return value


def _written(group: Communicator, queue: MessageQueue, obj: object) -> object:
    left = queue.left_readers  # who leaves later may have read what is written now
    try:
        _enqueue(group, queue, obj)
    except HARMLESS as error:  # nothing was written: the readers would take the next object for this one
        _refuse(group, queue, error)
        raise
    if gone := left + queue.lost_readers:
        raise GroupCoordinatorError(f"ranks {gone} do not read the message queue any more")
    return obj


def _read(group: Communicator, queue: MessageQueue) -> Any:
    try:
        return queue.dequeue(_patience_s(group))
    except HARMLESS as error:  # the others go on: this rank would take the object for the next one
        raise GroupCoordinatorError(f"the object that came could not be read: {error}") from error


def _enqueue(group: Communicator, queue: MessageQueue, obj: object) -> None:
    try:
        queue.enqueue((True, obj), _patience_s(group))
    except PlainDataError:
        dissect(obj)  # names the place in the object, where the error names that in the message
        raise


def _refuse(group: Communicator, queue: MessageQueue, error: Exception) -> None:
    try:
        queue.enqueue((False, f"broadcast_object: {error}"[:1000]), _patience_s(group))
    except QueueError as unsaid:
        raise GroupCoordinatorError(f"the readers could not be told of this: {error}") from unsaid


def _queue_for(group: Communicator, readers: list[int], writer: int, places: list[bytes]) -> MessageQueue:
    near = [rank for rank in readers if places[rank] == places[writer]]
    elsewhere = [rank for rank in readers if _machine(places[rank]) != _machine(places[writer])]
    host = _host_towards(elsewhere, group)
    return MessageQueue(len(readers), len(near), local_reader_ranks=near, connect_ip=host)


def _written_end(value: object) -> MessageQueue:
    """The value, if it can be handed over.

    Raises:
        TypeError: it is no writer's end of a queue.
    """
    if not isinstance(value, MessageQueue) or not value.is_writer:
        raise TypeError(f"external_writer_handle is the writer's end of a MessageQueue, not {value!r:.100}")
    return value


def _places(group: Communicator, operation: str, end: str, rank: int) -> list[bytes]:
    """Where the members are: the same bytes where they can share memory."""

    def prepare() -> tuple[Statement, int, bytes, None]:
        term = end, str(checked_rank(rank, group.world_size, f"the {end}'s rank"))
        return Statement(operation, terms=(term,)), 0, _place(), None

    said, _ = group.agree(operation, prepare)
    return [record.payload for record in said]


@functools.cache
def _place() -> bytes:
    """Of this process: the start of its kernel, its network namespace, its user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}".encode()


def _machine(place: bytes) -> bytes:
    """A place without its user: what the loopback interface is common to."""
    return place.rpartition(b"/")[0]


def _host_towards(elsewhere: list[int], group: Communicator) -> str:
    """The address of this machine at which the others reach it: that from which it reaches their store.

    Raises:
        NotSupportedError: some are elsewhere, and the group has no store that says how they are reached.
    """
    if (store := group.control.store_address()) is not None:
        return local_host_towards(store.server.host, store.server.port)
    if elsewhere:
        raise NotSupportedError(
            f"ranks {elsewhere} are on other machines, or in other network namespaces, and a group of "
            "torch's own does not tell how they reach this one: pass a group of ours, or a MessageQueue "
            "with a connect_ip"
        )
    return LOOPBACK


def _patience_s(group: Communicator) -> float:
    return as_timedelta(group.options.timeout).total_seconds()
