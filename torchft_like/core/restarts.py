"""Whether the ranks of a replica group run their training function again after an error, and how they meet
for it. Pure.

The ranks of a group start again together or not at all, so each says how its try has ended, and all of them
decide by the same rule from the same endings. What a rank sees of another one's end is an error, too: a lost
group, a broken connection of torch's own Gloo, a missing quorum. Such an error alone tells nothing.

For a rank whose process has ended, or that is not healthy, a spare may say that it has taken the place. What
the others saw is taken for the consequence.

They meet between two tries, though any process may end at any time. Every rank serves a store for as long as
its process lives; the kernel refuses connections to it afterwards, and that is how the others know. They meet
in the store of one of them, and in the next one's when it has ended:

    N/ended/R   how try N of rank R has ended. Rank R says it, or others say for it that its process has ended
    N/taken/R   which spare has taken the place of rank R, if that is vacant, or why none does
    N/store/... where the ranks of try N find each other

A process that answers nothing may be stopped, or its host gone, or cut off from here and alive. After a while
the others go on without it, if they are more than half, or half with the first of all: of two sides of a cut
one goes on at most. A process that was silent before it ended counts, as it may have been on the other side.
A process that was passed over so, and is back, finds what the others have said of it.

INVARIANT: what all have to agree upon is the value of one key of one store, and the first value stays. So a
rank may begin a meeting anew as often as it hears news.

Where the store has ended after some ranks have left the meeting, and before others have, the first come to
the next store with a later try. They leave word there in what would be the earlier meeting (MOVED), and the
others follow: no rank leaves a meeting before all have come to it.

Nothing is sent from here. A method that talks to stores is a generator of steps: its caller
(`in_process/meeting.py`, `tests/simulation/restarting.py`) carries out each, and sends the answer back. It
throws NewsError at a step that was interrupted by news of another rank, and now and then by none, so that a
process looks again which was away itself; and StoreLostError at one that failed.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from lighthouse.core.json_text import read_json
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


# -- how they meet

TELL_MAX = 3  # stores in which a rank that leaves for good says so
MOVED = "moved"
HAS_ENDED = "its process has ended"
_ENDINGS = {MOVED, *(ending.value for ending in Ending)}
WITHOUT = "the others have gone on without"

T = TypeVar("T")


class Open(NamedTuple):
    """Talk to the store at this address from now on; if `briefly`, only if it answers in a few seconds."""

    address: str
    briefly: bool = False


class Put(NamedTuple):
    """Set a key that has no value yet; answer with the value that it has then."""

    key: str
    value: str


class Write(NamedTuple):
    """Set a key, over the value that it may have."""

    key: str
    value: str


class Read(NamedTuple):
    """Wait until these keys, which the ranks set, or others for them, have values, and answer with them."""

    keys: Mapping[int, str]  # by rank


class Check(NamedTuple):
    """Answer whether all of these keys have values."""

    keys: list[str]


class Settle(NamedTuple):
    """Answer whether the process at this address, whose store has failed, has ended; that is known soon."""

    address: str


class Ask(NamedTuple):
    """Ask for a spare for the place of a process; `answered` is told why none comes."""

    lost: RankProcess
    meets_in: RankProcess
    attempt: int


Step = Open | Put | Write | Read | Check | Settle | Ask
Steps = Generator[Step, Any, T]


class NewsError(Exception):
    """There is news of another rank, or of a spare: what waits for either may wait for nothing."""


class StoreLostError(Exception):
    """A store does not answer, or not any more."""


@dataclass(frozen=True)
class Record:
    """What is said of a rank in a meeting, and where its process is; `ending` is an Ending or MOVED."""

    ending: str
    reason: str
    address: str = ""
    host: str = ""
    since: int = 0

    def text(self) -> str:
        """Return it as it stands in a store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, data: bytes) -> Record:
        """Return what stands in a store; a StoreLostError says that a rank has written something else."""
        try:
            said = read_json(data)
        except ValueError:
            said = None
        match said:
            case {
                "ending": str(ending),
                "reason": str(reason),
                "address": str(address),
                "host": str(host),
                "since": int(since),
            } if ending in _ENDINGS:
                return cls(ending, reason, address, host, since)
        raise StoreLostError(f"it holds no word of a rank, but {data!r:.100}: do all run the same version?")

    def process(self, rank: int) -> RankProcess:
        """Return the process of which this is said."""
        return RankProcess(rank, self.address, self.host, self.since)

    def told(self, rank: int) -> Told:
        """Return what is said, for people, too."""
        return Told(Ending(self.ending), f"rank {rank}: {self.reason}")

    @property
    def is_vacant(self) -> bool:
        """Whether a spare may take the place."""
        return self.ending in {ending.value for ending in VACANT}


_ADMITTED = Told(Ending.REPLACED, "a spare has taken the place")


class _MovedError(Exception):
    """The other ranks have left the meeting, and are in the next one."""


class MeetingProtocol:
    """What one rank, or a spare, does to meet the other ranks of a replica group.

    Args:
        own: this process.
        processes: those of all ranks, this one among them; only this one where it is a spare.
    """

    def __init__(self, own: RankProcess, processes: Iterable[RankProcess]) -> None:
        self.own = own
        self._processes = {process.rank: process for process in processes}
        self._gone: dict[int, str] = {}  # why a rank counts as ended
        self._silent: dict[int, str] = {}  # why it may have
        self._answered: set[int] = set()  # ranks that have answered since the last one fell silent
        self._passed_over: set[int] = set()  # those of the former that are so for silence
        # Those that have answered nothing since they were found silent: they may have passed this one over.
        self._unheard: set[int] = set()
        self._admission: Record | None = None  # of a spare
        self._is_in = True  # as all are but a spare on its way
        self._is_out = False  # the others have gone on without this process
        # By rank, try and the store in which they meet: why no spare comes, once that is known.
        self._asked: dict[tuple[int, int, str], str] = {}

    @property
    def processes(self) -> dict[int, RankProcess]:
        """The process of each rank."""
        return dict(self._processes)

    @property
    def others(self) -> list[RankProcess]:
        """The processes of the other ranks that are not known to have ended."""
        return [p for r, p in self._processes.items() if r != self.own.rank and r not in self._gone]

    def ended(self, process: RankProcess) -> bool:
        """Note that a process has ended; return False if it has no rank's place any more."""
        if self._processes.get(process.rank) != process:
            return False
        self._gone[process.rank] = HAS_ENDED
        self._passed_over.discard(process.rank)
        return True

    def silent(self, process: RankProcess, why: str) -> bool:
        """Note why a process may have ended, as it answers nothing, or "" where it does answer.

        All of the other side of a cut fall silent at once, and are found to be one after the other: so only
        those count as answering that have answered since. They answer again at once, too, when it is over: so
        once one does, the others have to be found silent anew.

        Returns:
            Whether the others go on without it, or without one that was silent before, from now on.
        """
        rank = process.rank
        if self._processes.get(rank) != process or rank in self._gone:
            return False
        if not why:
            if self._silent.pop(rank, None) is not None:
                self._silent.clear()
            self._answered.add(rank)
            self._unheard.discard(rank)
        elif rank not in self._silent:
            self._silent[rank] = why
            self._answered.clear()
            self._unheard.add(rank)
        voters = [p for p in self._in_order() if p.rank not in self._gone or p.rank in self._unheard]
        answer = [p for p in voters if p.rank in {*self._answered, self.own.rank} - self._passed_over]
        is_half = 2 * len(answer) == len(voters) and answer[0] == voters[0]
        if not self._silent or not (is_half or 2 * len(answer) > len(voters)):
            return False
        self._passed_over |= self._silent.keys()
        self._gone |= self._silent
        self._silent.clear()
        return True

    def answered(self, asked: Ask, reason: str) -> None:
        """Note why no spare comes that was asked for, "" if one has."""
        self._asked[_place(asked)] = reason

    def visit(self, store: str, world_size: int) -> Steps[None]:
        """Learn of the others, as a spare, where they meet after the try before its first one.

        Raises:
            GroupLostError: no rank serves that store any more, or the place is not vacant.
        """
        own = self.own
        keys = {rank: _ended(own.since - 1, rank) for rank in range(world_size)}
        try:
            yield Open(store, briefly=True)
            records = yield from _read(keys)
        except StoreLostError as error:
            raise GroupLostError(f"nobody meets there: {error}") from error
        if not records[own.rank].is_vacant:
            raise GroupLostError(f"rank {own.rank} is there: {records[own.rank].reason}")
        self._processes = {rank: record.process(rank) for rank, record in enumerate(records)}
        self._processes[own.rank] = own
        vacant = (rank for rank, record in enumerate(records) if record.is_vacant and rank != own.rank)
        self._gone = {rank: records[rank].reason for rank in vacant}
        self._admission, self._is_in = self._record(_ADMITTED), False

    def enter(self) -> Steps[int]:
        """Take the vacant place for which this spare has come, after a visit; return the number of its try.

        Raises:
            GroupLostError: another process has taken it, or the group does not go on.
        """
        attempt, told = yield from self.agree(self.own.since - 1, _ADMITTED)
        if not all_start_again(told):
            raise GroupLostError(f"the group does not go on: {why_not(told)}")
        self._is_in = True
        return attempt

    def say(self, attempt: int, told: Told) -> Steps[None]:
        """Say that this rank comes to no meeting after this try, nor to any other. Where the others have gone
        on without it, it says nothing: that would be the word of the process that has its place.
        """
        for host in self._hosts()[:TELL_MAX]:
            if self._is_out:
                return
            try:
                yield Open(host.address, briefly=True)
                yield from self._leave_word(attempt - 1)
                yield Put(_ended(attempt, self.own.rank), self._record(told).text())
            except (GroupLostError, NewsError, StoreLostError):
                continue

    def agree(self, attempt: int, told: Told) -> Steps[tuple[int, list[Told]]]:
        """Say how this rank's try has ended; return the number of the next, and what is said of all ranks.

        Raises:
            GroupLostError: the place of this rank was given away, or a rank says nothing within the limit.
        """
        self._asked.clear()
        while True:
            try:
                return (yield from self._meet(attempt, told))
            except _MovedError:
                attempt += 1

    def publish(self, attempt: int, value: str) -> Steps[None]:
        """Say, as rank 0, where the ranks of a try find each other.

        Raises:
            GroupLostError: the process of another rank has ended, or there is no store any more.
        """
        while True:
            host = self._hosts()[0]
            if lost := self._lost():
                raise GroupLostError(lost)
            try:
                yield Open(host.address)
                yield Write(self._try(attempt), value)
            except NewsError:
                continue
            except StoreLostError as error:
                raise GroupLostError(_lost_store(host, error)) from error
            return

    def find(self, attempt: int) -> Steps[str]:
        """Wait until rank 0 has said where the ranks of a try find each other, and return it.

        Raises:
            GroupLostError: the process of another rank has ended, or the limit has passed.
        """
        key = self._try(attempt)
        while True:
            host = self._hosts()[0]
            try:
                yield Open(host.address)
                lost = self._lost()
                if lost and not (yield Check([key])):  # else it has ended after it had come
                    raise GroupLostError(lost)
                (value,) = yield Read({0: key})
                return str(value, "utf-8", "backslashreplace")
            except NewsError:
                if not self._lost():
                    yield from self._ask_whether_passed_over(attempt)
            except StoreLostError as error:
                raise GroupLostError(_lost_store(host, error)) from error

    def has_returned(self, attempt: int, process: RankProcess) -> Steps[bool]:
        """Return whether a process, which has ended, had said before that its function has returned."""
        key = _ended(attempt, process.rank)
        for host in [each for each in self._hosts() if each != process][:TELL_MAX]:
            try:
                yield Open(host.address, briefly=True)
                if (yield Check([key])):
                    (said,) = yield from _read({process.rank: key})
                    return (said.ending, said.reason) == (RETURNED.ending.value, RETURNED.reason)
            except (NewsError, StoreLostError):
                continue
        return False

    # ----------------------------------------------------------------- one meeting

    def _meet(self, attempt: int, told: Told) -> Steps[tuple[int, list[Told]]]:
        while True:
            if self._hosts()[0] == self.own or self._passed_over:
                yield from self._ask_whether_passed_over(attempt)
            host = self._hosts()[0]  # another one may have ended meanwhile
            if host == self.own and not self._is_in:
                # Another spare on its way to this group may be as alone: they do not know each other.
                raise GroupLostError("all ranks that were there have ended")
            try:
                yield Open(host.address)
                return (yield from self._agree_in(host, attempt, told))
            except NewsError:
                continue
            except StoreLostError as error:
                failure = error
            if host.rank not in self._gone and (yield Settle(host.address)):
                self._gone[host.rank] = HAS_ENDED
            if host.rank not in self._gone:
                raise GroupLostError(f"the ranks of this group did not meet: {failure}") from failure

    def _ask_whether_passed_over(self, attempt: int) -> Steps[None]:
        """Look into the stores in which the others would meet without this process after this try, or have
        met after the last one: it may have left a meeting that they have begun anew without it.

        Raises:
            GroupLostError: they have gone on without it.
        """
        keys = [_ended(each, self.own.rank) for each in (attempt - 1, attempt) if each >= self.own.since]
        ended = {rank for rank in self._gone if rank not in self._passed_over}
        others = [each for each in self._in_order() if each != self.own and each.rank not in ended]
        for host in others[:TELL_MAX]:
            try:
                yield Open(host.address, briefly=True)
                for key in keys:
                    if (yield Check([key])):
                        (said,) = yield from _read({self.own.rank: key})
                        if said.address != self.own.address:
                            self._is_out = True
                            raise GroupLostError(f"{WITHOUT} rank {self.own.rank}: {said.reason}")
            except (NewsError, StoreLostError):
                continue

    def _agree_in(self, host: RankProcess, attempt: int, told: Told) -> Steps[tuple[int, list[Told]]]:
        yield from self._leave_word(attempt - 1)
        record = self._record(told)
        said = yield from _put(_ended(attempt, self.own.rank), record)
        if said != record:
            yield from self._take(attempt, said)
        for rank, why in sorted(self._gone.items()):
            yield Put(_ended(attempt, rank), Record(Ending.GONE.value, why).text())
        records = yield from _read({rank: _ended(attempt, rank) for rank in sorted(self._processes)})
        if any(record.ending == MOVED for record in records):
            raise _MovedError
        vacant = {rank: record for rank, record in enumerate(records) if record.is_vacant}
        if vacant and all(record.ending != Ending.LAST.value for record in records):
            taken = yield from self._fill(host, attempt, vacant)
            records = [taken.get(rank, record) for rank, record in enumerate(records)]
        self._admit(records)
        everybody = [each.told(rank) for rank, each in enumerate(records)]
        return attempt + 1, everybody

    def _leave_word(self, attempt: int) -> Steps[None]:
        """Tell those that may still be in an earlier meeting, in which this rank was, that it has left."""
        if attempt < max(self.own.since - 1, 0):
            return
        said = yield from _put(_ended(attempt, self.own.rank), self._say(MOVED))
        if said.address != self.own.address:
            yield from self._take(attempt, said)

    def _take(self, attempt: int, said: Record) -> Steps[None]:
        """Take the place of which this process is a spare, if it is vacant still."""
        if self._admission is not None and attempt == self.own.since - 1 and said.is_vacant:
            said = yield from _put(_taken(attempt, self.own.rank), self._admission)
        if said != self._admission:
            self._is_out = True
            raise GroupLostError(
                f"rank {self.own.rank} of this group is another process by now: {said.reason}"
            )

    def _fill(
        self, host: RankProcess, attempt: int, vacant: Mapping[int, Record]
    ) -> Steps[Mapping[int, Record]]:
        """Wait until every vacant place is taken, or is known not to be."""
        for rank, why in vacant.items():
            ask = Ask(self._processes[rank], host, attempt)
            if _place(ask) not in self._asked and rank != self.own.rank:
                self._asked[_place(ask)] = ""
                yield ask
            if reason := self._asked.get(_place(ask)):
                none = Record(Ending.GONE.value, f"{why.reason}, and {reason}")
                yield Put(_taken(attempt, rank), none.text())
        taken = yield from _read({rank: _taken(attempt, rank) for rank in vacant})
        return dict(zip(vacant, taken, strict=True))

    def _admit(self, records: Sequence[Record]) -> None:
        for rank, record in enumerate(records):
            if rank in self._passed_over and not record.is_vacant:  # it had come before
                self._gone.pop(rank)
                self._passed_over.discard(rank)
            if record.ending == Ending.REPLACED.value:
                self._processes[rank] = record.process(rank)
                self._gone.pop(rank, None)
                self._silent.pop(rank, None)
                self._unheard.discard(rank)
                self._passed_over.discard(rank)

    def _hosts(self) -> list[RankProcess]:
        """Return in whose stores the ranks meet: in the first one's, while its process lives.

        A spare comes after all others, and on its way after all spares that it finds there. Some ranks may
        have left the meeting in which it came, and know it, while others have not and look for another store:
        they agree on one that all of them knew before.
        """
        return [process for process in self._in_order() if process.rank not in self._gone]

    def _in_order(self) -> list[RankProcess]:
        return sorted(
            self._processes.values(), key=lambda p: (p == self.own and not self._is_in, p.since, p.rank)
        )

    def _try(self, attempt: int) -> str:
        """Return the key of a try, which only those know that have agreed upon the same processes.

        A spare has left the meeting in which it was admitted, and the store has ended before another rank
        has: that one may come with another spare in its place, to a try of the same number.
        """
        addresses = (process.address for _, process in sorted(self._processes.items()))
        return f"{attempt}/store/{' '.join(addresses)}"

    def _lost(self) -> str:
        return ", ".join(f"rank {rank}: {why}" for rank, why in sorted(self._gone.items()))

    def _record(self, told: Told) -> Record:
        return self._say(told.ending.value, told.reason)

    def _say(self, ending: str, reason: str = "") -> Record:
        return Record(ending, reason, self.own.address, self.own.host, self.own.since)


def _put(key: str, record: Record) -> Steps[Record]:
    return Record.read((yield Put(key, record.text())))


def _read(keys: Mapping[int, str]) -> Steps[list[Record]]:
    return [Record.read(value) for value in (yield Read(keys))]


def _place(asked: Ask) -> tuple[int, int, str]:
    return asked.lost.rank, asked.attempt, asked.meets_in.address


def _lost_store(host: RankProcess, error: Exception) -> str:
    return f"rank {host.rank}, in whose store the ranks meet: {error}"


def _ended(attempt: int, rank: int) -> str:
    return f"{attempt}/ended/{rank}"


def _taken(attempt: int, rank: int) -> str:
    return f"{attempt}/taken/{rank}"
