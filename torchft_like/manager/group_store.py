"""The stores of one replica group.

In one the ranks find their ManagerServer: a TCPStore where the user has named, under torchrun the agent's;
otherwise rank 0 serves it. A group of one rank needs none.

In the other one the process groups meet that join one rank of every replica group, so its address is part of
the quorum. Rank 0 always serves it, with our own server: torch's is open to all who reach it, and asks the
name server about each of its clients, one after the other, so that a few hundred silent connections to it
would make the survivors of a loss wait for half a minute.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from lighthouse.address import Address, parse_address
from lighthouse.forks import disown
from torchft_like.errors import ConnectError
from torchft_like.manager.config import ManagerConfig
from torchft_like.process_group.store import serve_store
from torchft_like.process_group.store_server import StoreServer

PROBE_S = 1.0


@dataclass(frozen=True)
class GroupStore:
    """The stores of a replica group, which live as long as this is held.

    Attributes:
        shared: the one in which the group's ranks find each other.
        meeting_place: the one in which process groups meet; None on ranks other than 0.
    """

    shared: Store
    meeting_place: StoreServer | None = None


def open_group_store(config: ManagerConfig) -> GroupStore:
    """Connect to the stores of this rank's group, or serve them.

    Raises:
        ConnectError: rank 0's store did not answer within `connect_timeout`.
        BindError: rank 0 cannot listen at the address of one of them.
    """
    shared: Store = HashStore()
    store, is_first = config.store, config.group_rank == 0
    if store is not None and is_first and not config.store_is_agents and not is_listening(store):
        shared, _ = serve_store(store.host, timedelta(seconds=config.connect_timeout_s), store.port)
    elif store is not None:
        shared = _connect(store, config)
    meeting_place = StoreServer(Address(config.host, 0), awaits_quorums=True) if is_first else None
    return GroupStore(shared, meeting_place)


def publish_manager(store: Store, config: ManagerConfig, address: str) -> None:
    """Publish the address of the ManagerServer for the other ranks."""
    store.set(_key(config), address)


def find_manager(store: Store, config: ManagerConfig) -> Address:
    """Wait for the address of the ManagerServer that rank 0 publishes, and return it.

    Raises:
        ConnectError: rank 0 did not publish it within `connect_timeout`.
    """
    try:
        store.wait([_key(config)], timedelta(seconds=config.connect_timeout_s))
    except DistStoreError as error:
        raise ConnectError(
            f"rank 0 of this replica group did not publish its ManagerServer in the store at {config.store} "
            f"within {config.connect_timeout_s:g} s; check that rank 0 has started and its log for errors"
        ) from error
    published = store.get(_key(config))
    return parse_address(published.decode(errors="backslashreplace"), "address of the ManagerServer")


def start_default_group(store: Store, incarnation: str, config: ManagerConfig, backend: str | None) -> None:
    """Start torch's default group in a part of the store that no earlier start of the group has written to.

    torchrun keeps its store when it starts a group again, and torch's own rendezvous uses the same keys: a
    rank would find the address of a dead rank, and fail or hang.

    Args:
        store: the group's store.
        incarnation: a text that is the same on all ranks of this start of the group, and different in every
          other.
        config: the settings of this rank.
        backend: the backend's name for torch; None for torch's choice.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore(f"default_group/{incarnation}", store),
        rank=config.group_rank,
        world_size=config.group_world_size,
    )


def _key(config: ManagerConfig) -> str:
    # A restarted group may find the store of its predecessor, whose address must not be taken for the new
    # one.
    return f"torchft/manager/{config.incarnation}"


def _connect(address: Address, config: ManagerConfig) -> TCPStore:
    disown(address)
    try:
        return TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=config.connect_timeout_s),
        )
    except (DistError, RuntimeError) as error:
        raise ConnectError(
            f"no TCPStore answered at {address} within {config.connect_timeout_s:g} s; check MASTER_ADDR and "
            f"MASTER_PORT (store_addr, store_port), and that rank 0 of this replica group is running"
        ) from error


def is_listening(address: Address) -> bool:
    """Return whether somebody accepts connections at the address."""
    try:
        with socket.create_connection((address.host, address.port), PROBE_S):
            return True
    except OSError:
        return False
