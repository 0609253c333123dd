"""The ranks of a replica group between two tries: they end together, decide together, and meet again.

Where each of them serves its store (`core/meeting.py`) they learn once, in the store that the launcher has
named (MASTER_ADDR, MASTER_PORT): under torchrun the agent serves it, otherwise rank 0 does. A spare learns it
from the others. A try has a store of its own besides, served by rank 0, and those variables name it while it
lasts. So the Manager, torch's `env://` and whatever else looks for its ranks finds the living ones, and
nothing that an earlier try has left.

INVARIANT: a rank begins try n + 1 only after every rank of the group has ended try n and said so, or is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from lighthouse.address import Address, is_loopback, parse_address
from torchft_like.core.meeting import MeetingProtocol
from torchft_like.core.restarts import Ending, RankProcess, Told
from torchft_like.errors import ConfigError, GroupLostError, ProcessGroupError
from torchft_like.in_process.meeting import Meeting, Place
from torchft_like.in_process.spare import SpareDesk
from torchft_like.manager.config import AGENT_STORE_ENV, GroupPlace, dead_after_s
from torchft_like.manager.group_store import is_listening
from torchft_like.process_group.store import AbortableStore, StoreAddress, serve_store
from torchft_like.runtime.environment import environment
from torchft_like.runtime.hosts import local_host_towards

_runs = itertools.count()  # of functions in this process; all ranks run the same ones


class RestartGroup:
    """The ranks of a replica group, of which this process is one; made by `meet` or `as_spare`."""

    def __init__(
        self, rank: int, meets_at: Address | None, meeting: Meeting | None, limit: timedelta
    ) -> None:
        self.is_alone = meeting is None
        self._rank = rank
        self._meets_at = meets_at
        self._meeting = meeting
        self._limit = limit
        self._until_closed = contextlib.ExitStack()

    @classmethod
    def meet(cls, place: GroupPlace, limit_s: float, desk: SpareDesk) -> RestartGroup:
        """Return the group of a process that a launcher has started, once all of its ranks are there.

        Args:
            place: this process's place in it, as the launcher has given it.
            limit_s: how long a rank waits for the others, in seconds.
            desk: where it asks for spares.

        Raises:
            GroupLostError: another rank did not come.
        """
        limit = timedelta(seconds=limit_s)
        rank, world_size, at = place.group_rank, place.group_world_size, place.store
        if at is None or world_size == 1:
            return cls(rank, at, None, limit)
        own_host = _own_host(at)
        group = cls(rank, at, None, limit)
        with contextlib.ExitStack() as stack:
            if rank == 0 and not place.store_is_agents and not is_listening(at):
                served, _ = serve_store(at.host, limit, at.port)
                stack.callback(id, served)  # it is served for as long as it is referred to
            own_store, address = serve_store(own_host, limit)
            stack.callback(id, own_store)
            prefix = f"torchft/restarts/{place.incarnation}/{next(_runs)}"
            with contextlib.closing(AbortableStore(StoreAddress(at, prefix), limit)) as store:
                store.connect()
                if store.add(f"ranks/{rank}", 1) > 1:
                    raise ConfigError(
                        f"rank {rank} of an earlier start has left its traces in the store at {at}"
                    )
                if rank == 0:
                    store.set("group", str(uuid.uuid4()))
                store.set(f"process/{rank}", f"{address} {socket.gethostname()}")
                keys = ["group", *(f"process/{other}" for other in range(world_size))]
                try:
                    store.wait(keys)
                except (ProcessGroupError, TimeoutError) as error:
                    raise GroupLostError(f"a rank of this group did not come: {error}") from error
                group_id, *said = (value.decode(errors="backslashreplace") for value in store.multi_get(keys))
            processes = [RankProcess(other, *text.partition(" ")[::2]) for other, text in enumerate(said)]
            protocol = MeetingProtocol(processes[rank], processes)
            asks = desk.asks_for(group_id, world_size)
            group._meeting = Meeting(group_id, protocol, limit, asks, dead_after_s(os.environ), desk.wait_s)
            group.is_alone = False
            group._until_closed = stack.pop_all()
        return group

    @classmethod
    def as_spare(cls, place: Place, limit_s: float, desk: SpareDesk) -> tuple[RestartGroup, int]:
        """Take a vacant place; return the group, and the number of the next try.

        Raises:
            GroupLostError: another process has taken it, or the group does not go on.
        """
        limit = timedelta(seconds=limit_s)
        own_store, address = serve_store(_own_host(place.store), limit)
        asks = desk.asks_for(place.group_id, place.world_size)
        own = RankProcess(place.rank, str(address), socket.gethostname(), place.attempt + 1)
        protocol = MeetingProtocol(own, [own])
        meeting = Meeting(place.group_id, protocol, limit, asks, dead_after_s(os.environ), desk.wait_s)
        group = cls(place.rank, place.store, meeting, limit)
        group._until_closed.callback(id, own_store)
        return group, meeting.enter(place.store, place.world_size)

    @contextlib.contextmanager
    def begin(self, attempt: int) -> Iterator[None]:
        """Serve or find the store of a try, and let the environment name it for the time of a block.

        Raises:
            GroupLostError: rank 0 serves no store.
        """
        if self._meets_at is None:
            yield
            return
        served: object = None
        if self._rank > 0 and self._meeting is not None:
            address = parse_address(self._meeting.find(attempt), "the address of the store of a try")
        else:
            served, address = serve_store(_own_host(self._meets_at), self._limit)
            if self._meeting is not None:
                self._meeting.publish(attempt, str(address))
        of_try = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), AGENT_STORE_ENV: "True"}
        try:
            with environment(of_try):
                yield
        finally:
            del served  # an error of the block keeps this frame for a while

    def say(self, attempt: int, told: Told) -> None:
        """Say how this rank's last try has ended; a rank that is alone says nothing."""
        if self._meeting is not None:
            self._meeting.say(attempt, told)

    def agree(self, attempt: int, told: Told) -> tuple[int, list[Told]]:
        """Say how this rank's try has ended; return the number of the next, and what all ranks say of theirs.

        There is no further try with a rank that says nothing within the limit, or whose place is vacant and
        not taken by a spare.
        """
        if self._meeting is None:
            return attempt + 1, [told]
        try:
            return self._meeting.agree(attempt, told)
        except GroupLostError as error:
            return attempt + 1, [Told(Ending.LAST, str(error))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until_closed.close()


def _own_host(towards: Address) -> str:
    """Return the name under which the others reach this host, on which one of them may serve `towards`."""
    host = local_host_towards(towards.host)
    return towards.host if is_loopback(host) else host
