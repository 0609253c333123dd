"""Which other replica groups cannot be reached from this one. Pure core of the search for broken links.

When a step does not get on, or fails, and no death explains it, a link may be broken: every member of the
quorum is probed. After a failed step the next join waits for the answers, so that the lighthouse knows before
it forms the next quorum. Whoever gives none is reported as unreachable, probed again every now and then, and
no longer reported once there is an answer. How one probes, and how long, is not known here.

Invariants:

* The join after a failed step waits only for probes that are under way, and no longer for a member once it
  is lost. Every other join waits for nothing.
* At most one probe is under way because of a step, and one because of what is unreachable.
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
        stalled_quorum_id: of the quorum in which a step does not get on, if that is why.
    """

    peers: tuple[tuple[str, str], ...]
    is_repeated: bool = False
    stalled_quorum_id: int | None = None


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
    _is_explained: bool = False  # whatever fails in the last quorum: a member of it died
    _asked: dict[str, str] = field(default_factory=dict)  # because of a step
    _has_failed: bool = False  # a step in the last quorum
    _is_watching: bool = False

    @property
    def is_unsettled(self) -> bool:
        """Whether the join has to wait."""
        return self._has_failed and bool(self._asked)

    def quorum_formed(self, members: Sequence[QuorumMemberLike]) -> None:
        """There is a quorum with this replica group."""
        self._members = members
        self._is_explained = self._has_failed = False

    def member_lost(self, replica_id: str) -> list[Probe]:
        """A member of the last quorum is gone. If it comes back, the link to it is no better for that."""
        self._is_explained = True
        self._asked.pop(replica_id, None)
        return []

    def step_failed(self) -> list[Probe]:
        """A step in the last quorum failed, and the next join is about to be said."""
        self._has_failed = not self._is_explained
        return self._ask(None)

    def step_stalled(self, quorum_id: int) -> list[Probe]:
        """A step in the last quorum, which is this one, takes longer than others have taken."""
        return self._ask(quorum_id)

    def _ask(self, stalled_quorum_id: int | None) -> list[Probe]:
        if self._is_explained or self._asked:
            return []
        known = {self.replica_id, *self.unreachable}
        self._asked = {m.replica_id: m.address for m in self._members if m.replica_id not in known}
        probe = Probe(tuple(self._asked.items()), stalled_quorum_id=stalled_quorum_id)
        return [probe] if self._asked else []

    def probed(self, probe: Probe, silent: Collection[str]) -> list[Probe]:
        """The answers are in: of all the probed but the `silent`."""
        for replica_id, address in probe.peers:
            was_asked = not probe.is_repeated and self._asked.pop(replica_id, None) is not None
            if replica_id not in silent:
                self.unreachable.pop(replica_id, None)
            elif was_asked:
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
