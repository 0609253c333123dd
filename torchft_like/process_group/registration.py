"""This package's groups under torch's own functions: `dist.init_process_group("torchft-gloo")`,
`dist.new_group`.

torch makes a group from a store in which the members find each other; the groups of this package are
configured with the address of a store. So rank 0 tells the others, through the store that torch passes,
where they meet: under a prefix never used before, in that same store if it is a TCPStore, else in one that
rank 0 serves itself.

INVARIANT: a store of our own is served until every member has met the others, and no longer. That they
have is known from a barrier of the new group, and a member that dies meanwhile breaks the barrier.
Later configurations name a store of their owner's.

torch gets the group itself, so `dist.group.WORLD` can be aborted and configured again.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from lighthouse.address import Address
from torchft_like.backends import BACKENDS
from torchft_like.errors import NotSupportedError, ProcessGroupNotConfiguredError
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.store import StoreAddress, ask_within, parse_store_address, server_of
from torchft_like.process_group.store_server import serving_store
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup
from torchft_like.runtime.hosts import own_host


def create_group(name: str, wanted: Any, pg_options: object) -> ProcessGroup:
    """Make a configured group, for torch; with `enable_reconfigure=True`, one that its user configures.

    Args:
        wanted: torch's description of the group: store, group_rank, group_size, timeout, ...
    """
    if pg_options is not None:
        raise NotSupportedError(f"{name} takes no pg_options; leave them out")
    origin = BACKENDS[name]
    if "cpu" not in origin.devices and not torch.cuda.is_available():
        raise NotSupportedError(f"{name} needs a CUDA device and there is none here; use torchft-gloo")
    cls = getattr(importlib.import_module(f"torchft_like.process_group.{origin.module}"), origin.class_name)
    seat = wanted.group_rank, wanted.group_size
    arguments = seat if origin.class_name == "ProcessGroupDummy" else (wanted.timeout,)
    group: ProcessGroup = cls(*arguments)
    global_ranks = list(wanted.global_ranks_in_group) or None  # empty for the default group
    awaits_handles = getattr(wanted, "enable_reconfigure", False)  # torch has it from 2.14 on
    try:
        if awaits_handles and isinstance(group, ReconfigurableProcessGroup):
            group.adopt_seat(*seat)
        else:
            with _meeting_place(wanted.store, seat, wanted.timeout) as address:
                group.configure(str(address), *seat, global_ranks=global_ranks)
                if server_of(wanted.store) is None:
                    group.barrier().wait()
        if isinstance(group, ReconfigurableProcessGroup):
            group.adopt_store(wanted.store)
    except BaseException:
        group.shutdown()
        raise
    return group


@contextlib.contextmanager
def _meeting_place(store: Store, seat: tuple[int, int], timeout: timedelta) -> Iterator[StoreAddress]:
    """Yield the address to configure with, the same for all members; it is valid during the block.

    Each member counts its own rounds, as one store may serve one group after the other.
    """
    rank, world_size = seat
    server = server_of(store)
    failed = f"configuring rank {rank} of {world_size} failed"
    try:
        number = ask_within(timeout, store, lambda: store.add(f"torchft/round/{rank}", 1))
    except RuntimeError as error:
        raise ProcessGroupNotConfiguredError(f"{failed}: {error}") from error
    key = f"torchft/meeting/{number}"

    def told(published: Address | StoreAddress | None) -> bytes:
        if published is not None:
            store.set(key, f"{published}/torchft/{uuid.uuid4().hex}")
        store.wait([key], timeout)
        return store.get(key)

    with contextlib.ExitStack() as until_met:
        published = None
        if rank == 0:
            published = server or until_met.enter_context(serving_store(own_host()))
        try:
            said = ask_within(timeout, store, partial(told, published))
        except RuntimeError as error:  # raised by torch's store
            raise ProcessGroupNotConfiguredError(
                f"{failed}: rank 0 did not say where to meet: {error}"
            ) from error
        place = parse_store_address(said.decode(errors="backslashreplace"))
        # Each member uses torch's store by a name that is valid on its host.
        yield replace(place, server=server or place.server)
