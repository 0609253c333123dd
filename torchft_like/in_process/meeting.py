"""The meetings of a replica group's ranks between two tries: the stores in which they meet.

`core/meeting.py` says what is asked of them. Here it is asked, and whatever waits is interrupted once the
process of another rank has ended, or it is known that no spare comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from lighthouse.address import Address, parse_address
from lighthouse.net import until_refused
from lighthouse.starvation import SilenceClock
from torchft_like.core.meeting import (
    Ask,
    Check,
    MeetingProtocol,
    NewsError,
    Open,
    Put,
    Read,
    Settle,
    Step,
    Steps,
    StoreLostError,
    Write,
)
from torchft_like.core.restarts import RankProcess, Told
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError
from torchft_like.manager.group_store import is_listening
from torchft_like.manager_server.suspicion import DEAD_S
from torchft_like.process_group.store import AbortableStore, StoreAddress, answers
from torchft_like.runtime.event_loop import coordination_loop

BRIEFLY = timedelta(seconds=5)
HEAR_EVERY_S = 1.0

T = TypeVar("T")
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
        self._protocol = protocol
        self._limit = limit
        self._dead_after_s = dead_after_s
        self._spare_wait_s = spare_wait_s
        self._ask_for_spare = ask_for_spare
        self._lock = threading.Lock()
        self._asked: list[Future[str]] = []
        self._store: AbortableStore | None = None
        self._has_news = False  # since the protocol has been asked last
        self._ends_at = 0.0  # when the limit passes, by the monotonic clock

    def enter(self, store: Address, world_size: int) -> int:
        """Take the vacant place for which this spare has come; return the number of its first try.

        Raises:
            GroupLostError: another process has taken it, or the group does not go on.
        """
        self._run(self._protocol.visit(str(store), world_size))
        with self._watching():
            return self._run(self._protocol.enter())

    def say(self, attempt: int, told: Told) -> None:
        """Say that this rank comes to no meeting after this try, nor to any other."""
        self._run(self._protocol.say(attempt, told))

    def agree(self, attempt: int, told: Told) -> tuple[int, list[Told]]:
        """Say how this rank's try has ended; return the number of the next, and what is said of all ranks.

        Raises:
            GroupLostError: the place of this rank was given away, or a rank says nothing within the limit.
        """
        with self._watching():
            return self._run(self._protocol.agree(attempt, told))

    def publish(self, attempt: int, value: str) -> None:
        """Say, as rank 0, where the ranks of a try find each other.

        Raises:
            GroupLostError: the process of another rank has ended, or there is no store any more.
        """
        with self._watching():
            self._run(self._protocol.publish(attempt, value))

    def find(self, attempt: int) -> str:
        """Wait until rank 0 has said where the ranks of a try find each other, and return it.

        Raises:
            GroupLostError: the process of another rank has ended, or the limit has passed.
        """
        with self._watching():
            return self._run(self._protocol.find(attempt))

    # ----------------------------------------------------------------- the protocol's steps

    def _run(self, steps: Steps[T]) -> T:
        """Carry out the steps of a protocol; return its result."""
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
                store.wait(step.keys)
                answer = store.multi_get(step.keys)
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
                reason = str(asked.exception() or "") or asked.result()
                with self._lock:
                    self._protocol.answered(step, reason)
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
            tell(self._protocol.ended, process)

        async def hear(process: RankProcess, clock: SilenceClock) -> None:
            heard = clock.now()
            while True:
                if await answers(parse_address(process.address), BRIEFLY.total_seconds()):
                    heard = clock.now()
                silence_s = clock.now() - heard
                why = (
                    f"it has answered nothing for {silence_s:.0f} s" if silence_s > self._dead_after_s else ""
                )
                tell(lambda process: self._protocol.silent(process, why), process)  # noqa: B023
                await clock.sleep(HEAR_EVERY_S)

        async def look_again(clock: SilenceClock) -> None:
            while True:
                await clock.sleep(self._dead_after_s)
                self._interrupt()  # it is no news: the limit stays

        async def watch() -> None:
            clock = SilenceClock(asyncio.get_running_loop())
            try:
                heard = (hear(other, clock) for other in others)
                await asyncio.gather(*map(until_ended, others), *heard, look_again(clock))
            finally:
                clock.stop()

        with self._lock:
            others = self._protocol.others
        watching = asyncio.run_coroutine_threadsafe(watch(), coordination_loop().loop)
        try:
            yield
        finally:
            watching.cancel()


def _has_ended(address: str) -> bool:
    """Return whether a process has ended that has served a store here, once that is certain."""
    try:
        coordination_loop().run(
            asyncio.wait_for(until_refused(parse_address(address)), BRIEFLY.total_seconds())
        )
    except TimeoutError:
        return False
    return True
