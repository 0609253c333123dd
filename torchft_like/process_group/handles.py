"""Configuration of a group by handles: the way of torch from 2.14 on, and of torchft's nightly.

Each member says by a handle how it can be reached. The party that brings the members together (a lighthouse,
a store, a launcher) gives all handles, in one order, to each of them. A handle of this package names a store
that the member serves; the members meet in the store of the first one, as `configure` lets them meet in any
store. So `reconfigure` is another form of `configure`, and a class does the same in both.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ErrorType, Store, Work

from lighthouse.address import Address
from lighthouse.core.json_text import read_json
from lighthouse.forks import lock_of_each_process
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.store import DEFAULT_TIMEOUT, SharedStore, parse_store_address
from torchft_like.process_group.store_server import StoreServer
from torchft_like.process_group.work import FinishedOperation
from torchft_like.runtime.durations import as_timedelta
from torchft_like.runtime.hosts import own_host

UUID_BITS = 63

_serving = lock_of_each_process()  # two threads that ask for a handle get the same one


@dataclass
class _Options:
    """torch's ReconfigureOptions, for torch before 2.14.

    Attributes:
        uuid: the number of this configuration; the same on all members, and never used before.
        handles: the handles of all members. Their order gives the ranks; a set leaves the order to the group.
        timeout: the limit of the configuration; None is the group's own.
        hints: hints for a backend.
    """

    uuid: int = 0
    handles: Collection[str] = ()
    timeout: timedelta | None = None
    hints: Mapping[str, str] = field(default_factory=dict)


ReconfigureOptions: Any = getattr(c10d, "ReconfigureOptions", _Options)


class Handle(NamedTuple):
    """How one member is reached. A handle travels as JSON, in torchft's form."""

    id: str
    store: str  # host:port of the store that the member serves
    global_rank: int | None  # the member's rank in the job, if the member knows it


def parse_handle(text: str) -> Handle:
    """Read a handle, without unknown fields; a ProcessGroupError says that it is none of this package."""
    try:
        said = read_json(text)
        handle = Handle(said["id"], said["store"], said.get("global_rank"))
        texts = handle.id, handle.store
        if not all(isinstance(text, str) for text in texts) or not isinstance(handle.global_rank, int | None):
            raise TypeError("a field is of another type")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProcessGroupError(
            f"{text!r:.200} is no handle of a group of this package; all members need groups of one kind"
        ) from error
    parse_store_address(handle.store)
    return handle


def meeting_of(handles: Collection[str], own_id: str) -> tuple[str, int, list[int | None]]:
    """Return the store in which the member with `own_id` meets the others, its rank, and the ranks of all
    members in the job. A ProcessGroupError says which handle is missing, or there twice.
    """
    ordered = sorted(handles) if isinstance(handles, set | frozenset) else list(handles)
    members = [parse_handle(text) for text in ordered]
    ids = [member.id for member in members]
    if len(set(ids)) != len(ids):
        raise ProcessGroupError(f"a group is twice among the {len(ids)} handles; each member gives its own")
    if own_id not in ids:
        raise ProcessGroupError(
            f"the group's own handle is not among the {len(ids)} that it was given; every member's "
            "get_reconfigure_handle() belongs there, its own included"
        )
    return members[0].store, ids.index(own_id), [member.global_rank for member in members]


class Reconfigurable:
    """The part of a process group that has to do with handles."""

    supports_reconfigure = True

    _handle_id: str | None = None
    _handle_store: StoreServer | None = None
    _identity: Mapping[str, Any] = {}
    _rank_in_job: int | None = None

    if TYPE_CHECKING:
        configure: Any
        errored: Any

    def set_rank_info(
        self, replica_id: str, group_rank: int, group_world_size: int, global_rank: int | None = None
    ) -> None:
        """Set the rank's identity for `reconfigure`; `configure` gets it as arguments.

        Args:
            replica_id: the name of the replica group.
            group_rank: the rank in the replica group, out of `group_world_size`.
            global_rank: the rank in the job, which the other members get to know.
        """
        self._identity = {
            "replica_id": replica_id,
            "group_rank": group_rank,
            "group_world_size": group_world_size,
        }
        self._rank_in_job = global_rank

    def get_reconfigure_handle(self) -> str:
        """Return how the other members reach this one; the handle stays valid for the life of the group.

        Raises:
            ProcessGroupError: a Manager configures the group.
            BindError: no port is free.
        """
        with _serving:
            if self._handle_store is None:
                self._handle_store = StoreServer(Address(own_host(), 0))
                self._handle_id = uuid.uuid4().hex
        address = str(self._handle_store.address)
        return json.dumps(Handle(self._handle_id or "", address, self._rank_in_job)._asdict())

    def get_error(self) -> ErrorType:
        """Return whether the group is usable, in the form of torch's backends; `errored()` says why not."""
        return ErrorType.SUCCESS if self.errored() is None else ErrorType.COMM_ERROR

    def reconfigure(self, opts: Any) -> Work:
        """Configure the group with the members that gave the handles; block until it is usable.

        Args:
            opts: torch's ReconfigureOptions; hints are ignored.

        Raises:
            ProcessGroupError: the members did not meet, as in `configure`, or the handles are not those of
              all members.
            AddressError: a handle names no valid address of a store.
        """
        store, rank, global_ranks = meeting_of(opts.handles, self._handle_id or "")
        about = dict(self._identity, quorum_id=opts.uuid, timeout=opts.timeout)
        if None not in global_ranks:
            about["global_ranks"] = global_ranks
        self.configure(f"{store}/torchft/{opts.uuid}", rank, len(global_ranks), **about)
        return FinishedOperation([])


class Group(Protocol):
    """A process group of this package, or one of torch's that was made with `enable_reconfigure=True`."""

    def get_reconfigure_handle(self) -> str: ...
    def reconfigure(self, opts: Any) -> Work: ...


def reconfigure_with_store(
    pg: Group, store_addr: str, rank: int, world_size: int, timeout: timedelta | float = DEFAULT_TIMEOUT
) -> None:
    """Exchange handles through a store, and reconfigure; block until the group is usable.

    Args:
        pg: a group of this package, or of torch.
        store_addr: `host:port/prefix` of a store; every call needs a prefix never used before.
        rank: the caller's rank among the new members, out of `world_size`.
        timeout: the limit of the exchange, and of the configuration.

    Raises:
        AddressError: the address is malformed.
        torch.distributed.DistStoreError: the store does not answer, or a member did not come.
        ProcessGroupError: the store refuses connections, or the members did not meet; torch's own groups
            raise errors of torch.
    """
    limit = as_timedelta(timeout)
    store = SharedStore(parse_store_address(store_addr), limit)
    store.connect()
    exchange_and_reconfigure(pg, store, (rank, world_size), limit)


def exchange_and_reconfigure(pg: Group, store: Store, seat: tuple[int, int], timeout: timedelta) -> None:
    """Do as `reconfigure_with_store`, with a client of the store; `seat` is the rank and the world size."""
    rank, world_size = seat
    store.set(f"handle/{rank}", pg.get_reconfigure_handle())
    if rank == 0:
        store.set("uuid", str(_fresh_number()))
    keys = ["uuid", *(f"handle/{member}" for member in range(world_size))]
    store.wait(keys, timeout)
    number, *handles = store.multi_get(keys)
    reconfigure_among(pg, [handle.decode() for handle in handles], timeout, int(number))


def reconfigure_among(pg: Group, handles: list[str], timeout: timedelta, number: int | None = None) -> None:
    """Reconfigure with handles that are known, under one number on all members; one alone needs none."""
    opts = ReconfigureOptions()
    opts.uuid = _fresh_number() if number is None else number
    opts.handles = handles
    opts.timeout = timeout
    pg.reconfigure(opts).wait()


def _fresh_number() -> int:
    return uuid.uuid4().int >> (128 - UUID_BITS)
