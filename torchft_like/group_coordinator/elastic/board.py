"""A place to announce memberships in: for a launcher or a scheduler, and for the members who read it.

Who is a member is decided elsewhere; here it is written down, in the order of epochs, in a TCPStore.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator.elastic.ballot import Ballot
from torchft_like.group_coordinator.elastic.membership import Membership
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.store import DEFAULT_TIMEOUT, StoreAddress, parse_store_address
from torchft_like.process_group.wrapper import as_timedelta

_LATEST = "latest"


class MembershipBoard:
    """Memberships in a store.

    Args:
        store_address: `host:port/prefix`, the same for all who announce and read.
        timeout: for each question to the store, seconds or timedelta.
    """

    def __init__(self, store_address: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        self._address = parse_store_address(store_address)
        self._timeout = as_timedelta(timeout)

    def announce(self, members: Sequence[str]) -> Membership:
        """Write down who the next members are to be, in the order of their ranks.

        Raises:
            ValueError: see Membership.
            ProcessGroupError, TimeoutError: the store was lost.
        """
        with self._asking() as store:
            epoch = _latest(store)
            while True:  # until nobody else was first to write down an epoch of that number
                epoch += 1
                place = StoreAddress(self._address.server, f"{self._address.prefix}/epoch/{epoch}")
                membership = Membership(epoch, str(place), tuple(members))
                text = json.dumps([uuid.uuid4().hex, membership.store_address, membership.members])
                if store.compare_set(_key(epoch), "", text) == text.encode():
                    store.set(_LATEST, str(epoch))
                    return membership

    def latest(self) -> Membership | None:
        """What was announced last; None if nothing was.

        Raises:
            ProcessGroupError, TimeoutError: the store was lost.
        """
        with self._asking() as store:
            if (epoch := _latest(store)) == 0:
                return None
            return _membership(epoch, store.multi_get([_key(epoch)])[0])

    def wait_for(self, after: int, timeout: timedelta | float | None = None) -> Membership:
        """The latest membership, once there is one later than epoch `after`.

        Args:
            timeout: seconds or timedelta; that of the board if left out.

        Raises:
            TimeoutError: nothing was announced in time, or the store does not answer.
            ProcessGroupError: the store was lost.
        """
        limit = self._timeout if timeout is None else as_timedelta(timeout)
        with self._asking() as store:
            store.wait([_key(after + 1)], limit)
            epoch = _latest(store, after + 1)
            return _membership(epoch, store.multi_get([_key(epoch)])[0])

    def withdraw(self, membership: Membership, reason: str) -> None:
        """Have a change rolled back that will not come about, unless it is decided already.

        For whoever knows that a member is gone: the others need not wait for it until their timeout.

        Raises:
            ProcessGroupError, TimeoutError: the store was lost.
        """
        Ballot(membership.store, len(membership.members), self._timeout).refuse(f"withdrawn: {reason}")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[AbortableStore]:
        store = AbortableStore(self._address, self._timeout)
        with contextlib.closing(store):
            store.connect()
            yield store


def _latest(store: AbortableStore, known: int = 0) -> int:
    """The number of the last epoch that was written down; 0 if none was. There are no gaps."""
    if store.check([_LATEST]):  # which may lag behind a little, and saves the way from the first on
        known = max(known, int(store.multi_get([_LATEST])[0]))
    while store.check([_key(known + 1)]):
        known += 1
    return known


def _key(epoch: int) -> str:
    return f"membership/{epoch}"


def _membership(epoch: int, text: bytes) -> Membership:
    try:
        _, address, members = json.loads(text)
        return Membership(epoch, address, tuple(members))
    except (ValueError, TypeError) as error:
        raise GroupCoordinatorError(
            f"what was announced as epoch {epoch} is no membership: {error}"
        ) from error
