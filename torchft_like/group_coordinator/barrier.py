"""A barrier that names the missing ranks.

The ranks meet in a barrier of the process group, which notices at once when one of them dies. Beside it each
rank notes in a store that it has come, and a rank that waits in vain reads there which ranks have not. A
barrier whose time is up stays open: a rank that comes late finds it complete, and the group stays usable. A
rank that calls again, after a timeout or an interrupt, waits for the same barrier again: otherwise the ranks
would be one off.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from torchft_like.communicator.channel import Started
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

_logger = logging.getLogger(__name__)


class Barriers:
    """The barriers of the members of one communicator.

    Args:
        store: a store that all members reach; None takes the one in which the members of the group met.
        name: the coordinator's name, the same on all members.
    """

    def __init__(self, communicator: Communicator, store: Store | None, name: str) -> None:
        self._communicator = communicator
        self._arrivals: _Arrivals | None = None
        self._pending: Handle[None] | None = None
        if communicator.world_size > 1:
            self._arrivals = _Arrivals(communicator, store or _store_of(communicator), name)

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
        patience = as_timedelta(self._communicator.options.timeout if timeout is None else timeout)
        if self._arrivals is None:
            return
        try:
            self._pending = self._pending or self._started(self._arrivals, patience)
            self._pending.wait(patience.total_seconds())
        except StillUnderWayError:
            missing = self._arrivals.missing()
            waiting = {
                rank: ("barrier",) for rank in range(self._communicator.world_size) if rank not in missing
            }
            raise CollectiveTimeoutError(patience.total_seconds(), missing, waiting) from None
        except StaleEpochError:
            raise
        except GroupCoordinatorError as error:
            self._pending = None
            raise GroupCoordinatorError(f"{error}; {_absent(self._arrivals.missing())}") from error.__cause__
        except Exception:  # all ranks refused it: there was no such barrier
            self._pending = None
            self._arrivals.leave()
            raise
        self._pending = None

    def _started(self, arrivals: _Arrivals, patience: timedelta) -> Handle[None]:
        """Begin the next barrier."""
        arrivals.come()
        with self._communicator.guard("barrier"):
            started = self._communicator.barrier(patience + as_timedelta(self._communicator.options.timeout))
        return Handle("barrier", lambda: _wait(self._communicator, started), lambda _: None)


class _Arrivals:
    """A store's notes of which members have come to the present barrier: under each rank the number of its
    last one.
    """

    def __init__(self, communicator: Communicator, store: Store | None, name: str) -> None:
        self._rank = communicator.rank
        self._others = [rank for rank in range(communicator.world_size) if rank != communicator.rank]
        self._number = 0
        self._store = store and PrefixStore(f"coordinator/{name}/barrier", store)

    def come(self) -> None:
        """Note that the caller has come to its next barrier."""
        self._note(self._number + 1)

    def leave(self) -> None:
        """Take back the last `come`."""
        self._note(self._number - 1)

    def _note(self, number: int) -> None:
        self._number = number
        self._ask(lambda store: store.set(str(self._rank), str(number)))

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the caller's present barrier; none, if there is no store to
        ask.
        """
        return (
            self._ask(lambda store: [rank for rank in self._others if not self._has_come(store, rank)]) or []
        )

    def _has_come(self, store: Store, rank: int) -> bool:
        key = str(rank)
        return store.check([key]) and int(store.get(key)) >= self._number

    def _ask(self, question: Any) -> Any:
        if self._store is None:
            return None
        try:
            return question(self._store)
        except (RuntimeError, ValueError) as error:  # the store went with the process that served it
            _logger.warning("the store of the barriers does not answer: %s", error)
            return None


def _wait(communicator: Communicator, started: Started) -> None:
    with communicator.guard("barrier"):
        started.wait()


def _absent(missing: list[int]) -> str:
    return f"not there yet: {', '.join(f'rank {rank}' for rank in missing)}" if missing else "all had come"


def _store_of(communicator: Communicator) -> Store | None:
    """Return the store in which the members met, if they met in one."""
    if (address := communicator.control.store_address()) is None:
        return c10d._world.pg_map.get(communicator.control.group, (None, None))[1]
    try:
        return create_store_client(str(address), as_timedelta(communicator.options.timeout))
    except (RuntimeError, ValueError) as error:
        _logger.warning("the barriers of %s cannot name who is missing: %s", communicator, error)
        return None
