"""How a rank gets its connection: rank 0 starts the ManagerServer, the others find it."""

from __future__ import annotations

from datetime import timedelta

from lighthouse.address import Address
from torchft_like.errors import ConfigError
from torchft_like.manager.config import WAIT, ManagerConfig
from torchft_like.manager.group_store import GroupStore, find_manager, open_group_store, publish_manager
from torchft_like.manager_server.rank_link import LocalListener, RankLink, SessionLink
from torchft_like.manager_server.server import ManagerServer


def connect(
    config: ManagerConfig, listener: LocalListener, heartbeat_interval: timedelta
) -> tuple[RankLink, GroupStore]:
    """Return the connection of this rank, and the stores of its replica group, which live as long as they are
    held.

    Raises:
        ConnectError, BindError: a server could not be reached in time, or could not listen.
    """
    store = open_group_store(config)
    if (place := store.meeting_place) is None:  # another rank has it, which is rank 0
        address = find_manager(store.shared, config)
        limits = config.connect_timeout_s, config.host, config.dead_after_s
        key = store.shared.get(_key_of_ranks(config)).decode(errors="backslashreplace")
        return SessionLink(address, config.group_rank, listener, *limits, key), store
    if config.lighthouse is None:
        raise ConfigError("rank 0 needs the lighthouse's address: set TORCHFT_LIGHTHOUSE")
    server = ManagerServer(
        replica_id=config.replica_id,
        lighthouse_addr=str(config.lighthouse),
        hostname=config.host,
        bind=str(Address(config.host, config.port)),
        store_addr=str(place.address),
        world_size=config.group_world_size,
        heartbeat_interval=heartbeat_interval,
        connect_timeout=timedelta(seconds=config.connect_timeout_s),
        waits_for_lighthouse=config.lighthouse_absence == WAIT,
        job_id=config.job_id,
        spare=config.spare,
        dead_after=timedelta(seconds=config.dead_after_s),
        on_quorum=place.announce,
    )
    try:
        store.shared.set(_key_of_ranks(config), server.rank_key)
        publish_manager(store.shared, config, server.address())
        return server.attach_local_rank(config.group_rank, listener), store
    except BaseException:
        server.close()  # the lighthouse knows the server already, and would wait for it
        raise


def _key_of_ranks(config: ManagerConfig) -> str:
    """Return the name of the key in the group's store that a rank shows to its ManagerServer."""
    return f"torchft/rank_key/{config.incarnation}"
