"""Which other replica groups cannot be reached from this one. Pure core of the search for broken links.

When a step does not get on, or fails, and no death explains it, a link may be broken: every member of the
quorum is probed. After a failed step the next join waits for the answers, so that the lighthouse knows before
it forms the next quorum. Whoever gives none is reported as unreachable, probed again every now and then, and
no longer reported once there is an answer. How one probes, and how long, is not known here.

Invariants:

* The join after a failed step waits only for a probe that is under way, and no longer for a member once it
  is lost. Every other join waits for nothing.
* Of at most one probe because of a step, and of one because of what is unreachable, the answers count. A step
  that succeeds contradicts the suspicion, and the answers to it count no more.
* What is kept is bounded, and of the members of the last quorum and of as many others as the
  lighthouse takes in a report. Who cannot reach so many is left out itself, whatever else it has to say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lighthouse.links import REPORTED_CHARACTERS_MAX, REPORTED_MAX
from torchft_like.manager.assignment import QuorumMemberLike


@dataclass(frozen=True)
class Probe:
    """Effect: find out which of these replica groups give no answer.

    Attributes:
        peers: replica id and address of each.
        is_repeated: they gave none before; ask after a while.
    """

    peers: tuple[tuple[str, str], ...]
    is_repeated: bool = False


@dataclass
class PeerLinks:
    """Events in, probes out.

    Attributes:
        replica_id: of this replica group.
        unreachable: address by replica id of whom to report.
    """

    replica_id: str
    unreachable: dict[str, str] = field(default_factory=dict)
    _members: Sequence[QuorumMemberLike] = ()  # of the last quorum
    _known: frozenset[str] = frozenset()  # to be unreachable when it was formed
    _lost: set[str] = field(default_factory=set)  # of the members: explains whatever fails in the last quorum
    _probe: Probe | None = None  # because of a step
    _asked: dict[str, str] = field(default_factory=dict)  # by it, and not lost since
    _has_failed: bool = False  # a step in the last quorum
    _is_watching: bool = False

    @property
    def is_unsettled(self) -> bool:
        """Whether the join has to wait."""
        return self._has_failed and bool(self._asked)

    def quorum_formed(self, members: Sequence[QuorumMemberLike]) -> None:
        """There is a quorum with this replica group."""
        self._members = members
        self._known = frozenset(self.unreachable)
        self._lost, self._has_failed = set(), False

    def members_out_of_reach(self, *, since_quorum: bool = False) -> list[str]:
        """The members of the last quorum that are unreachable, or those found to be since it was formed."""
        members = {member.replica_id for member in self._members} - (self._known if since_quorum else set())
        return [replica_id for replica_id in self.unreachable if replica_id in members]

    def member_lost(self, replica_id: str) -> list[Probe]:
        """A member of the last quorum is gone. If it comes back, the link to it is no better for that."""
        self._lost.add(replica_id)
        self._asked.pop(replica_id, None)
        return []

    def step_succeeded(self) -> None:
        """All members did what they had to: whoever was suspected in the step was not to blame."""
        self._probe, self._asked = None, {}

    def step_failed(self) -> list[Probe]:
        """A step in the last quorum failed, and the next join is about to be said."""
        self._has_failed = not self._lost
        return [] if self._lost else self._ask()

    def step_stalled(self) -> list[Probe]:
        """A step in the last quorum takes long, be it after a death: that ends no heal from a live member."""
        return self._ask()

    def _ask(self) -> list[Probe]:
        if self._asked:
            return []
        ids = [member.replica_id for member in self._members]
        own = ids.index(self.replica_id) if self.replica_id in ids else 0
        # Everybody begins with another one, or all would ask the same one at the same time.
        in_turn = [*self._members[own:], *self._members[:own]]
        settled = {self.replica_id, *self.unreachable, *self._lost}
        self._asked = {m.replica_id: m.address for m in in_turn if m.replica_id not in settled}
        self._probe = Probe(tuple(self._asked.items())) if self._asked else None
        return [self._probe] if self._probe else []

    def probed(self, probe: Probe, silent: Collection[str]) -> list[Probe]:
        """The answers are in: of all the probed but the `silent`."""
        asked: dict[str, str] = {}
        if probe is self._probe:
            asked, self._asked, self._probe = self._asked, {}, None
        for replica_id, address in probe.peers:
            if replica_id not in silent:
                self.unreachable.pop(replica_id, None)
                self._known -= {replica_id}
            elif replica_id in asked:
                self.unreachable[replica_id] = address
        for replica_id in _beyond_a_report(list(self.unreachable)):
            del self.unreachable[replica_id]
        self._is_watching = self._is_watching and not probe.is_repeated
        if self._is_watching or not self.unreachable:
            return []
        self._is_watching = True
        return [Probe(tuple(self.unreachable.items()), is_repeated=True)]


def _beyond_a_report(replica_ids: Sequence[str]) -> Sequence[str]:
    """The oldest, perhaps of hosts long gone: a report of all would end the session."""
    lengths = accumulate(map(len, reversed(replica_ids)))
    kept = sum(length <= REPORTED_CHARACTERS_MAX for length in lengths)
    return replica_ids[: len(replica_ids) - min(kept, REPORTED_MAX)]
