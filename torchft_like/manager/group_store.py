"""The TCPStore of one replica group, in which its ranks find their ManagerServer.

Under torchrun the agent's store is used; otherwise rank 0 hosts it. The process groups that join
one rank of every replica group meet in it too, so its address is part of the quorum.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from lighthouse.address import Address, parse_address
from lighthouse.forks import disown
from lighthouse.listening import listen_tcp
from torchft_like.errors import ConnectError
from torchft_like.manager.config import ManagerConfig

PROBE_S = 1.0


def open_group_store(config: ManagerConfig) -> tuple[TCPStore, Address]:
    """Return the group's store, and the address at which others reach it.

    Raises:
        ConnectError: rank 0's store did not answer within `connect_timeout`.
        BindError: rank 0 cannot listen at the store's address.
    """
    if config.store is None:
        return _host(Address(config.host, 0), config)
    is_first = config.group_rank == 0 and not config.store_is_agents
    if is_first and not _is_listening(config.store):
        return _host(config.store, config)
    return _connect(config.store, config), config.store


def publish_manager(store: TCPStore, config: ManagerConfig, address: str) -> None:
    """Publish the address of the ManagerServer for the other ranks."""
    store.set(_key(config), address)


def find_manager(store: TCPStore, config: ManagerConfig) -> Address:
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


def _host(address: Address, config: ManagerConfig) -> tuple[TCPStore, Address]:
    listener = listen_tcp(address)
    port = listener.getsockname()[1]
    store = TCPStore(
        address.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=config.connect_timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, Address(address.host, port)


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


def _is_listening(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), PROBE_S):
            return True
    except OSError:
        return False
