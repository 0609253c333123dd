"""Spare ranks, and the places that wait for one: whose process a rank's place is given to. It is pure.

A spare rank is a process that has imported what it needs, is healthy, and takes part in nothing. Where the
process of a rank has ended, the other ranks of its replica group ask for a spare, each of them for itself.
How they meet it is theirs (`torchft_like/core/restarts.py`): here it is only told where to go.

INVARIANT: a spare is told of one place at a time. A place is told to another spare only after the one before
has declined it or is gone, so a spare that still comes finds there that it is too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

PlaceKey = tuple[str, int]


class Vacancy(NamedTuple):
    """A rank's place whose process has ended.

    Attributes:
        group_id: the name of one start of a replica group.
        host: of the process that has ended, "" if it is not known.
        meeting: where its ranks meet, and after which try. The place may be vacant again after a later one.
        message: what the spare is told, as bytes; that of one rank may differ from that of another.
    """

    group_id: str
    group_rank: int
    host: str
    meeting: str
    message: bytes

    @property
    def key(self) -> PlaceKey:
        """What tells this place from any other."""
        return self.group_id, self.group_rank

    def is_as(self, other: Vacancy | None) -> bool:
        """Return whether the other is this place, vacant for the same time."""
        return other is not None and (self.key, self.meeting) == (other.key, other.meeting)


class Told(NamedTuple):
    """Decision: tell the spare of this session to take a place."""

    session: int
    spare_id: str
    vacancy: Vacancy


class Filled(NamedTuple):
    """Decision: answer these callers that a spare has taken the place."""

    callers: tuple[int, ...]
    spare_id: str
    vacancy: Vacancy


class NoSpare(NamedTuple):
    """Decision: answer these callers that there is none."""

    callers: tuple[int, ...]


Decision = Told | Filled | NoSpare


@dataclass(slots=True)
class SpareRank:
    """A process that waits for a place.

    Attributes:
        refused: the place that it declined last.
        told: the place that it was told.
    """

    session: int
    spare_id: str
    host: str
    refused: Vacancy | None = None
    told: Vacancy | None = None


@dataclass(slots=True)
class _Wanted:
    vacancy: Vacancy
    callers: dict[int, bool] = field(default_factory=dict)  # and whether they wait for a spare to come
    session: int | None = None  # of the spare that was told


class Vacancies:
    """The spare ranks in the order in which they came, and the places that are asked for."""

    def __init__(self) -> None:
        self._spares: dict[int, SpareRank] = {}
        self._wanted: dict[PlaceKey, _Wanted] = {}
        self._taken_of: Counter[str] = Counter()  # by host: spares of it that have taken a place

    def __len__(self) -> int:
        return len(self._spares)

    def __iter__(self) -> Iterator[SpareRank]:
        return iter(self._spares.values())

    def register(self, session: int, spare_id: str, host: str) -> list[Decision]:
        """Add a spare."""
        self._spares[session] = SpareRank(session, spare_id, host)
        return self._tell()

    def declined(self, session: int) -> list[Decision]:
        """Take a spare back that could not take its place, which may have been given to another one."""
        spare = self._spares.get(session)
        if spare is None or spare.told is None:
            return []
        spare.refused = spare.told
        self._free(spare)
        return self._tell()

    def lost(self, session: int) -> list[Decision]:
        """Forget a spare that is gone; its place is told to another one."""
        spare = self._spares.pop(session, None)
        if spare is None:
            return []
        self._free(spare)
        return self._tell()

    def taken(self, session: int) -> list[Decision]:
        """Forget a spare that has taken the place that it was told, if any."""
        spare = self._spares.pop(session, None)
        if spare is None or spare.told is None:
            return []
        self._taken_of[spare.host] += 1
        wanted = self._wanted.get(spare.told.key)
        if wanted is None or not wanted.vacancy.is_as(spare.told):  # it is vacant again
            filled = Filled((), spare.spare_id, spare.told)
            self._free(spare)
            return [filled, *self._tell()]
        del self._wanted[spare.told.key]
        return [Filled(tuple(wanted.callers), spare.spare_id, spare.told)]

    def ask(self, caller: int, vacancy: Vacancy, *, waits: bool) -> list[Decision]:
        """Ask for a spare; of several ranks that ask for the same place, the last one knows where it is."""
        wanted = self._wanted.setdefault(vacancy.key, _Wanted(vacancy, session=self._on_its_way(vacancy.key)))
        wanted.vacancy = vacancy
        wanted.callers[caller] = waits
        return self._tell()

    def withdraw(self, caller: int) -> None:
        """Forget a caller; a place for which no caller asks any more is given to no spare."""
        for key, wanted in list(self._wanted.items()):
            wanted.callers.pop(caller, None)
            if not wanted.callers:
                del self._wanted[key]

    def _free(self, spare: SpareRank) -> None:
        if spare.told is not None and (wanted := self._wanted.get(spare.told.key)) is not None:
            wanted.session = None
        spare.told = None

    def _tell(self) -> list[Decision]:
        """Tell spares of places, in the order in which these were asked for."""
        decisions: list[Decision] = []
        for wanted in list(self._wanted.values()):
            if wanted.session is not None:
                continue
            if (spare := self._best_for(wanted.vacancy)) is not None:
                spare.told, wanted.session = wanted.vacancy, spare.session
                decisions.append(Told(spare.session, spare.spare_id, wanted.vacancy))
            elif impatient := tuple(caller for caller, waits in wanted.callers.items() if not waits):
                decisions.append(NoSpare(impatient))
                for caller in impatient:
                    self.withdraw(caller)
        return decisions

    def _on_its_way(self, key: PlaceKey) -> int | None:
        """Return the session of the spare that was told of a place before the last caller withdrew."""
        told = (s.session for s in self._spares.values() if s.told is not None and s.told.key == key)
        return next(told, None)

    def _best_for(self, vacancy: Vacancy) -> SpareRank | None:
        """Return the first spare on the same host, or else of the host that has given the fewest.

        None is told twice of what it has declined, unless the others meet elsewhere by now.
        """
        free = [s for s in self._spares.values() if s.told is None and not vacancy.is_as(s.refused)]
        return min(free, key=lambda s: (s.host != vacancy.host, self._taken_of[s.host]), default=None)
