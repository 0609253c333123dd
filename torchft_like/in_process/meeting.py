"""How the ranks of a replica group meet between two tries, though any of their processes may end at any time.

Every rank serves a store for as long as its process lives; the kernel refuses connections to it afterwards,
and that is how the others know. They meet in the store of one of them, and in the next one's when it has
ended:

    N/ended/R   how try N of rank R has ended. Rank R says it, or others say for it that its process has ended
    N/taken/R   which spare has taken the place of rank R, if that is vacant, or why none does

INVARIANT: what all have to agree upon is the value of one key of one store, and the first value stays. So a
rank may begin a meeting anew as often as it hears news.

Where the store has ended after some ranks have left the meeting, and before others have, the first come to
the next store with a later try. They leave word there in what would be the earlier meeting (MOVED), and the
others follow: no rank leaves a meeting before all have come to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta

from lighthouse.address import Address, parse_address
from lighthouse.net import until_refused
from torchft_like.core.restarts import (
    VACANT,
    Ending,
    RankProcess,
    Told,
    all_start_again,
    hosts_of_meetings,
    why_not,
)
from torchft_like.errors import GroupLostError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.manager.group_store import is_listening
from torchft_like.process_group.store import AbortableStore, StoreAddress
from torchft_like.runtime.event_loop import coordination_loop

TELL_MAX = 3  # stores in which a rank that leaves for good says so
TELL_S = 5.0

logger = logging.getLogger(__name__)

AskForSpare = Callable[[RankProcess, RankProcess, int], "Future[str]"]


@dataclass(frozen=True)
class Place:
    """A rank's place that is vacant.

    Attributes:
        group_id: the prefix under which the ranks of the group meet.
        store: where they do.
        attempt: their last try, which has ended.
        environment: variables that its ranks hand over.
    """

    group_id: str
    rank: int
    world_size: int
    store: Address
    attempt: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """What is said of a rank in a meeting, and where its process is; `ending` is an Ending or MOVED."""

    ending: str
    reason: str
    address: str = ""
    host: str = ""
    since: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, data: bytes) -> Record:
        said = json.loads(data)
        names = "ending", "reason", "address", "host"
        return cls(**{name: str(said[name]) for name in names}, since=int(said["since"]))

    def process(self, rank: int) -> RankProcess:
        return RankProcess(rank, self.address, self.host, self.since)

    def told(self, rank: int) -> Told:
        return Told(Ending(self.ending), f"rank {rank}: {self.reason}")

    @property
    def is_vacant(self) -> bool:
        return self.ending in {ending.value for ending in VACANT}


MOVED = "moved"
_ADMITTED = Told(Ending.REPLACED, "a spare has taken the place")


class Meeting:
    """The ranks of one replica group, one of which this process is.

    Args:
        group_id: the prefix of their keys.
        own: this process.
        processes: those of all ranks, this one among them.
        limit: how long a rank waits for the others.
        ask_for_spare: asks for a spare for a vacant place, told the process that was there, the one in whose
          store the ranks meet, and the try that has ended. Its future has the reason for which none comes.
        gone: ranks whose processes have ended.
    """

    def __init__(
        self,
        group_id: str,
        own: RankProcess,
        processes: Iterable[RankProcess],
        limit: timedelta,
        ask_for_spare: AskForSpare,
        gone: Iterable[int] = (),
    ) -> None:
        self._group_id = group_id
        self._own = own
        self._processes = {process.rank: process for process in processes}
        self._admission: Record | None = None  # of a spare
        self._limit = limit
        self._ask_for_spare = ask_for_spare
        self._lock = threading.Lock()
        self._gone = set(gone)
        self._asked: dict[tuple[int, str], Future[str]] = {}  # by rank, and the store in which they meet
        self._store: AbortableStore | None = None

    @classmethod
    def of_spare(
        cls, vacancy: Place, address: str, host: str, limit: timedelta, ask_for_spare: AskForSpare
    ) -> Meeting:
        """Return the meeting of a vacant place, of which the other ranks have told their ends.

        Raises:
            GroupLostError: nobody meets there, or the place is not vacant.
        """
        keys = [_ended(vacancy.attempt, rank) for rank in range(vacancy.world_size)]
        store = AbortableStore(StoreAddress(vacancy.store, vacancy.group_id), timedelta(seconds=TELL_S))
        try:
            with contextlib.closing(store):
                store.connect()
                store.wait(keys)
                records = [Record.read(value) for value in store.multi_get(keys)]
        except (ProcessGroupError, TimeoutError) as error:
            raise GroupLostError(f"nobody meets there: {error}") from error
        own = RankProcess(vacancy.rank, address, host, vacancy.attempt + 1)
        processes = [each.process(rank) for rank, each in enumerate(records)]
        gone = [rank for rank, each in enumerate(records) if each.is_vacant]
        if own.rank not in gone:
            raise GroupLostError(f"rank {own.rank} is there: {records[own.rank].reason}")
        processes[own.rank] = own
        meeting = cls(vacancy.group_id, own, processes, limit, ask_for_spare, set(gone) - {own.rank})
        meeting._admission = meeting._record(_ADMITTED)
        return meeting

    def enter(self, attempt: int) -> int:
        """Take the vacant place for which this spare has come, after this try; return the number of the next.

        Raises:
            GroupLostError: another process has taken it, or the group does not go on.
        """
        attempt, told = self.agree(attempt, _ADMITTED)
        if not all_start_again(told):
            raise GroupLostError(f"the group does not go on: {why_not(told)}")
        return attempt

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._processes)

    def say(self, attempt: int, told: Told) -> None:
        """Say that this rank comes to no meeting after this try, nor to any other."""
        record = self._record(told)
        for host in self._hosts()[:TELL_MAX]:
            if not is_listening(parse_address(host.address)):
                continue  # it has ended, and a client would wait for it to begin
            with (
                contextlib.suppress(GroupLostError, ProcessGroupError, TimeoutError),
                self._connected(host, timedelta(seconds=TELL_S)) as store,
            ):
                self._leave_word(store, attempt - 1)
                store.compare_set(_ended(attempt, self._own.rank), "", record.text())

    def agree(self, attempt: int, told: Told) -> tuple[int, list[Told]]:
        """Say how this rank's try has ended; return the number of the next, and what is said of all ranks.

        Raises:
            GroupLostError: the place of this rank was given away, or a rank says nothing within the limit.
        """
        with self._watching():
            try:
                while True:
                    try:
                        return self._meet(attempt, told)
                    except _MovedError:
                        attempt += 1
            finally:
                for asked in self._asked.values():
                    asked.cancel()
                self._asked.clear()

    def wait(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys of the store in which the ranks meet, and return their values.

        Raises:
            GroupLostError: the process of another rank has ended, or the limit has passed.
        """
        with self._watching():
            while True:
                host = self._hosts()[0]
                try:
                    with self._heeding(host) as store:
                        lost = ", ".join(f"rank {rank}: its process has ended" for rank in self._known_gone())
                        if lost and not store.check(list(keys)):  # else it has ended after it had come
                            raise GroupLostError(lost)
                        store.wait(list(keys))
                        return store.multi_get(list(keys))
                except ProcessGroupAbortedError:
                    continue
                except (ProcessGroupError, TimeoutError) as error:
                    raise GroupLostError(_lost_store(host, error)) from error

    def set(self, key: str, value: str) -> None:
        """Set a key of that store.

        Raises:
            GroupLostError: there is no such store any more.
        """
        host = self._hosts()[0]
        try:
            with self._watching(), self._heeding(host) as store:
                store.set(key, value)
        except (ProcessGroupError, TimeoutError) as error:
            raise GroupLostError(_lost_store(host, error)) from error

    # ----------------------------------------------------------------- one meeting

    def _meet(self, attempt: int, told: Told) -> tuple[int, list[Told]]:
        while True:
            host = self._hosts()[0]
            try:
                with self._heeding(host) as store:
                    return self._agree_in(store, host, attempt, told)
            except ProcessGroupAbortedError:
                continue  # there is news
            except (ProcessGroupError, TimeoutError) as error:
                if host.rank not in self._gone and not self._settle(host):
                    raise GroupLostError(f"the ranks of this group did not meet: {error}") from error

    def _agree_in(
        self, store: AbortableStore, host: RankProcess, attempt: int, told: Told
    ) -> tuple[int, list[Told]]:
        self._leave_word(store, attempt - 1)
        self._claim(store, attempt, told)
        for rank in self._known_gone():
            gone = Record(Ending.GONE.value, "its process has ended")
            store.compare_set(_ended(attempt, rank), "", gone.text())
        records = self._values(store, [_ended(attempt, rank) for rank in sorted(self._processes)])
        if any(record.ending == MOVED for record in records):
            raise _MovedError
        vacant = {rank: record for rank, record in enumerate(records) if record.is_vacant}
        if vacant and all(record.ending != Ending.LAST.value for record in records):
            taken = self._fill(store, host, attempt, vacant)
            records = [taken.get(rank, record) for rank, record in enumerate(records)]
        self._admit(records)
        everybody = [each.told(rank) for rank, each in enumerate(records)]
        return attempt + 1, everybody

    def _leave_word(self, store: AbortableStore, attempt: int) -> None:
        """Tell those that may still be in an earlier meeting, in which this rank was, that it has left."""
        if attempt < max(self._own.since - 1, 0):
            return
        moved = self._say(MOVED)
        said = Record.read(store.compare_set(_ended(attempt, self._own.rank), "", moved.text()))
        if said.is_vacant:
            self._take(store, attempt, said)

    def _take(self, store: AbortableStore, attempt: int, said: Record) -> None:
        """Take the vacant place of which this process is a spare."""
        if self._admission is not None and attempt == self._own.since - 1:
            said = Record.read(store.compare_set(_taken(attempt, self._own.rank), "", self._admission.text()))
        if said != self._admission:
            raise GroupLostError(
                f"rank {self._own.rank} of this group is another process by now: {said.reason}"
            )

    def _claim(self, store: AbortableStore, attempt: int, told: Told) -> None:
        record = self._record(told)
        said = Record.read(store.compare_set(_ended(attempt, self._own.rank), "", record.text()))
        if said != record:
            self._take(store, attempt, said)

    def _fill(
        self, store: AbortableStore, host: RankProcess, attempt: int, vacant: Mapping[int, Record]
    ) -> Mapping[int, Record]:
        """Wait until every vacant place is taken, or is known not to be."""
        for rank, why in vacant.items():
            asked = self._asked.get((rank, host.address))
            if asked is None and rank != self._own.rank:
                asked = self._ask_for_spare(self._processes[rank], host, attempt)
                self._asked[rank, host.address] = asked
                asked.add_done_callback(lambda _: self._interrupt())
            if asked is not None and asked.done() and not asked.cancelled() and asked.result():
                none = Record(Ending.GONE.value, f"{why.reason}, and {asked.result()}")
                store.compare_set(_taken(attempt, rank), "", none.text())
        return dict(zip(vacant, self._values(store, [_taken(attempt, rank) for rank in vacant]), strict=True))

    def _admit(self, records: Sequence[Record]) -> None:
        for rank, record in enumerate(records):
            if record.ending == Ending.REPLACED.value:
                with self._lock:
                    self._processes[rank] = record.process(rank)
                    self._gone.discard(rank)

    def _values(self, store: AbortableStore, keys: list[str]) -> list[Record]:
        store.wait(keys)
        return [Record.read(value) for value in store.multi_get(keys)]

    def _record(self, told: Told) -> Record:
        return self._say(told.ending.value, told.reason)

    def _say(self, ending: str, reason: str = "") -> Record:
        return Record(ending, reason, self._own.address, self._own.host, self._own.since)

    # ------------------------------------------------------------ stores, and news of the others

    def _hosts(self) -> list[RankProcess]:
        with self._lock:
            return hosts_of_meetings(self._processes.values(), self._gone)

    def _known_gone(self) -> list[int]:
        with self._lock:
            return sorted(self._gone)

    def _settle(self, host: RankProcess) -> bool:
        """Return whether the process whose store has failed has ended, which is known in a moment."""
        ended = asyncio.wait_for(until_refused(parse_address(host.address)), TELL_S)
        with contextlib.suppress(TimeoutError):
            coordination_loop().run(ended)
            with self._lock:
                self._gone.add(host.rank)
        return host.rank in self._gone

    @contextlib.contextmanager
    def _heeding(self, host: RankProcess) -> Iterator[AbortableStore]:
        """Yield a client of a store whose every wait ends when there is news."""
        store = self._store_of(host, self._limit)
        with self._lock:
            self._store = store
            if host.rank in self._gone:
                store.abort()
        try:
            with contextlib.closing(store):
                store.connect()
                yield store
        finally:
            with self._lock:
                self._store = None

    @contextlib.contextmanager
    def _connected(self, host: RankProcess, limit: timedelta) -> Iterator[AbortableStore]:
        store = self._store_of(host, limit)
        with contextlib.closing(store):
            store.connect()
            yield store

    def _store_of(self, host: RankProcess, limit: timedelta) -> AbortableStore:
        return AbortableStore(StoreAddress(parse_address(host.address), self._group_id), limit)

    def _interrupt(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.abort()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Interrupt what waits when the process of another rank has ended, for the time of a block."""

        async def watch_one(process: RankProcess) -> None:
            await until_refused(parse_address(process.address))
            with self._lock:
                if self._processes[process.rank] != process:
                    return
                self._gone.add(process.rank)
            self._interrupt()

        async def watch() -> None:
            await asyncio.gather(*map(watch_one, others))

        with self._lock:
            others = [p for r, p in self._processes.items() if r != self._own.rank and r not in self._gone]
        watching = asyncio.run_coroutine_threadsafe(watch(), coordination_loop().loop)
        try:
            yield
        finally:
            watching.cancel()


class _MovedError(Exception):
    """The other ranks have left the meeting, and are in the next one."""


def _lost_store(host: RankProcess, error: Exception) -> str:
    return f"rank {host.rank}, in whose store the ranks meet: {error}"


def _ended(attempt: int, rank: int) -> str:
    return f"{attempt}/ended/{rank}"


def _taken(attempt: int, rank: int) -> str:
    return f"{attempt}/taken/{rank}"
