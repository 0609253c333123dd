"""The ranks of a replica group between two tries: they end together, decide together, and meet again.

They meet in the store that the launcher has named (MASTER_ADDR, MASTER_PORT): under torchrun the agent serves
it, otherwise rank 0 does for as long as the function runs. A try has a store of its own besides, served by
rank 0, and those variables name it while the try lasts. So the Manager, torch's `env://` and whatever else
looks for its ranks finds the living ones, and nothing that an earlier try has left.

INVARIANT: a rank begins try n + 1 only after every rank of the group has ended try n, and said so.

A process that ends says nothing. The kernel says it: it refuses connections to the port on which the process
listened.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.listening import listen_tcp
from lighthouse.net import until_refused
from torchft_like.core.restarts import Ending, Told
from torchft_like.errors import ConfigError, GroupLostError, ProcessGroupError
from torchft_like.manager.config import AGENT_STORE_ENV, GroupPlace
from torchft_like.manager.group_store import is_listening
from torchft_like.process_group.store import AbortableStore, StoreAddress, serve_store
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.hosts import local_host_towards

_runs = itertools.count()  # of functions in this process; all ranks run the same ones


class RestartGroup:
    """The ranks of a replica group, of which this process is one.

    Args:
        place: this process's place in it, as the launcher has given it.
        limit_s: how long a rank waits for the others, in seconds.

    Raises:
        GroupLostError: another rank did not come.
    """

    def __init__(self, place: GroupPlace, limit_s: float) -> None:
        self.is_alone = place.world_size == 1
        self._place = place
        self._meets_at = place.store or Address(LOOPBACK, 0)  # a rank that is alone meets nobody
        self._limit = timedelta(seconds=limit_s)
        self._prefix = f"torchft/restarts/{place.incarnation}/{next(_runs)}"
        self._others: dict[int, Address] = {}  # where each other rank listens as long as its process lives
        self._until_closed = contextlib.ExitStack()
        if not self.is_alone:
            self._meet()

    @contextlib.contextmanager
    def begin(self, attempt: int) -> Iterator[None]:
        """Serve or find the store of a try, and let the environment name it for the time of a block.

        Raises:
            GroupLostError: rank 0 serves no store.
        """
        if self._place.store is None:
            yield
            return
        served, address = self._store_of_try(attempt)
        of_try = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), AGENT_STORE_ENV: "True"}
        before = {name: os.environ.get(name) for name in of_try}
        os.environ.update(of_try)
        try:
            yield
        finally:
            del served  # an error of the block keeps this frame for a while
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def say(self, attempt: int, told: Told) -> None:
        """Say how this rank's try has ended; a rank that is alone says nothing."""
        if not self.is_alone:
            with self._store() as store:
                store.set(f"{attempt}/ended/{self._place.rank}", f"{told.ending.value} {told.reason}")

    def agree(self, attempt: int, told: Told) -> list[Told]:
        """Say how this rank's try has ended, and return what all ranks say of theirs.

        There is no further try with a rank whose process has ended, or that says nothing within the limit.
        """
        if self.is_alone:
            return [told]
        try:
            self.say(attempt, told)
            return [_told(rank, text) for rank, text in enumerate(self._values(f"{attempt}/ended"))]
        except (GroupLostError, ProcessGroupError, TimeoutError) as error:
            return [Told(Ending.LAST, str(error))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until_closed.close()

    def _meet(self) -> None:
        """Begin to listen, and find out where the others do."""
        at, rank = self._meets_at, self._place.rank
        if rank == 0 and not self._place.store_is_agents and not is_listening(at):
            served, _ = serve_store(at.host, self._limit, at.port)
            self._until_closed.callback(id, served)  # it is served for as long as it is referred to
        sign_of_life = self._until_closed.enter_context(listen_tcp(Address(local_host_towards(at.host), 0)))
        with self._store() as store:
            if store.add(f"ranks/{rank}", 1) > 1:
                raise ConfigError(f"rank {rank} of an earlier start has left its traces in the store at {at}")
            store.set(f"process/{rank}", str(Address(*sign_of_life.getsockname()[:2])))
        for number, text in enumerate(self._values("process")):
            if number != rank:
                self._others[number] = parse_address(text.decode(), f"the address of rank {number}")

    def _store_of_try(self, attempt: int) -> tuple[object, Address]:
        """Return the server of the try's store, on rank 0, and the address."""
        key = f"{attempt}/store"
        if self._place.rank > 0:
            (found,) = self._wait([key])
            return None, parse_address(found.decode(), "the address of the store of a try")
        host = local_host_towards(self._meets_at.host)
        if ipaddress.ip_address(host).is_loopback:  # the others know this host by the name of the store
            host = self._meets_at.host
        served, address = serve_store(host, self._limit)
        if not self.is_alone:
            with self._store() as store:
                store.set(key, str(address))
        return served, address

    def _values(self, name: str) -> list[bytes]:
        """Return what each rank has set under a name; wait for those that have not yet."""
        return self._wait([f"{name}/{rank}" for rank in range(self._place.world_size)])

    def _wait(self, keys: list[str]) -> list[bytes]:
        """Wait for keys of the store, and return their values.

        Raises:
            GroupLostError: the process of another rank has ended, or the limit has passed.
        """
        lost = ""
        with self._store() as store, self._watching(store) as ended:
            try:
                store.wait(keys)
            except (ProcessGroupError, TimeoutError) as error:
                lost = ended[0] if ended else str(error)
        with self._store() as store:
            if lost and not store.check(keys):  # else it has ended after it had come
                raise GroupLostError(lost)
            return store.multi_get(keys)

    @contextlib.contextmanager
    def _watching(self, store: AbortableStore) -> Iterator[list[str]]:
        """End a wait in the store once another rank's process has ended; yield a list for the reason."""
        ended: list[str] = []

        async def watch_one(rank: int, address: Address) -> None:
            await until_refused(address)
            ended.append(f"rank {rank}: its process has ended")
            store.abort()

        async def watch() -> None:
            await asyncio.gather(*(watch_one(rank, address) for rank, address in self._others.items()))

        watching = asyncio.run_coroutine_threadsafe(watch(), coordination_loop().loop)
        try:
            yield ended
        finally:
            watching.cancel()

    @contextlib.contextmanager
    def _store(self) -> Iterator[AbortableStore]:
        store = AbortableStore(StoreAddress(self._meets_at, self._prefix), self._limit)
        with contextlib.closing(store):
            store.connect()
            yield store


def _told(rank: int, text: bytes) -> Told:
    ending, _, reason = text.decode(errors="replace").partition(" ")
    return Told(Ending(ending), f"rank {rank}: {reason}")
