"""The stores of one replica group, and how a rank gets its connection: rank 0 starts the ManagerServer, the
others find it.

They find it in a TCPStore where the user has named, under torchrun the agent's; otherwise rank 0 serves it. A
group of one rank needs none.

In the other one the process groups meet that join one rank of every replica group, so its address is part of
the quorum. Rank 0 always serves it, with our own server: torch's is open to any client, and asks the name
server about each of its clients, one after the other, so that a few hundred silent connections to it would
make the survivors of a loss wait for half a minute.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError

from lighthouse.address import Address, parse_address
from lighthouse.listening import why_unreachable
from torchft_like.errors import BindError, ConfigError, ConnectError, GroupLostError, ProcessGroupError
from torchft_like.manager.config import MASTER, WAIT, GroupPlace, ManagerConfig
from torchft_like.manager_server.rank_link import (
    LocalListener,
    OtherStartError,
    RankLink,
    ServerGoneError,
    SessionLink,
)
from torchft_like.manager_server.server import ManagerServer
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.store import (
    AbortableStore,
    GroupMembers,
    StoreAddress,
    is_known_to_be_served,
    meet,
    serve_store,
    store_client,
)
from torchft_like.process_group.store_server import StoreServer
from torchft_like.process_group.torch_interface import set_default_group_timeout
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.hosts import lead_torch_out

PROBE_S = 1.0
LATE_S = 60.0  # for which ranks wait for each other without a word
STARTED_ONCE = (
    "start each rank once (RANK), all ranks of a group again where one has failed, and each group with a "
    "MASTER_PORT of its own"
)
START_S = 0.1  # until a rank looks again whether rank 0 has begun another start
PLACES = "torchft/manager"  # the part of the shared store with the addresses of ManagerServers

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupStore:
    """The stores of a replica group, which live as long as this is held.

    Attributes:
        shared: the one in which the group's ranks find each other.
        meeting_place: the one in which process groups meet; None on ranks other than 0.
    """

    shared: Store
    meeting_place: StoreServer | None = None


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
        return connect_rank(config, listener), store
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
        timeout=timedelta(seconds=config.timeout_s),
        on_quorum=place.announce,
    )
    try:
        publish_manager(store.shared, config, server)
        return server.attach_local_rank(config.group_rank, listener), store
    except BaseException:
        server.close()  # the lighthouse knows the server already, and would wait for it
        raise


def connect_rank(config: ManagerConfig, listener: LocalListener) -> RankLink:
    """Return the session of a rank other than 0; where its rank 0 has ended, look for that of a later start.
    This one may listen at the same address (TORCHFT_MANAGER_PORT), and have yet to say so.

    Raises:
        ConnectError, OtherStartError: there is none within `connect_timeout`.
    """
    deadline = time.monotonic() + config.connect_timeout_s
    left_s = config.connect_timeout_s
    while True:
        address, key = find_manager(config, left_s)
        left_s = max(deadline - time.monotonic(), START_S)
        try:
            return SessionLink(
                address, config.group_rank, listener, left_s, config.host, config.dead_after_s, key
            )
        except (ServerGoneError, OtherStartError):
            time.sleep(START_S)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise


def open_group_store(config: ManagerConfig) -> GroupStore:
    """Connect to the stores of this rank's group, or serve them.

    Raises:
        ConnectError: rank 0's store did not answer within `connect_timeout`.
        GroupLostError: it is served no more, as the try of `restartable` to which it belongs is over.
        BindError: rank 0 cannot listen at the address of one of them.
    """
    shared: Store = HashStore()
    store, is_first = config.store, config.group_rank == 0
    limit, served = timedelta(seconds=config.connect_timeout_s), None
    if store is not None and is_first and not config.store_is_agents:
        served = serve_named_store(store, limit)
    if served is not None:
        shared = served
    elif store is not None:
        try:
            shared = store_client(store, limit)
        except (DistError, RuntimeError) as error:
            _raise_if_over(store, error)
            raise ConnectError(
                f"no TCPStore answered at {store} within {config.connect_timeout_s:g} s ({error}); check "
                "MASTER_ADDR and MASTER_PORT (store_addr, store_port), and that rank 0 of this replica group "
                "is running"
            ) from error
    meeting_place = StoreServer(Address(config.host, 0), awaits_quorums=True) if is_first else None
    return GroupStore(shared, meeting_place)


def serve_named_store(address: Address, limit: timedelta) -> Store | None:
    """Serve the store of a replica group where its launcher says, as its rank 0; return None if another
    process listens there.

    A connection of another process may have the port as its own for a while. Or one listens there, and this
    process, or the kernel, was too busy to see it.

    Raises:
        BindError: that is not on this host, or the port was in use for so long.
    """
    deadline = time.monotonic() + limit.total_seconds()
    while not is_listening(address):
        try:
            return serve_store(address.host, limit, address.port)[0]
        except BindError as error:
            is_in_use = isinstance(cause := error.__cause__, OSError) and cause.errno == errno.EADDRINUSE
            if not is_in_use or time.monotonic() + START_S > deadline:
                cure = "choose another MASTER_PORT (store_port)"
                raise BindError(
                    f"rank 0 of this replica group cannot serve its store at {address}: {cause or error}; "
                    + (cure if is_in_use else f"{MASTER} has to name the host on which rank 0 runs")
                ) from error
            time.sleep(START_S)
    return None


def publish_manager(store: Store, config: ManagerConfig, server: ManagerServer) -> None:
    """Publish the address of the ManagerServer, and the key that it asks for, for the other ranks.

    Raises:
        ConfigError: as from `publish_start`.
    """
    if config.group_world_size > 1:  # a group of one rank may have named the store of another group
        publish_start(store, f"{PLACES}/{config.run}", config, server.address(), server.rank_key)


def find_manager(config: ManagerConfig, limit_s: float) -> tuple[Address, str]:
    """Wait so many seconds for what rank 0 publishes of the ManagerServer; return its address, and its key.

    Raises:
        ConnectError: rank 0 did not publish it in time.
    """
    shared = StoreAddress(cast("Address", config.store), PLACES)  # a group of several ranks has one
    # torch's client, after a wait in vain, waits on for a host that is silent.
    store = AbortableStore(shared, timedelta(seconds=limit_s))
    try:
        with contextlib.closing(store):
            store.connect()
            return find_start(store, config.run, config)
    except (ProcessGroupError, TimeoutError) as error:
        _raise_if_over(shared.server, error)
        raise ConnectError(
            f"rank 0 of this replica group did not publish its ManagerServer in the store at {config.store} "
            f"within {config.connect_timeout_s:g} s ({error}); check that rank 0 has started and its log for "
            "errors"
        ) from error


def _raise_if_over(store: Address, error: Exception) -> None:
    """Raise a GroupLostError where the store of a try of `restartable` is gone: another rank has ended it."""
    if is_known_to_be_served(store) and not is_listening(store):
        raise GroupLostError(f"this try is over, as its store at {store} is served no more") from error


def publish_start(store: Store, key: str, place: GroupPlace, address: object, rest: str) -> None:
    """Publish a start of the group, as its rank 0, for `find_start`: where this process serves, and what else
    the others have to know.

    Raises:
        ConfigError: another process is rank 0.
    """
    said, before = f"{address} {place.group_world_size} {rest}", ""
    enter_start(store, key, said.encode(), place)
    while (found := store.compare_set(key, before, said)) != said.encode():
        before = found.decode()
        served_at = parse_address(where := before.partition(" ")[0])
        # Another process may have got the port of a rank 0 that has ended: this one, where the port is fixed.
        if where != str(address) and is_listening(served_at) and enter_start(store, key, found, place):
            raise ConfigError(
                f"rank 0 of this group has a process already, which serves at {served_at}: {STARTED_ONCE}"
            )


def find_start(store: AbortableStore, key: str, place: GroupPlace) -> tuple[Address, str]:
    """Wait until rank 0 of the start that this process belongs to has published where it serves, and what
    else the others have to know; return both.

    A restarted group may find what its predecessor has left in the store. A start is over when no process
    serves there any more; and one in which another process of this rank has been, which the launcher has
    replaced since, is not this process's, even where its rank 0 has not noticed yet.

    Raises:
        ProcessGroupError, TimeoutError: rank 0 did not within the store's timeout.
    """
    limit, deadline = store.timeout, time.monotonic() + store.timeout.total_seconds()
    try:
        while True:
            said = store.get(key)
            served_at, _, about = said.decode(errors="backslashreplace").partition(" ")
            world_size, _, rest = about.partition(" ")
            address = parse_address(served_at, "the address at which rank 0 of this group serves")
            is_alive, is_alike = is_listening(address), world_size == str(place.group_world_size)
            if is_alive and is_alike and enter_start(store, key, said, place):
                return address, rest
            left_s = deadline - time.monotonic() - START_S
            if left_s <= 0:
                why = f"rank 0 of an earlier start was at {address}, and no other has come"
                if is_alive and not is_alike:
                    own = place.group_world_size
                    why = f"WORLD_SIZE is {own} here, and {world_size} on rank 0, which serves at {address}"
                raise TimeoutError(why)
            store.set_timeout(timedelta(seconds=left_s))
            time.sleep(START_S)
    finally:
        store.set_timeout(limit)


@contextlib.contextmanager
def said_if_late(place: GroupPlace, limit: timedelta) -> Iterator[None]:
    """Log a warning if a block takes long, in which this process waits for the other ranks of its group."""
    text = (
        "rank %d waits for the others of this replica group, in the store at %s, for up to %g s: start all "
        "%d of its ranks (WORLD_SIZE), with one MASTER_ADDR and MASTER_PORT"
    )
    told = text, place.group_rank, place.store, limit.total_seconds(), place.group_world_size
    timer = threading.Timer(LATE_S, _logger.warning, told)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def enter_start(store: Store, key: str, said: bytes, place: GroupPlace) -> bool:
    """Note that this process is in a start that rank 0 publishes under the key; return whether it may be.

    It may not where another process of its rank has been in it, which the launcher has replaced since.
    """
    in_it = f"{key}/{sha256(said).hexdigest()}/{place.group_rank}"
    return store.compare_set(in_it, "", place.start).decode() == place.start


def start_default_group(
    store: Store, incarnation: str, config: ManagerConfig, backend: str | None, over: AbortSignal
) -> None:
    """Start torch's default group in a part of the store that no earlier start of the group has written to.

    torchrun keeps its store when it starts a group again, and torch's own rendezvous uses the same keys: a
    rank would find the address of a dead rank, and fail or hang. So would one that starts the default group
    once more, after `destroy_process_group`.

    torch waits in C++ for a rank that never comes, which nothing ends. So the ranks meet before; torch has
    `connect_timeout` for what is left.

    Args:
        store: the group's store.
        incarnation: a text that is the same on all ranks of this start of the group, and different in every
          other.
        config: the settings of this rank.
        backend: the backend's name for torch; None for torch's choice.
        over: ends the wait for the other ranks.

    Raises:
        ProcessGroupAbortedError: `over` was set.
        ProcessGroupError: the other ranks did not come within torch's timeout.
    """
    if dist.is_initialized():
        raise ValueError("torch has a default group: call torch.distributed.destroy_process_group before")
    number = store.add(f"default_group/{incarnation}/{config.group_rank}", 1)
    part = f"default_group/{incarnation}/{number}"
    usual = c10d._get_default_timeout(c10d.Backend(backend or c10d.Backend.UNDEFINED))
    rank, world_size = config.group_rank, config.group_world_size
    if config.store is not None:
        lead_torch_out(config.store)
        members = GroupMembers(StoreAddress(config.store, part), rank, world_size, usual)
        ours = AbortableStore(members.store, timedelta(seconds=config.connect_timeout_s))
        with contextlib.closing(ours), over.ends(ours.abort):
            ours.connect()
            ours.set_timeout(usual)
            with said_if_late(config, usual):
                meet(ours, members)
    dist.init_process_group(
        backend,
        store=PrefixStore(part, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.connect_timeout_s),
    )
    set_default_group_timeout(usual)


def is_listening(address: Address) -> bool:
    """Return whether a process accepts connections at the address."""
    return coordination_loop().run(why_unreachable(address, PROBE_S)) is None
