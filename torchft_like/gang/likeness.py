"""Groups of the same kind as another: what a gang's part inherits from the whole.

A part is always a group of ours, over torch's own groups too: torch sorts the ranks of a new group,
wants every process of the job to take part in making one, and cannot end one whose member has died.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lighthouse.address import Address
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)
from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.swallowing import SwallowingGroup
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup


def make_like(group: dist.ProcessGroup, device: torch.device) -> ProcessGroup:
    """A group that is not configured yet, of the class, timeout and options of `group`.

    Groups of torch's own are followed in their timeout.
    """
    if isinstance(group, ErrorSwallowingProcessGroupWrapper):
        return ErrorSwallowingProcessGroupWrapper(make_like(group._pg or group, device))
    inner = innermost(group)
    if isinstance(inner, ProcessGroupDummy):
        return ProcessGroupDummy(0, 1)
    if isinstance(inner, ReconfigurableProcessGroup):
        return inner.make_alike()
    timeout = timeout_of(group, device)
    return ProcessGroupNCCL(timeout) if device.type == "cuda" else ProcessGroupGloo(timeout)


def innermost(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What the wrappers around it hand their calls to."""
    while (
        isinstance(group, ProcessGroupWrapper)
        and not isinstance(group, ReconfigurableProcessGroup)
        and group._pg is not None
    ):
        group = group._pg
    return group


def swallowers(group: dist.ProcessGroup) -> list[SwallowingGroup]:
    """Those of the wrappers that keep errors to themselves, from the outermost on."""
    found = []
    while isinstance(group, ProcessGroupWrapper) and group._pg is not None:
        if isinstance(group, SwallowingGroup):
            found.append(group)
        group = group._pg
    return found


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The limit of each operation."""
    inner = innermost(group)
    if isinstance(inner, ReconfigurableProcessGroup):
        return inner.timeout
    options = getattr(inner._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


def store_of(group: dist.ProcessGroup) -> Address | None:
    """Where the members of the group have met, if that is known."""
    inner = innermost(group)
    if isinstance(inner, ReconfigurableProcessGroup):
        return None if inner.store_address is None else inner.store_address.server
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return Address(store.host, store.port) if isinstance(store, TCPStore) else None


def job_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks that the members have in the job, in the order of their ranks in the group."""
    if isinstance(group, ProcessGroup):
        return list(group._member_ranks()) or list(range(group.size()))
    return dist.get_process_group_ranks(group)
