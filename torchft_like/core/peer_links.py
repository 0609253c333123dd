"""Which other replica groups cannot be reached from this one: the pure core of the search for broken links.

When a step stalls, or fails, and no death explains it, a link may be broken: every member of the quorum is
probed. After a failed step the next join waits for the answers, so that the lighthouse knows before it forms
the next quorum. A replica group that gives no answer is reported as unreachable and probed again from time to
time, and once it answers it is no longer reported. The host of a process that has ended refuses connections,
and a firewall may do so, too. So to refuse is an answer after one step that has failed: a group that has
ended is no member of the next quorum, and one behind a firewall is. When that fails, too, its group must
listen, unless its session with the lighthouse has ended since. This module does not know how a probe is done,
nor how long it takes.

Invariants:

* The join after a failed step waits only for the answers to a probe that is under way, and no longer for a
  member once it is lost. Where the quorum has a member that was out of reach before, as too few others would
  have stayed, the join waits until that one was probed again: another quorum would fail as fast. Every other
  join waits for nothing.
* The answers of at most one probe because of a step count, and of one because of unreachable groups. A step
  that succeeds contradicts the suspicion, and the answers to its probe count no more.
* What is kept is bounded: the members of the last quorum, and as many others as the lighthouse takes in a
  report. A group that cannot reach so many is left out itself, so the rest does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lighthouse.core.left_out import REPORTED_CHARACTERS_MAX, REPORTED_MAX
from torchft_like.core.assignment import QuorumMemberLike


@dataclass(frozen=True)
class Probe:
    """Effect: find out which of these replica groups give no answer.

    Attributes:
        peers: the replica id and the address of each.
        is_repeated: whether they gave no answer before, and are probed again after a pause.
        must_listen: those of which a refusal is no answer.
    """

    peers: tuple[tuple[str, str], ...]
    is_repeated: bool = False
    must_listen: frozenset[str] = frozenset()


@dataclass
class PeerLinks:
    """The state of the search: it takes events, and returns the probes to be done.

    Attributes:
        unreachable: the addresses of the groups to report, by replica id.
    """

    replica_id: str
    unreachable: dict[str, str] = field(default_factory=dict)
    _members: Sequence[QuorumMemberLike] = ()  # the members of the last quorum
    # Those of its members with which a step has failed in the one before it, and no death explained that.
    _failed_with: frozenset[str] = frozenset()
    _known: frozenset[str] = frozenset()  # the groups that were known to be unreachable when it was formed
    # Its members that were lost, which explains any failure in the last quorum.
    _lost: set[str] = field(default_factory=set)
    _probe: Probe | None = None  # the probe because of a step
    # The groups that it asked, and that have neither answered nor were lost since.
    _asked: dict[str, str] = field(default_factory=dict)
    _has_failed: bool = False  # whether a step in the last quorum failed
    _awaits_repeated: bool = (
        False  # whether it has a member that is probed again, and the join waits for that
    )
    _is_watching: bool = False
    _without_session: set[str] = field(default_factory=set)  # of the unreachable, and since they were found

    @property
    def is_unsettled(self) -> bool:
        """Whether the join has to wait for a probe."""
        return self._has_failed and (self._awaits_repeated or bool(self._asked))

    def quorum_formed(self, members: Sequence[QuorumMemberLike]) -> None:
        """Start anew with a quorum that contains this replica group.

        A member that serves at another address than before is another process: nothing is known of the way
        there.
        """
        before = {member.replica_id: member.address for member in self._members if self._has_failed}
        self._members = members
        at = {member.replica_id: member.address for member in members}
        self.unreachable = {
            i: address for i, address in self.unreachable.items() if at.get(i, address) == address
        }
        self._known = frozenset(self.unreachable)
        self._without_session -= at.keys()
        self._failed_with = frozenset(i for i, address in at.items() if before.get(i) == address)
        self._lost, self._has_failed = set(), False

    def members_out_of_reach(self, *, since_quorum: bool = False) -> list[str]:
        """Return the unreachable members of the last quorum, or those found so since it was formed."""
        members = {member.replica_id for member in self._members} - (self._known if since_quorum else set())
        return [replica_id for replica_id in self.unreachable if replica_id in members]

    def member_lost(self, replica_id: str) -> None:
        """Record the loss of a member. If it comes back, the link to it is no better for that."""
        self._lost.add(replica_id)
        self._asked.pop(replica_id, None)
        self._awaits_repeated = False

    def session_ended(self, replica_id: str) -> None:
        """Take it for an answer where the host of an unreachable group refuses from now on: it has ended."""
        self._without_session |= {replica_id} & self.unreachable.keys()

    def step_succeeded(self) -> None:
        """Drop the suspicion: all members did their part of the step."""
        self._probe, self._asked = None, {}

    def step_failed(self) -> list[Probe]:
        """Begin to probe after a failed step in the last quorum, before the next join is sent."""
        self._has_failed = not self._lost
        is_known = any(member.replica_id in self._known for member in self._members)
        self._awaits_repeated = self._is_watching and is_known
        return [] if self._lost else self._ask(self._failed_with)

    def step_stalled(self) -> list[Probe]:
        """Begin to probe as a step takes long, even after a death: that ends no heal from a live member."""
        return self._ask(frozenset(member.replica_id for member in self._members))

    def _ask(self, must_listen: frozenset[str]) -> list[Probe]:
        if self._asked:
            return []
        ids = [member.replica_id for member in self._members]
        own = ids.index(self.replica_id) if self.replica_id in ids else 0
        # Each group begins with another member, or all of them would ask the same one at the same time.
        in_turn = [*self._members[own:], *self._members[:own]]
        settled = {self.replica_id, *self.unreachable, *self._lost}
        self._asked = {m.replica_id: m.address for m in in_turn if m.replica_id not in settled}
        must_listen &= self._asked.keys()
        self._probe = Probe(tuple(self._asked.items()), must_listen=must_listen) if self._asked else None
        return [self._probe] if self._probe else []

    def answered(self, probe: Probe, replica_id: str) -> None:
        """Record an answer to a probe that goes on: it asks the host of one that is lost until it is over."""
        if probe is self._probe:
            self._asked.pop(replica_id, None)

    def probed(self, probe: Probe, silent: Collection[str]) -> list[Probe]:
        """Record that all of the probed groups but the `silent` ones have answered."""
        asked: dict[str, str] = {}
        if probe is self._probe:
            asked, self._asked, self._probe = self._asked, {}, None
        self._awaits_repeated = self._awaits_repeated and not probe.is_repeated
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
        self._without_session &= self.unreachable.keys()
        must_listen = frozenset(self.unreachable.keys() - self._without_session)
        return [Probe(tuple(self.unreachable.items()), True, must_listen)]


def _beyond_a_report(replica_ids: Sequence[str]) -> Sequence[str]:
    """Return the oldest ids that do not fit into a report: a report of all of them would end the session."""
    lengths = accumulate(map(len, reversed(replica_ids)))
    kept = sum(length <= REPORTED_CHARACTERS_MAX for length in lengths)
    return replica_ids[: len(replica_ids) - min(kept, REPORTED_MAX)]
