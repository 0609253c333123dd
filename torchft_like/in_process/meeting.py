"""The ranks of a replica group between two tries: they end together, decide together, and meet again.

Where each of them serves its store they learn once, in the store that the launcher has named (MASTER_ADDR,
MASTER_PORT): under torchrun the agent serves it, otherwise rank 0 does. A spare learns it from the others.
`core/restarts.py` says what is asked of these stores. Here it is asked, and every wait is interrupted once
the process of another rank has ended, or it is known that no spare comes. A try has a store of its own
besides, served by rank 0, and those variables name it while it lasts. So the Manager, torch's `env://` and
any library that looks for its ranks find the living ones, and nothing that an earlier try has left.

INVARIANT: a rank begins try n + 1 only after every rank of the group has ended try n and said so, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Self, TypeVar

from lighthouse.address import Address, parse_address
from lighthouse.listening import until_refused
from torchft_like.core.restarts import (
    Ask,
    Check,
    Ending,
    MeetingProtocol,
    NewsError,
    Open,
    Put,
    RankProcess,
    Read,
    Settle,
    Step,
    Steps,
    StoreLostError,
    Told,
    Write,
)
from torchft_like.errors import ConfigError, GroupLostError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.in_process.spare import AskForSpare, Place, SpareDesk
from torchft_like.manager.config import AGENT_STORE_ENV, MASTER, GroupPlace, dead_after_s
from torchft_like.manager.group_store import (
    STARTED_ONCE,
    find_start,
    is_listening,
    publish_start,
    said_if_late,
    serve_named_store,
)
from torchft_like.manager.quorum_driver import end_all
from torchft_like.manager_server.suspicion import DEAD_S
from torchft_like.process_group.store import (
    AbortableStore,
    StoreAddress,
    answers,
    known_to_be_served,
    serve_store,
    wait_for_ranks,
)
from torchft_like.runtime.environment import environment
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.hosts import local_host_towards

BRIEFLY = timedelta(seconds=5)
HEAR_EVERY_S = 1.0
_runs = itertools.count()  # of functions in this process; all ranks run the same ones

T = TypeVar("T")


class RestartGroup:
    """The ranks of a replica group, of which this process is one; made by `meet` or `as_spare`."""

    def __init__(
        self,
        rank: int,
        meets_at: Address | None,
        limit: timedelta,
        meeting: Meeting | None = None,
        until_closed: contextlib.ExitStack | None = None,
    ) -> None:
        self.is_alone: bool = meeting is None
        self._rank = rank
        self._meets_at = meets_at
        self._limit = limit
        self._meeting = meeting
        self._until_closed = until_closed or contextlib.ExitStack()

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
            return cls(rank, at, limit)
        own_host = local_host_towards(at.host, what=MASTER)
        with contextlib.ExitStack() as stack:
            if rank == 0 and not place.store_is_agents:
                served = serve_named_store(at, limit)
                stack.callback(id, served)  # it is served for as long as it is referred to
            own_store, address = serve_store(own_host, limit)
            stack.callback(id, own_store)
            prefix = f"torchft/restarts/{place.run}/{next(_runs)}"
            meets = AbortableStore(StoreAddress(at, prefix), limit)
            with contextlib.closing(meets) as store, said_if_late(place, limit):
                try:
                    store.connect()
                    group_id = _begin_start(store, place, address)
                    if store.add(f"{group_id}/{rank}", 1) > 1:
                        raise ConfigError(
                            f"rank {rank} of this group has a process already, as the store at {at} says: "
                            f"{STARTED_ONCE}"
                        )
                    store.set(f"{group_id}/process/{rank}", f"{address} {socket.gethostname()}")
                    keys = {other: f"{group_id}/process/{other}" for other in range(world_size)}
                    wait_for_ranks(store, keys)
                except (ProcessGroupError, TimeoutError) as error:
                    raise GroupLostError(f"a rank of this group did not come: {error}") from error
                values = store.multi_get(list(keys.values()))
            said = [value.decode(errors="backslashreplace") for value in values]
            processes = [RankProcess(other, *text.partition(" ")[::2]) for other, text in enumerate(said)]
            protocol = MeetingProtocol(processes[rank], processes)
            asks = desk.asks_for(group_id, world_size, os.environ)
            meeting = Meeting(group_id, protocol, limit, asks, dead_after_s(os.environ), desk.wait_s)
            return cls(rank, at, limit, meeting, stack.pop_all())

    @classmethod
    def as_spare(cls, place: Place, limit_s: float, desk: SpareDesk) -> tuple[RestartGroup, int]:
        """Take a vacant place; return the group, and the number of the next try.

        Raises:
            GroupLostError: another process has taken it, or the group does not go on.
            AddressError, BindError: this host has no way there.
        """
        limit = timedelta(seconds=limit_s)
        with contextlib.ExitStack() as stack:
            own_store, address = serve_store(local_host_towards(place.store.host), limit)
            stack.callback(id, own_store)
            # An error keeps this frame: others would see a process in a place that it has declined.
            del own_store
            asks = desk.asks_for(place.group_id, place.world_size, place.environment)
            own = RankProcess(place.rank, str(address), socket.gethostname(), place.attempt + 1)
            protocol = MeetingProtocol(own, [own])
            meeting = Meeting(place.group_id, protocol, limit, asks, dead_after_s(os.environ), desk.wait_s)
            meeting.run(protocol.visit(str(place.store), place.world_size), watches=False)
            attempt = meeting.run(protocol.enter())
            return cls(place.rank, place.store, limit, meeting, stack.pop_all()), attempt

    @contextlib.contextmanager
    def begin(self, attempt: int) -> Iterator[None]:
        """Serve or find the store of a try, and let the environment name it for the time of a block.

        Raises:
            GroupLostError: rank 0 serves no store.
        """
        if self._meets_at is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            if self._rank > 0 and self._meeting is not None:
                found = self._meeting.run(self._meeting.protocol.find(attempt))
                address = parse_address(found, "the address of the store of a try")
            else:
                *served, address = serve_store(local_host_towards(self._meets_at.host), self._limit)
                stack.callback(served.clear)  # an error of the block keeps this frame for a while

                def lost(process: RankProcess) -> None:
                    served.clear()  # ranks that wait for that one in there hear it, and so do the others
                    end_all(GroupLostError(f"rank {process.rank}: its process has ended"))

                if self._meeting is not None:
                    self._meeting.run(self._meeting.protocol.publish(attempt, str(address)))
                    stack.enter_context(self._meeting.noticing(attempt, lost))
            stack.enter_context(known_to_be_served(address))
            of_try = {"MASTER_ADDR": address.host, "MASTER_PORT": str(address.port), AGENT_STORE_ENV: "True"}
            stack.enter_context(environment(of_try))
            yield

    def say(self, attempt: int, told: Told) -> None:
        """Say how this rank's last try has ended; a rank that is alone says nothing."""
        if self._meeting is not None:
            self._meeting.run(self._meeting.protocol.say(attempt, told), watches=False)

    def agree(self, attempt: int, told: Told) -> tuple[int, list[Told]]:
        """Say how this rank's try has ended; return the number of the next, and what all ranks say of theirs.

        There is no further try with a rank that says nothing within the limit, or whose place is vacant and
        not taken by a spare.
        """
        if self._meeting is None:
            return attempt + 1, [told]
        try:
            return self._meeting.run(self._meeting.protocol.agree(attempt, told))
        except GroupLostError as error:
            return attempt + 1, [Told(Ending.LAST, str(error))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._until_closed.close()


class Meeting:
    """The ranks of one replica group, one of which this process is or is to be.

    Args:
        group_id: the prefix of their keys.
        protocol: this process's part.
        limit: how long a rank waits for the others, from when it begins to, or from the last news of them.
        ask_for_spare: asks for a spare for a vacant place, told the process that was there, the one in whose
          store the ranks meet, and the try that has ended. Its future has the reason for which none comes.
        dead_after_s: how long a process may answer nothing, in seconds.
        spare_wait_s: how much longer a rank waits once it has asked for a spare, in seconds.
    """

    def __init__(
        self,
        group_id: str,
        protocol: MeetingProtocol,
        limit: timedelta,
        ask_for_spare: AskForSpare,
        dead_after_s: float = DEAD_S,
        spare_wait_s: float = 0.0,
    ) -> None:
        self._group_id = group_id
        self.protocol = protocol
        self._limit = limit
        self._dead_after_s = dead_after_s
        self._spare_wait_s = spare_wait_s
        self._ask_for_spare = ask_for_spare
        self._lock = threading.Lock()
        self._asked: list[Future[str]] = []
        self._store: AbortableStore | None = None
        self._has_news = False  # since the protocol has been asked last
        self._ends_at = 0.0  # when the limit passes, by the monotonic clock

    def run(self, steps: Steps[T], *, watches: bool = True) -> T:
        """Carry out what the protocol does; return its result, or raise its error.

        Args:
            watches: whether a step that waits is interrupted when another process has ended or is silent.
        """
        with self._watching() if watches else contextlib.nullcontext():
            return self._run(steps)

    @contextlib.contextmanager
    def noticing(self, attempt: int, lost: Callable[[RankProcess], None]) -> Iterator[None]:
        """Call `lost`, in another thread, where the process of another rank ends in a block, which is a try,
        and has not said before that its function has returned.

        A Manager notices that once it is connected. A try may wait for ranks before, or elsewhere: torch's
        `init_process_group` for 30 minutes. Rank 0 has a connection to each of the others for that.
        """
        lock, is_over = threading.Lock(), False
        protocol = MeetingProtocol(self.protocol.own, self.protocol.processes.values())

        def look(process: RankProcess) -> None:
            asks = Meeting(self._group_id, protocol, BRIEFLY, self._ask_for_spare)
            has_returned = asks.run(protocol.has_returned(attempt, process), watches=False)
            with lock:
                if not (has_returned or is_over):
                    lost(process)

        async def watch(process: RankProcess) -> None:
            await until_refused(parse_address(process.address))
            await asyncio.to_thread(look, process)

        async def watch_all() -> None:
            await asyncio.gather(*map(watch, protocol.others))

        watching = asyncio.run_coroutine_threadsafe(watch_all(), coordination_loop().loop)
        try:
            yield
        finally:
            watching.cancel()
            with lock:
                is_over = True

    # ----------------------------------------------------------------- the protocol's steps

    def _run(self, steps: Steps[T]) -> T:
        answer: object = None
        failure: Exception | None = None
        self._ends_at = time.monotonic() + self._limit.total_seconds()
        try:
            while True:
                with self._lock:
                    self._has_news = False
                    step = steps.send(answer) if failure is None else steps.throw(failure)
                answer = failure = None
                try:
                    answer = self._perform(step)
                except ProcessGroupAbortedError:
                    failure = NewsError("there is news of other ranks")
                except (ProcessGroupError, TimeoutError) as error:
                    failure = StoreLostError(str(error))
                    failure.__cause__ = error
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            self._leave_store()
            for asked in self._asked:
                asked.cancel()
            self._asked.clear()

    def _perform(self, step: Step) -> object:
        store = self._store
        answer: object = None
        match step:
            case Open():
                self._open(step)
            case Ask():
                self._ask(step)
            case Settle():
                answer = _has_ended(step.address)
            case _ if store is None:
                raise StoreLostError("a protocol opens a store before it asks it")
            case Put():
                answer = store.compare_set(step.key, "", step.value)
            case Write():
                store.set(step.key, step.value)
            case Check():
                answer = store.check(step.keys)
            case Read():
                wait_for_ranks(store, step.keys, self._limit)
                answer = store.multi_get(list(step.keys.values()))
        return answer

    def _open(self, step: Open) -> None:
        self._leave_store()
        address = parse_address(step.address)
        if step.briefly and not is_listening(address):  # a client would wait for it to begin
            raise ProcessGroupError(f"no process serves a store at {address}")
        limit = BRIEFLY if step.briefly else self._left()
        store = AbortableStore(StoreAddress(address, self._group_id), limit)
        with self._lock:
            self._store = store
            if self._has_news:
                store.abort()
        store.connect()

    def _leave_store(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.0, self._ends_at - time.monotonic()))

    def _wait_longer(self, spare_wait_s: float = 0.0) -> None:
        until = time.monotonic() + self._limit.total_seconds() + spare_wait_s
        self._ends_at = max(self._ends_at, until)

    def _ask(self, step: Ask) -> None:
        def note(asked: Future[str]) -> None:
            if not asked.cancelled():
                reason = repr(error) if (error := asked.exception()) is not None else asked.result()
                with self._lock:
                    self.protocol.answered(step, reason)
                    self._wait_longer()
                self._interrupt()

        with self._lock:
            self._wait_longer(self._spare_wait_s)
            if self._store is not None:
                self._store.set_timeout(self._left())
        asked = self._ask_for_spare(*step)
        self._asked.append(asked)
        asked.add_done_callback(note)

    # ----------------------------------------------------------------- news of the others

    def _interrupt(self) -> None:
        with self._lock:
            self._has_news = True
            if self._store is not None:
                self._store.abort()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Interrupt what waits, in a block, when another process has ended or is silent."""

        def tell(is_news: Callable[[RankProcess], bool], process: RankProcess) -> None:
            with self._lock:
                if not is_news(process):
                    return
                self._wait_longer()
            self._interrupt()

        async def until_ended(process: RankProcess) -> None:
            await until_refused(parse_address(process.address))
            tell(self.protocol.ended, process)

        back = 0.0  # when one that was silent for as long answered again: it or this host had been cut off

        async def hear(process: RankProcess) -> None:
            nonlocal back
            heard = clock.now()
            while True:
                has_answered = await answers(parse_address(process.address), BRIEFLY.total_seconds())
                silence_s = clock.now() - max(heard, back)
                why = ""
                if silence_s > self._dead_after_s:
                    why = f"it has answered nothing for {silence_s:.0f} s"
                if has_answered:
                    heard = clock.now()
                    back = heard if why else back
                    why = ""
                if has_answered or why:
                    tell(lambda process: self.protocol.silent(process, why), process)  # noqa: B023
                await clock.sleep(HEAR_EVERY_S)

        async def look_again() -> None:
            while True:
                await clock.sleep(self._dead_after_s)
                self._interrupt()  # it is no news: the limit stays

        async def watch() -> None:
            await asyncio.gather(*map(until_ended, others), *map(hear, others), look_again())

        loop = coordination_loop()
        clock = loop.clock
        with self._lock:
            others = self.protocol.others
        watching = asyncio.run_coroutine_threadsafe(watch(), loop.loop)
        try:
            yield
        finally:
            watching.cancel()


def _begin_start(store: AbortableStore, place: GroupPlace, own: Address) -> str:
    """Return the id of the group in this start of it, which rank 0 gives and publishes.

    Raises:
        ConfigError: another process is rank 0.
        ProcessGroupError, TimeoutError: rank 0 did not come.
    """
    if place.group_rank > 0:
        return find_start(store, "start", place)[1]
    group_id = str(uuid.uuid4())
    publish_start(store, "start", place, own, group_id)
    return group_id


def _has_ended(address: str) -> bool:
    """Return whether a process has ended that has served a store here, once that is certain."""
    try:
        coordination_loop().run(
            asyncio.wait_for(until_refused(parse_address(address)), BRIEFLY.total_seconds())
        )
    except TimeoutError:
        return False
    return True
