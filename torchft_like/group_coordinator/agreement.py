"""An agreement of all ranks of a job on what they ask for, before they have a group for it.

Their records (see `torchft_like.core.agreement.statements`) stand in a store that all of them reach.

One key is written once, by the first rank that can decide, with the ranks that are missing: the last rank to
come writes that none is, a rank whose time is up writes the ranks that have not come. The key binds every
rank, also one that comes later: either all ranks go on or none does. A rank that went on alone would count
torch's groups otherwise than the others from then on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from torchft_like.communicator.communicator import check
from torchft_like.core.agreement.statements import Statement, decode, encode_briefly
from torchft_like.errors import CollectiveTimeoutError, GroupCoordinatorError

_MISSING = "missing"


def part_of_next(store: Store, rank: int) -> Store:
    """Return the part of the store for a rank's next agreement: its n-th agreement is with the n-th of the
    others.

    The store counts them, not the process: coordinators that only some ranks have made do not count, nor
    those of another job.

    Raises:
        GroupCoordinatorError: the store failed.
    """
    with _asking():
        number = store.add(f"coordinator/made/{rank}", 1)
    return PrefixStore(f"coordinator/{number}", store)


class Agreement:
    """One rank's part in one agreement.

    Args:
        store: the part of the store that belongs to this agreement.
        timeout: how long this rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._keys = [str(rank) for rank in range(world_size)]
        self._timeout = timeout

    def reach(self, statement: Statement) -> None:
        """Wait for the other ranks, and compare their statements.

        Raises:
            CollectiveMismatchError: the ranks do not ask for the same, or one refuses.
            CollectiveTimeoutError: some ranks had not come when the time of the first was up; the text names
              them.
            GroupCoordinatorError: the store failed.
        """
        self.say(statement)
        with _asking():
            missing = self._missing()
            said = [] if missing else self._store.multi_get(self._keys)
        if missing:
            came = set(range(len(self._keys))) - set(missing)
            waiting = dict.fromkeys(came, (f"{statement.operation}()",))
            raise CollectiveTimeoutError(self._timeout.total_seconds(), missing, waiting)
        check({rank: decode(record) for rank, record in enumerate(said)})

    def say(self, statement: Statement) -> None:
        """State something, such as a refusal, without waiting for the other ranks.

        Raises:
            GroupCoordinatorError: the store failed.
        """
        with _asking():
            self._store.set(str(self._rank), encode_briefly(statement).decode())
            if self._store.check(self._keys):
                self._decide([])

    def _missing(self) -> list[int]:
        """Wait for the decision, and return the ranks that had not come."""
        try:
            self._store.wait([_MISSING], self._timeout)
        except RuntimeError:
            self._decide([rank for rank, key in enumerate(self._keys) if not self._store.check([key])])
        missing: list[int] = json.loads(self._store.get(_MISSING))
        return missing

    def _decide(self, missing: list[int]) -> None:
        """Decide which ranks are missing, unless it is decided already."""
        self._store.compare_set(_MISSING, "", json.dumps(missing))


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupCoordinatorError(f"the default group's store failed: {error}") from error
