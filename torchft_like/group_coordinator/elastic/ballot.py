"""How the members decide, all of them alike, whether they switch to a new membership.

One key of the new membership's store is written once, by whoever is first, with "switch" or "roll back".
What stands there binds everybody. A member

1. meets the others in new process groups, beside the old ones, which it goes on using;
2. votes: it sets a key of its own, and if it finds that all n have voted then, writes "switch";
3. waits for the key. One that cannot wait any longer, that could not meet the others, or that sees one
   of them die, writes "roll back".

The write is a compare-and-set in a store that one thread serves, so of two who write the second finds
what the first has written. "switch" is written only when all have voted. Everything that is written can
be written again: a question whose answer was lost is asked once more, over a new connection.

What a member knows when it loses the store:

* before it has voted: nobody has switched or will, as its vote is missing. It rolls back, for certain.
* after it has read the key: what it read.
* in between it is **in doubt**. Others may have read "switch" and gone on, or may not. It can neither go
  on with the old members, some of whom may have left them, nor with the new ones, some of whom may have
  rolled back: ChangeInDoubtError. It closes both groups, so nobody waits for it, and is a member of
  nothing until the next change, whose store is another one.

No data of two epochs can mix even then: each epoch has connections of its own, and a member makes no call
over those of the old one once it has switched. A member that dies after its vote binds the others to
nothing but the key: they switch, and find it dead, or roll back. Those who leave do not vote; they read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torchft_like.errors import FaultToleranceError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.group_coordinator.elastic.membership import SWITCH, Verdict
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.store import StoreAddress

_DECISION = "decision"
RETRY_S = 1.0
NEVER = timedelta(days=365)
REASON_CHARACTERS_MAX = 1000

# What losing the store looks like: it is gone, or does not answer.
STORE_LOST = (FaultToleranceError, TimeoutError, OSError)

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Ballot:
    """One member's view of one decision.

    Args:
        address: of the store, the part of it that belongs to this change.
        voters: how many members the new membership has.
        timeout: for each question to the store.

    Attributes:
        verdict: what stands in the store, or the error that the store was lost with.
        has_voted: whether this member's vote may have reached the store.
    """

    def __init__(self, address: StoreAddress, voters: int, timeout: timedelta) -> None:
        self._address = StoreAddress(address.server, f"{address.prefix}/ballot")
        self._voters = voters
        self._timeout = timeout
        self._listening: AbortableStore | None = None
        self._hearing: AbortableStore | None = None
        self._is_closed = False
        self.verdict: Future[Verdict] = Future()
        self.has_voted = False

    def listen(self) -> None:
        """From now on `verdict` is what stands in the store, once something does.

        Raises:
            ProcessGroupError, TimeoutError: the store cannot be reached.
        """
        self._listening = store = AbortableStore(self._address, self._timeout)
        _connect(store)
        threading.Thread(target=self._listen, args=(store,), name="torchft-ballot", daemon=True).start()

    def vote(self, rank: int) -> None:
        """This member is ready. One that sees that all are decides.

        Raises:
            ProcessGroupError, TimeoutError: the store was lost; whether the vote has reached it is not known.
        """

        def vote(store: AbortableStore) -> None:
            self.has_voted = True  # from here on nobody can tell
            store.set(f"vote/{rank}", "1")
            if store.check([f"vote/{voter}" for voter in range(self._voters)]):
                store.compare_set(_DECISION, "", SWITCH.text)

        self._ask(vote)

    def refuse(self, reason: str) -> None:
        """Roll back, unless it is decided already; `verdict` tells.

        Raises:
            ProcessGroupError, TimeoutError: the store was lost.
        """
        text = Verdict(False, reason[:REASON_CHARACTERS_MAX]).text
        self._ask(lambda store: store.compare_set(_DECISION, "", text))

    def try_to_refuse(self, reason: str) -> None:
        """As `refuse`; where the store is lost the others find that out for themselves."""
        try:
            self.refuse(reason)
        except STORE_LOST as error:
            _logger.info("the others could not be told that %s: %s", reason, error)

    def say(self, rank: int, text: str) -> None:
        """For the others to `hear`."""
        self._ask(lambda store: store.set(f"said/{rank}", text))

    def hear(self) -> list[str]:
        """What all voters have said; waits until they have.

        Raises:
            ProcessGroupAbortedError: the ballot was closed.
            ProcessGroupError, TimeoutError: the store was lost, or some have not said anything in time.
        """
        keys = [f"said/{rank}" for rank in range(self._voters)]

        def hear(store: AbortableStore) -> list[bytes]:
            self._hearing = store
            if self._is_closed:
                store.abort()
            store.wait(keys)
            return store.multi_get(keys)

        return [said.decode(errors="replace") for said in self._ask(hear)]

    def close(self) -> None:
        """Listen and hear no more. From any thread."""
        self._is_closed = True
        for store in (self._listening, self._hearing):
            if store is not None:
                store.abort()

    def _listen(self, store: AbortableStore) -> None:
        try:
            try:
                found = _awaited(store)
            except STORE_LOST:
                found = self._listen_again()  # it may be the connection that was lost, and not the store
        except STORE_LOST as error:
            self.verdict.set_exception(error)
        else:
            self.verdict.set_result(found)

    def _listen_again(self) -> Verdict:
        self._listening = store = AbortableStore(self._address, timedelta(seconds=RETRY_S))
        if self._is_closed:
            store.abort()
        _connect(store)
        return _awaited(store)

    def _ask(self, question: Callable[[AbortableStore], T]) -> T:
        """Over a connection of its own: one whose answer was not waited for cannot be used again."""
        store = AbortableStore(self._address, self._timeout)
        with contextlib.closing(store):
            store.connect()
            try:
                return question(store)
            except ProcessGroupAbortedError:
                raise
            except ProcessGroupError as lost:
                again = AbortableStore(self._address, timedelta(seconds=RETRY_S))
                with contextlib.closing(again):
                    again.connect()
                    again.set_timeout(self._timeout)
                    _logger.info("asking the store once more: %s", lost)
                    return question(again)


def _connect(store: AbortableStore) -> None:
    try:
        store.connect()
    except BaseException:
        store.close()
        raise


def _awaited(store: AbortableStore) -> Verdict:
    with contextlib.closing(store):
        store.wait([_DECISION], NEVER)
        return Verdict.parse(store.multi_get([_DECISION])[0].decode(errors="replace"))
