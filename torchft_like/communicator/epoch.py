"""The time for which members are the present ones, and what becomes of their calls and handles afterwards.

INVARIANT: whatever was begun in an epoch ends in it, or raises StaleEpochError; a result that came in
time is given up, too, because no member can tell whether the others of that epoch had theirs.
"""

from __future__ import annotations

from torchft_like.errors import GroupCoordinatorError, StaleEpochError
from torchft_like.process_group.configuration import Configuration


class Epoch:
    """The time for which members that change are the present ones.

    Args:
        number: the number of the epoch.
        mark: a number that tells its messages from those of other epochs; the same on all members.

    Attributes:
        configuration: the signal that is set when the epoch is over.
    """

    def __init__(self, number: int, mark: int = 0) -> None:
        self.configuration = Configuration(number)
        self.mark = mark

    @property
    def number(self) -> int:
        """The number of the epoch."""
        return self.configuration.number

    @property
    def ended(self) -> str | None:
        """The reason for which the epoch is over; None while it is not."""
        return self.configuration.reason

    def end(self, reason: str) -> None:
        """End the epoch: everything of it is stale from now on. The first reason counts."""
        self.configuration.set(reason)

    def check(self, what: str) -> None:
        """Raise if the epoch is over; `what` is an object of its members.

        Raises:
            StaleEpochError: the epoch is over.
        """
        if self.ended is not None:
            raise self.stale(what)

    def stale(self, what: str) -> StaleEpochError:
        """Return the error for an object of this epoch."""
        return StaleEpochError(f"{what} is of epoch {self.number}, which is over: {self.ended}")

    def explained(self, what: str, error: BaseException) -> BaseException:
        """Return the error to raise for `what`, which failed with `error`."""
        is_old = self.ended is not None and isinstance(error, GroupCoordinatorError)
        if not is_old or isinstance(error, StaleEpochError):
            return error
        stale = self.stale(what)
        stale.__cause__ = error
        return stale
