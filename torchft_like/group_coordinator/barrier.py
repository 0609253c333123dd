"""A barrier that names the missing ranks.

The ranks meet in a barrier of the process group, which notices at once when one of them dies. Beside it each
rank notes in a store that it has come, and a rank that waits in vain reads there which ranks have not. A
barrier whose time is up stays open: a rank that comes late finds it complete, and the group stays usable. A
rank that calls again, after a timeout or an interrupt, waits for the same barrier again: otherwise the ranks
would be one off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from torchft_like.communicator.communicator import Communicator
from torchft_like.communicator.handle import Handle
from torchft_like.errors import (
    CollectiveTimeoutError,
    GroupCoordinatorError,
    StaleEpochError,
    StillUnderWayError,
)
from torchft_like.process_group import create_store_client
from torchft_like.process_group.wrapper import as_timedelta

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Barriers:
    """The barriers of the members of one communicator.

    Args:
        store: a store that all members reach; None takes the one in which the members of the group met.
        name: the coordinator's name, the same on all members.
    """

    def __init__(self, communicator: Communicator, store: Store | None, name: str) -> None:
        self._communicator = communicator
        self._pending: Handle[None] | None = None
        self._number = 0  # of the caller's last barrier; each member has its own in the store, under its rank
        if communicator.world_size > 1 and store is None:
            store = _store_of(communicator)
        self._store = store and PrefixStore(f"coordinator/{name}/barrier", store)

    def wait(self, timeout: timedelta | float | None) -> None:
        """Wait until all members have come; after a CollectiveTimeoutError, to the barrier of that error.

        Args:
            timeout: seconds or a timedelta; None takes that of the options.

        Raises:
            CollectiveTimeoutError: some members did not come in time; the text names them. The group stays
                usable.
            CollectiveMismatchError: some members made another call, over a group that compares calls.
            GroupCoordinatorError: a member died; the text names those that had not come.
            ValueError: the timeout is not positive.
        """
        members = self._communicator
        limit = as_timedelta(members.options.timeout if timeout is None else timeout)
        if members.world_size == 1:
            return
        try:
            self._pending = self._pending or self._started(limit)
            self._pending.wait(limit.total_seconds())
        except StillUnderWayError:
            missing = self._missing()
            waiting = {rank: ("barrier",) for rank in range(members.world_size) if rank not in missing}
            raise CollectiveTimeoutError(limit.total_seconds(), missing, waiting) from None
        except StaleEpochError:
            raise
        except GroupCoordinatorError as error:
            self._pending = None
            absent = ", ".join(f"rank {rank}" for rank in self._missing())
            who = f"not there yet: {absent}" if absent else "all had come"
            raise GroupCoordinatorError(f"{error}; {who}") from error.__cause__
        except Exception:  # all ranks refused it: there was no such barrier
            self._pending = None
            self._note(self._number - 1)
            raise
        self._pending = None

    def _started(self, limit: timedelta) -> Handle[None]:
        """Begin the next barrier."""
        self._note(self._number + 1)
        with self._communicator.guard("barrier"):
            started = self._communicator.barrier(limit + as_timedelta(self._communicator.options.timeout))

        def finish() -> None:
            with self._communicator.guard("barrier"):
                started.wait()

        return Handle("barrier", finish, lambda _: None)

    def _note(self, number: int) -> None:
        self._number = number
        self._ask(lambda store: store.set(str(self._communicator.rank), str(number)))

    def _missing(self) -> list[int]:
        """Return the ranks that have not come to the caller's barrier; none, if there is no store to ask."""

        def is_missing(store: Store, rank: int) -> bool:
            key = str(rank)
            return not (store.check([key]) and int(store.get(key)) >= self._number)

        others = [rank for rank in range(self._communicator.world_size) if rank != self._communicator.rank]
        return self._ask(lambda store: [rank for rank in others if is_missing(store, rank)]) or []

    def _ask(self, question: Callable[[Store], T]) -> T | None:
        if self._store is None:
            return None
        try:
            return question(self._store)
        except (RuntimeError, ValueError) as error:  # the store went with the process that served it
            _logger.warning("the store of the barriers does not answer: %s", error)
            return None


def _store_of(communicator: Communicator) -> Store | None:
    """Return the store in which the members met, if they met in one."""
    if (address := communicator.control.store_address()) is None:
        return c10d._world.pg_map.get(communicator.control.group, (None, None))[1]
    try:
        return create_store_client(str(address), as_timedelta(communicator.options.timeout))
    except (RuntimeError, ValueError) as error:
        _logger.warning("the barriers of %s cannot name who is missing: %s", communicator, error)
        return None
