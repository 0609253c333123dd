"""Groups of some of the members; the members of each meet in a store that the first of them serves.

All members of the whole group take part, and state over that group how they have to split up; the first
member of each part publishes the address at which its members meet. So different arguments are an error on
every member; no store of the whole has to be alive, and no names in it can clash, as every part has a store
of its own.

A part ends with the configuration of the whole in which it was made. Only the members that talk to a dead
member notice its death. Without this rule, the members of a part to which it did not belong would wait for
partners that are already meeting anew.

INVARIANT: a store is served until every member of its part has met the others, and no longer. That they
have is known from a barrier of the new group, and a member that dies meanwhile breaks the barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lighthouse.address import Address
from torchft_like.communicator.channel import ranks_in_job
from torchft_like.communicator.communicator import Communicator
from torchft_like.core.agreement.statements import PAYLOAD_BYTES_MAX, Statement
from torchft_like.devices import beside_captures
from torchft_like.errors import BindError, ProcessGroupError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.store import DEFAULT_TIMEOUT, serve_store, server_of
from torchft_like.runtime.hosts import own_host

_NOT_SERVED = "!"


class Part(NamedTuple):
    """A configured group of some members of `whole`, and the configuration of `whole` with which it ends."""

    group: ProcessGroup
    whole: dist.ProcessGroup
    ending: Configuration

    @property
    def is_latest(self) -> bool:
        """Whether the whole group has not been configured anew since, even if it was aborted."""
        return not isinstance(self.whole, ProcessGroup) or self.whole.configuration is self.ending


def split(communicator: Communicator, operation: str, partition: Sequence[tuple[int, ...]]) -> Part | None:
    """Make the groups of several parts, each of some of the members; return None if the caller is in no part.

    Every member calls this, with the same partition.

    Raises:
        CollectiveMismatchError: the members passed different partitions; all of them raise the same.
        ProcessGroupError: the members of the caller's part could not meet.
    """
    group, rank = communicator.control.group, communicator.rank
    # This is read before the exchange: from now on an end of the whole ends the part, too. torch's own groups
    # never end.
    ending = group.configuration if isinstance(group, ProcessGroup) else Configuration()
    own = next((ranks for ranks in partition if rank in ranks), ())
    timeout = timeout_of(group, communicator.device)
    store, text = _serve(group, timeout) if len(own) > 1 and own[0] == rank else (None, "")
    with ExitStack() as until_met:
        until_met.callback(_let_go, store)
        del store  # an error that the caller keeps would keep this frame, and the server
        statement = Statement(operation, terms=(("ranks", str([list(ranks) for ranks in partition])),))
        payload = text.encode()[:PAYLOAD_BYTES_MAX]
        records, _ = communicator.agree(operation, lambda: (statement, 0, payload, None))
        if not own:
            return None
        made = make_like(group, communicator.device)
        try:
            address = records[own[0]].payload.decode(errors="replace")
            _meet(Part(made, group, ending), own, address, communicator)
        except BaseException:
            made.abort("its members could not meet")  # not shutdown, which waits for operations under way
            raise
        return Part(made, group, ending)


def _serve(group: dist.ProcessGroup, timeout: timedelta) -> tuple[TCPStore | None, str]:
    try:
        store, address = serve_store(own_host(_store_of(group)), timeout)
    except (BindError, RuntimeError) as error:
        return None, f"{_NOT_SERVED}{error}"
    return store, str(address)


def _meet(part: Part, own: tuple[int, ...], address: str, communicator: Communicator) -> None:
    if address.startswith(_NOT_SERVED):
        why = address.removeprefix(_NOT_SERVED)
        raise ProcessGroupError(f"rank {own[0]} could not serve a store for the ranks {list(own)}: {why}")
    ranks = ranks_in_job(part.whole)
    known = address or str(Address("127.0.0.1", 1))  # a group of one member uses no store
    place = own.index(communicator.rank)
    global_ranks = [ranks[rank] for rank in own]
    with beside_captures(communicator.device):
        part.group.configure(
            f"{known}/gang", place, len(own), global_ranks=global_ranks, ends_with=part.ending
        )
        part.group.barrier().wait()
    part.ending.check()


def _let_go(store: object) -> None:
    """Drop the last reference to a store, which is this call's argument, and with it the server."""


def make_like(group: dist.ProcessGroup, device: torch.device) -> ProcessGroup:
    """Make a group of the class, timeout and options of `group`, not configured.

    It is always a group of this package, also for torch's own groups, with their timeout: torch sorts the
    ranks of a new group, wants every process of the job to take part in making one, and cannot end one whose
    member has died.
    """
    if isinstance(group, ProcessGroup) and (alike := group.make_alike()) is not None:
        return alike
    timeout = timeout_of(group, device)
    return ProcessGroupNCCL(timeout) if device.type == "cuda" else ProcessGroupGloo(timeout)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the limit of each operation of a group."""
    if isinstance(group, ProcessGroup):
        return group.timeout
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


def _store_of(group: dist.ProcessGroup) -> Address | None:
    """Return the address of the store in which the members of a group have met, if it is known."""
    if isinstance(group, ProcessGroup) and (met_at := group.store_address) is not None:
        return met_at.server
    if not dist.is_initialized():
        return None
    return server_of(dist.distributed_c10d._get_default_store())
