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
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.store import DEFAULT_TIMEOUT


def make_like(group: dist.ProcessGroup, device: torch.device) -> ProcessGroup:
    """A group that is not configured yet, of the class, timeout and options of `group`.

    Groups of torch's own are followed in their timeout.
    """
    if isinstance(group, ProcessGroup) and (alike := group.make_alike()) is not None:
        return alike
    timeout = timeout_of(group, device)
    return ProcessGroupNCCL(timeout) if device.type == "cuda" else ProcessGroupGloo(timeout)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The limit of each operation."""
    if isinstance(group, ProcessGroup):
        return group.timeout
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


def store_of(group: dist.ProcessGroup) -> Address | None:
    """Where the members of the group have met, if that is known."""
    if isinstance(group, ProcessGroup) and (met_at := group.store_address) is not None:
        return met_at.server
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
