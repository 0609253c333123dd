"""Whether the ranks of a replica group run their training function again after an error. Pure.

The ranks of a group start again together or not at all, so each says how its try has ended, and all of them
decide by the same rule from the same endings. What a rank sees of another one's end is an error, too: a lost
group, a broken connection of torch's own Gloo, a missing quorum. Such an error alone tells nothing.

For a rank whose process has ended, or that is not healthy, a spare may say that it has taken the place. What
the others saw is taken for the consequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat

from torchft_like.errors import (
    ConfigError,
    DivergenceError,
    ForeignMemberError,
    GroupLostError,
    MaxRetriesError,
    QuorumTimeoutError,
)

SPARE_ENV = "TORCHFT_SPARE"
SPARE_RANK = "rank"  # the value with which a process is a spare for the place of a rank
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0

ErrorTypes = tuple[type[BaseException], ...]
OF_THE_RUN: ErrorTypes = (MaxRetriesError, DivergenceError)
SECONDHAND: ErrorTypes = (GroupLostError, QuorumTimeoutError)
NEVER: ErrorTypes = (ForeignMemberError, ConfigError)


@dataclass(frozen=True)
class Restart:
    """The try that begins, and why: the value that the training function gets.

    It has texts and a class rather than the error itself, which may hold a model in one of its attributes.

    Attributes:
        attempt: 0 for the first try of the replica group, 1 for its first restart.
        error: the class of the error with which this rank's last try ended; None in the first try.
        reason: that error in words.
        trace: its traceback.
        is_replacement: whether this process was a spare, and this is its first try.
    """

    attempt: int = 0
    error: type[BaseException] | None = None
    reason: str = ""
    trace: str = ""
    is_replacement: bool = False


class Ending(Enum):
    """How a try of one rank has ended."""

    OWN = "own"  # an error after which a new try is worth it
    SECONDHAND = "secondhand"  # one that may be no more than the end of another rank, seen from here
    UNKNOWN = "unknown"  # any other: a bug of the script, or what torch says of another rank's end
    SPENT = "spent"  # as OWN and SECONDHAND, without a restart left: it starts again beside a spare only
    LAST = "last"  # there is no further try of this rank, even if the others begin one
    UNFIT = "unfit"  # nor is there, as it is not healthy; a spare may take its place
    GONE = "gone"  # its process has ended, as others say; likewise
    REPLACED = "replaced"  # a spare has taken its place


VACANT = (Ending.UNFIT, Ending.GONE)


@dataclass(frozen=True)
class Told:
    """What a rank says of the end of its try."""

    ending: Ending
    reason: str


RETURNED = Told(Ending.LAST, "its function has returned")


@dataclass(frozen=True)
class RankProcess:
    """The process in the place of a rank, as all ranks of its group know it.

    Attributes:
        address: where it serves a store for as long as it lives; host:port.
        host: the name of its machine.
        since: the first try that it takes part in.
    """

    rank: int
    address: str
    host: str = ""
    since: int = 0


def ending_of(error: BaseException, restart_on: ErrorTypes) -> Ending:
    """Return how an error ends a try; `restart_on` has the errors with which the others start again."""
    if not isinstance(error, Exception) or isinstance(error, NEVER):
        return Ending.LAST
    if isinstance(error, SECONDHAND):
        return Ending.SECONDHAND
    return Ending.OWN if isinstance(error, restart_on) else Ending.UNKNOWN


def all_start_again(told: Sequence[Told]) -> bool:
    """Return whether the ranks of a replica group start again, of which each has said how its try ended.

    An error of an unknown kind ends the group, as it would without restarts, unless another rank has one of
    its own: then it is taken for the consequence.
    """
    endings = {each.ending for each in told}
    if endings & {Ending.LAST, *VACANT}:
        return False
    if Ending.REPLACED in endings:
        return True
    return Ending.SPENT not in endings and (Ending.OWN in endings or Ending.UNKNOWN not in endings)


def why_not(told: Sequence[Told]) -> str:
    """Return the reasons that keep a replica group from starting again."""
    for decisive in (VACANT, (Ending.LAST,), (Ending.SPENT,), (Ending.UNKNOWN,)):
        if reasons := [each.reason for each in told if each.ending in decisive]:
            return "; ".join(reasons)
    return ""


@dataclass
class RestartBudget:
    """How often a rank may start again.

    Args:
        window_s: seconds after which a restart no longer counts; None if all of them do.
    """

    restarts_max: int
    window_s: float | None
    _times: list[float] = field(default_factory=list)

    def is_spent(self, now: float) -> bool:
        """Return whether no restart is allowed at this time, in seconds."""
        if self.window_s is not None:
            self._times = [time for time in self._times if now - time < self.window_s]
        return len(self._times) >= self.restarts_max

    def count(self, now: float) -> None:
        """Count a restart at this time."""
        self._times.append(now)


def pauses_s() -> Iterator[float]:
    """Yield the seconds between two health checks: twice as many each time, up to half a minute."""
    pause_s = PAUSE_S_MIN
    while pause_s < PAUSE_S_MAX:
        yield pause_s
        pause_s *= 2
    yield from repeat(PAUSE_S_MAX)
