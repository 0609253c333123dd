"""One epoch of an elastic coordinator, and what becomes of its calls and handles when it is over.

INVARIANT: whatever was begun in an epoch ends in it, or raises StaleEpochError; a result that came in
time is given up, too, because no member can tell whether the others of that epoch had theirs.
"""

from __future__ import annotations

from torchft_like.errors import GroupCoordinatorError, StaleEpochError


class Epoch:
    """Whether the members of an epoch are still the present ones; see `communicator.Epoch`.

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

    def explained(self, what: str, error: BaseException) -> BaseException:
        """The error for something of this epoch that failed with `error`."""
        is_old = self.ended is not None and isinstance(error, GroupCoordinatorError)
        if not is_old or isinstance(error, StaleEpochError):
            return error
        stale = self.stale(what)
        stale.__cause__ = error
        return stale
