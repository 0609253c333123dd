"""One epoch of an elastic coordinator, and what becomes of its calls and handles when it is over.

INVARIANT: whatever was begun in an epoch ends in it, or raises StaleEpochError; a result that came in
time is given up, too, because nobody can tell whether the other members of that epoch had theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from torchft_like.errors import GroupCoordinatorError, StaleEpochError
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.transport import FIRST_TAG, Group, Transport

T = TypeVar("T")
_MARKS, _NUMBERS = 1 << 10, 1 << 20  # together the tags that there are


class Epoch:
    """Whether the members of an epoch are still the present ones.

    Args:
        mark: of its messages; the same on all members.

    Attributes:
        number: of the epoch.
        ended: why it is over; None while it is not.
    """

    def __init__(self, number: int, mark: int = 0) -> None:
        self.number = number
        self.mark = mark
        self.ended: str | None = None

    def end(self, reason: str) -> None:
        """From now on everything of this epoch is stale; the first reason counts."""
        self.ended = self.ended or reason

    def check(self, what: str) -> None:
        """Whether it goes on.

        Raises:
            StaleEpochError: it does not.
        """
        if self.ended is not None:
            raise self.stale(what)

    def stale(self, what: str) -> StaleEpochError:
        """The error for something of this epoch."""
        return StaleEpochError(f"{what} is of epoch {self.number}, which is over: {self.ended}")

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Around something that ends in the epoch or not at all."""
        self.check(what)
        try:
            yield
        except StaleEpochError:
            raise
        except GroupCoordinatorError as error:
            if self.ended is not None:
                raise self.stale(what) from error
            raise
        self.check(what)


class EpochTransport(Transport):
    """The transport of one epoch."""

    epoch = Epoch(0)

    @classmethod
    def of(cls, transport: Transport, groups: tuple[Group, Group | None], epoch: Epoch) -> EpochTransport:
        """As `transport`, over the same groups or others of the same members, until `epoch` is over."""
        seat = transport.rank, transport.world_size
        made = cls(transport.name, seat, transport.device, *groups, transport.options)
        made.epoch = epoch
        return made

    @contextlib.contextmanager
    def guard(self, operation: str) -> Iterator[None]:
        """See Transport.guard; an error of an epoch that is over says that."""
        with self.epoch.telling(f"{operation} over {self}"), super().guard(operation):
            yield

    def bound(self, handle: Handle[T]) -> Handle[T]:
        """See Transport.bound."""
        return EpochHandle(handle, self.epoch)

    def require_present(self, what: str) -> None:
        """See Transport.require_present.

        Raises:
            StaleEpochError: the epoch is over.
        """
        self.epoch.check(what)

    def tag(self, direction: str, peer: int) -> int:
        """See Transport.tag; of another epoch than any message of the last thousand."""
        number = super().tag(direction, peer) - FIRST_TAG
        return FIRST_TAG + self.epoch.mark % _MARKS * _NUMBERS + number % _NUMBERS

    def over(self, cpu_group: Group, device_group: Group | None) -> Transport:
        """See Transport.over."""
        return EpochTransport.of(super().over(cpu_group, device_group), (cpu_group, device_group), self.epoch)


class EpochHandle(Handle[T]):
    """A handle that is good for one epoch.

    Args:
        inner: the operation.
        epoch: in which it was begun.
    """

    def __init__(self, inner: Handle[T], epoch: Epoch) -> None:
        self._inner = inner
        self._epoch = epoch

    def wait(self, timeout: float | None = None) -> T:
        """See Handle.wait.

        Raises:
            StaleEpochError: the members have changed since, whether the operation was done before or not.
        """
        with self._epoch.telling(repr(self._inner)):
            return self._inner.wait(timeout)

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._epoch.ended is not None or self._inner.is_done()

    def __repr__(self) -> str:
        return repr(self._inner) if self._epoch.ended is None else f"<stale, of epoch {self._epoch.number}>"
