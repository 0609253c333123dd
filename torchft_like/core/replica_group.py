"""The replica group as one participant: the pure core of the ManagerServer.

Ranks ask for a quorum and vote on steps; the lighthouse knows only the group. This core gathers
the ranks' joins into one, turns the lighthouse's quorum into one result per rank, and their votes
into one verdict. Events in, effects out; it knows nothing of gRPC, threads or clocks.

Invariants:

* A join is open from the moment the last rank has joined until a quorum with this group answers
  it; it is told to the lighthouse again after every reconnect.
* A verdict is given once every rank has voted on the same step, and it is the same for all. A step that a
  rank has given up is committed by none.
* A rank takes the answer to its last request only (`StepProtocol.awaits`). So no two ranks are in different
  quorums: one that asked again before it could hear of the last quorum is in none, and has given that up.
* Once a rank is lost the group is lost: nothing is joined, answered or committed after that.
* While a rank is suspected, which answers again or is lost, the group is away from the lighthouse and commits
  nothing.
* In its sessions one process speaks for a rank, the first one, for as long as the group lives.
* The state of a group is that of all its ranks. Where some have healed and others have not, or one has a
  part of a peer's, it has none: it joins behind those that have yet to begin, and is lost if no other group
  can give it a state.
* The lighthouse knows which groups this one cannot reach before the join: after a failed step that no death
  explains, the join waits until the other members were probed (`peer_links.py`).
* A step that stalls is given up by a group that finds a member unreachable. It gives up at once, unless that
  was known when the quorum was formed: then no group could be left out for it, and another try is no better
  until others have come.
* Ranks leave together: the verdict tells all ranks that one was asked to stop, so none begins a step alone.
  Where that one has waited for a quorum in vain, the verdict comes to those that wait for it, too.
* A group that has said that it gives a quorum up commits nothing more in it, whatever its ranks vote then.
* All ranks ask for a quorum at the same step, or all go on in a quorum that stands
  (`lighthouse/core/quorum.py`): where one rank asks by itself, the others are told to hold, and the
  lighthouse names the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lighthouse.core.decisions import NO_STATE
from lighthouse.core.identity import Identity
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.state_form import CHARACTERS_MAX, StateForm, bounded
from torchft_like.core.assignment import QuorumMemberLike, QuorumResult, assign, none_if_empty
from torchft_like.core.peer_links import PeerLinks, Probe
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.core.state_comparison import combine


class RankJoin(NamedTuple):
    """One rank's request for a quorum."""

    group_rank: int
    step: int
    checkpoint_metadata: str
    shrink_only: bool = False
    init_sync: bool = True
    commit_failures: int = 0
    commit_quorum_id: int = 0
    fingerprint: bytes = b""
    broken_quorum_id: int = 0
    reconfigure_handle: str = ""
    may_stand: bool = False
    own_failure: str = ""
    own_failures: int = 0
    first_quorum_id: int = 0
    form: StateForm | None = None  # of its state, if that was looked at since its last join
    may_catch_up: bool = False  # `catch_up.py`, as are the rest
    reached_step: int = 0
    reached_quorum_id: int = 0
    has_fetched: bool = False
    takes_secret: bool = False  # of a quorum, to meet and heal with it
    request: int = 0  # counts those of this rank; 0 if it does not
    answered: int = 0  # the last one of these whose answer it has heard


class GroupJoin(NamedTuple):
    """Effect: tell the lighthouse that the whole group waits for a quorum."""

    step: int
    shrink_only: bool
    commit_failures: int
    commit_quorum_id: int
    fingerprint: bytes = b""
    broken_quorum_id: int = 0
    reconfigure_handles: tuple[str, ...] = ()  # by group rank; empty if no rank gave one
    may_stand: bool = False
    own_failure: str = ""  # of the rank that has failed most often by itself
    own_failures: int = 0
    may_catch_up: bool = False
    reached_step: int = 0
    reached_quorum_id: int = 0
    has_fetched: bool = False
    takes_secret: bool = False


class GroupIdentity(NamedTuple):
    """Effect: tell the lighthouse, before the join, the identity of this group."""

    identity: Identity


class GroupHolds(NamedTuple):
    """Effect: tell the lighthouse the first step that no rank has begun; none does until it is told more."""

    quorum_id: int
    round: int
    step: int
    gives_up: bool = False  # instead: no rank commits a step in this quorum any more


class BrokenLinks(NamedTuple):
    """Effect: tell the lighthouse which replica groups, all of them, cannot be reached."""

    unreachable: tuple[str, ...]


class RankQuorum(NamedTuple):
    """Effect: answer a rank's join."""

    group_rank: int
    result: QuorumResult


class Verdict(NamedTuple):
    """The group's decision on a step, the same for every rank.

    Attributes:
        stop: whether a rank was asked to stop: all leave after this step, none a step later than another.
        passed: whether all ranks, which catch up, keep the step and take it again later.
        has_fetched: whether all ranks have the state that they fetch for that.
        went_well: in a vote, whether nothing went wrong in the step: where it is only too few replica groups
          that took part, a no releases no other rank, as none waits for what has failed.
    """

    step: int
    committed: bool
    stop: bool = False
    passed: bool = False
    has_fetched: bool = False
    went_well: bool = False


class HoldRanks(NamedTuple):
    """Effect: tell these ranks to begin no further step in this quorum, and to say the first not begun."""

    group_ranks: tuple[int, ...]
    quorum_id: int


class ReleaseRanks(NamedTuple):
    """Effect: tell these ranks to go on, and to ask for a quorum at this step; with None, when told to."""

    group_ranks: tuple[int, ...]
    quorum_id: int
    ask_at: int | None


class RankVerdict(NamedTuple):
    """Effect: answer a rank's vote."""

    group_rank: int
    verdict: Verdict


class LossNotice(NamedTuple):
    """Effect: tell every rank that a member of the current quorum is gone or, alive, gave it up.

    Attributes:
        unknown: fields of the lighthouse's message that this version does not know.
        must_fail: whether the step is not to be committed, even if all of its collectives have succeeded.
        unreachable: the members that this group cannot reach, where it gives the quorum up for that.
    """

    quorum_id: int
    replica_id: str
    reason: str
    is_alive: bool = False
    unknown: bytes = b""
    must_fail: bool = False
    unreachable: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe which member it is, and why."""
        return f"{'given up by' if self.is_alive else 'lost'} {self.replica_id}: {self.reason}"


class LeftOutNotice(NamedTuple):
    """Effect: tell every rank that a quorum leaves this group out: it and these groups cannot reach each
    other, or it spoils quorums by itself, as the reason says.
    """

    quorum_id: int
    replica_id: str
    unreachable_replica_ids: tuple[str, ...]
    reason: str = ""
    unknown: bytes = b""  # as in LossNotice


class StepLostNotice(NamedTuple):
    """Effect: tell the ranks that have not voted that the step in this quorum will not be committed.

    Each of them may wait for a rank of another group that waits for a rank of this group, which has given up.
    The steps of ranks may differ in number, if one rank has healed and another could not.
    """

    group_ranks: tuple[int, ...]
    quorum_id: int


class SuspectNotice(NamedTuple):
    """Effect: tell every rank that one of them is silent; without a reason, that it answers again."""

    group_rank: int
    reason: str


class GroupAway(NamedTuple):
    """Effect: end the session with the lighthouse without a leave, until the group `is_back`."""

    is_back: bool


class GroupLeftNotice(NamedTuple):
    """Effect: tell the ranks that have begun another step that they cannot do it without the others.

    The lighthouse is not told: the group may be about to leave it in good order.
    """

    group_ranks: tuple[int, ...]
    reason: str
    is_foreign: bool = False


class GroupLostNotice(NamedTuple):
    """Effect: tell every rank, and end the session with the lighthouse without a leave.

    Attributes:
        is_foreign: whether the lighthouse has refused this group, as it is not of the job.
    """

    reason: str
    is_foreign: bool = False


ToRank = (
    RankQuorum
    | RankVerdict
    | HoldRanks
    | ReleaseRanks
    | LossNotice
    | LeftOutNotice
    | StepLostNotice
    | SuspectNotice
    | GroupLeftNotice
    | GroupLostNotice
)
Effect = ToRank | GroupJoin | GroupIdentity | GroupHolds | BrokenLinks | Probe | GroupAway


@dataclass
class ReplicaGroup:
    """The state of one replica group of `world_size` ranks.

    Attributes:
        waits_for_lighthouse: whether ranks go on in a quorum that stands only while there is a lighthouse.
        job_id: the name of the job, "" if none was given.
        protocol: the number of what it says to other groups (`Identity`).
        lost_reason: why this group cannot go on, if so.
        is_foreign: whether it cannot since it is not of the lighthouse's job.
    """

    replica_id: str
    world_size: int
    waits_for_lighthouse: bool = False
    job_id: str = ""
    protocol: int = 0
    lost_reason: str | None = None
    is_foreign: bool = False
    last_quorum_id: int = 0
    last_quorum_round: int = 0
    last_quorum_replica_ids: tuple[str, ...] = ()
    last_quorum_stands: bool = False
    _held: dict[int, int] | None = None  # by rank: the first step that it has not begun, while all hold
    _to_answer: Counter[int] = field(default_factory=Counter)  # by rank: requests to hold without an answer
    _is_released: bool = False  # the ranks know the step at which they ask
    _is_alone: bool = False  # it waits for the lighthouse, with which it has no session
    _is_over: bool = False  # a member is gone, or gave the last quorum up
    _is_leaving: bool = False  # a rank was asked to stop, and waits for no quorum any more
    _is_given_up: bool = False  # the lighthouse knows that this group commits nothing more in it
    _unmet_quorum_id: int = 0  # of a later one, whose other members wait for this group in vain
    _joins: dict[int, RankJoin] = field(default_factory=dict)
    _answered: dict[int, int] = field(default_factory=dict)  # by rank: the last request that was answered
    _open_join: GroupJoin | None = None
    _forms: dict[int, StateForm] = field(default_factory=dict)  # by rank, as it was last looked at
    _has_new_forms: bool = False
    _identity: Identity = field(default_factory=Identity)  # as the lighthouse knows it
    _is_torn: bool = False
    _links: PeerLinks = field(init=False)
    _votes: dict[int, Verdict] = field(default_factory=dict)
    _metadata: dict[int, str] = field(default_factory=dict)
    # By rank: the one that speaks for it in sessions.
    _processes: dict[int, bytes] = field(default_factory=dict)
    _suspects: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._links = PeerLinks(self.replica_id)

    def rank_joined(self, join: RankJoin) -> list[Effect]:
        """Handle a rank's request for a quorum; the last rank's makes the group's join."""
        if self.lost_reason is not None:
            return [GroupLeftNotice((join.group_rank,), self.lost_reason, self.is_foreign)]
        if self._is_leaving:
            return [_stops(join.group_rank, join.step)]
        join = self._joins[join.group_rank] = self._with_what_it_missed(join)
        if join.form is not None:
            self._forms[join.group_rank] = join.form
            self._has_new_forms = True
        self._metadata[join.group_rank] = join.checkpoint_metadata
        if len(self._joins) < self.world_size:
            return [*self._refuse_votes(), *self._release_others(join), *self._hold_others()]
        self._held = None
        joins = [join for _, join in sorted(self._joins.items())]
        versions = {(j.step, j.commit_quorum_id) for j in joins}
        self._is_torn = len(versions) > 1 or any(j.commit_quorum_id == NO_STATE for j in joins)
        step, commit_quorum_id = (0, NO_STATE) if self._is_torn else versions.pop()
        reached = {(j.reached_step, j.reached_quorum_id) for j in joins}
        reached_step, reached_quorum_id = reached.pop() if len(reached) == 1 else (0, 0)
        worst = max(joins, key=lambda j: (bool(j.own_failure), j.own_failures))
        whose = f"rank {worst.group_rank}: " if worst.own_failure and self.world_size > 1 else ""
        self._open_join = GroupJoin(
            step=step,
            shrink_only=any(j.shrink_only for j in joins),
            commit_failures=max([j.commit_failures for j in joins]),
            commit_quorum_id=commit_quorum_id,
            fingerprint=combine([j.fingerprint for j in joins]),
            broken_quorum_id=max([self._unmet_quorum_id, *(j.broken_quorum_id for j in joins)]),
            reconfigure_handles=none_if_empty([j.reconfigure_handle for j in joins]),
            may_stand=all(j.may_stand for j in joins),
            own_failure=whose + worst.own_failure,
            own_failures=worst.own_failures,
            takes_secret=all(j.takes_secret for j in joins),
            may_catch_up=not self._is_torn and all(j.may_catch_up for j in joins),
            reached_step=reached_step,
            reached_quorum_id=reached_quorum_id,
            has_fetched=all(j.has_fetched for j in joins),
        )
        before, self._identity = self._identity, self._identify(joins)
        identity = [GroupIdentity(self._identity)] if self._identity != before else []
        if self._open_join.commit_failures == 0:
            self._links.step_succeeded()
            return [*identity, *self._say_join()]
        return [*identity, *self._links.step_failed(), *self._say_join()]

    def _with_what_it_missed(self, join: RankJoin) -> RankJoin:
        """Return the join of a rank that has not heard of the last quorum as that of one which has given it
        up: it asked again before the answer to its last request came, and takes none that comes now.
        """
        if join.answered >= self._answered.get(join.group_rank, 0):
            return join
        failures = max(join.commit_failures, 1)
        return join._replace(broken_quorum_id=self.last_quorum_id, commit_failures=failures)

    def _identify(self, joins: Sequence[RankJoin]) -> Identity:
        forms = self._identity.forms
        if self._has_new_forms and len(self._forms) == self.world_size:
            self._has_new_forms = False
            room = CHARACTERS_MAX // len({form.digest for form in self._forms.values()})
            forms = tuple(bounded(form, room) for _, form in sorted(self._forms.items()))
        return Identity(self.job_id, min(j.first_quorum_id for j in joins), forms, self.protocol)

    def _release_others(self, join: RankJoin) -> list[StepLostNotice]:
        """Release the other ranks from a step that this one has given up, perhaps without a vote; the first
        rank that says so is enough. After the alarm for a member they need no release, and have lost no step.
        """
        broken = [j for j in self._joins.values() if 0 < j.broken_quorum_id == self.last_quorum_id]
        is_news = broken == [join] and not self._is_over
        return [StepLostNotice(self._not_joined(), self.last_quorum_id)] if is_news else []

    def _say_join(self) -> list[GroupJoin]:
        return [] if self._open_join is None or self._links.is_unsettled else [self._open_join]

    def rank_registered(self, group_rank: int, process: bytes) -> bool:
        """Return whether this process may open a session for a rank: the first one may, again and again."""
        return self.lost_reason is None and self._processes.setdefault(group_rank, process) == process

    def has_session(self, group_rank: int) -> bool:
        """Return whether a process has opened a session for a rank, which needs no calls."""
        return group_rank in self._processes

    def why_unasked(self, group_rank: int) -> str:
        """Return why this rank gets no quorum, if other ranks of the group are why."""
        awaited = self._not_joined()
        if group_rank in awaited or not awaited:
            return ""
        late = f"{_ranks(awaited)} of this replica group did not ask for one: a longer step, or a hang"
        return self._absent() or f"{late}, of which py-spy shows the place"

    def _absent(self) -> str:
        absent = [rank for rank in self._not_joined() if rank not in self._processes]
        if not absent or self.last_quorum_id:  # in a quorum all of them have been
            return ""
        return (
            f"{_ranks(absent)} of this replica group did not come: start all {self.world_size} of its ranks "
            "(WORLD_SIZE), with one MASTER_ADDR and MASTER_PORT; where they were started their logs say more"
        )

    def rank_withdrew(self, group_rank: int) -> None:
        """Handle a rank that gave up waiting for a quorum; the group's join stays open until replaced."""
        self._joins.pop(group_rank, None)

    def lighthouse_connected(self) -> list[Effect]:
        """Handle a new session with the lighthouse, which knows nothing of what was sent before."""
        self._is_alone = False
        unreachable = tuple(self._links.unreachable)
        report: list[Effect] = [BrokenLinks(unreachable)] if unreachable else []
        if self._identity != Identity():
            report.insert(0, GroupIdentity(self._identity))
        going_on = self._go_on()
        return [*report, *going_on, *self._say_join(), *(self._hold_others() if self._joins else [])]

    def lighthouse_disconnected(self) -> list[Effect]:
        """Handle the end of the session: ranks that hold would not hear when they may go on."""
        if self.waits_for_lighthouse:
            self._is_alone = True
            return self.hold(self.last_quorum_id, self.last_quorum_round) or self._all_hold()
        return self._go_on()

    def lease_ended(self) -> list[Effect]:
        """Handle the end of the time for which members go on without a word from the lighthouse: it counts on
        it that they commit nothing more.
        """
        number = self.last_quorum_id, self.last_quorum_round
        if not self._is_standing(*number) or self._open_join is not None:
            return []
        reason = "the lighthouse is silent for too long (--standing_lease_ms): it may form a quorum of others"
        self._is_given_up = True
        return [self._give_up_for(reason)._replace(must_fail=True)]

    def _go_on(self) -> list[Effect]:
        if self._held is None or self._is_over:  # then the group itself names the step
            return []
        self._held = None
        return [ReleaseRanks(self._not_joined(), self.last_quorum_id, None)]

    # -- a quorum that stands

    def hold(self, quorum_id: int, round_number: int) -> list[Effect]:
        """Handle the lighthouse's request to begin no further step in the quorum that stands."""
        if not self._is_standing(quorum_id, round_number) or self._open_join is not None:
            return []  # it has asked already: that is its answer
        if self._held is not None:
            return []
        self._is_released = False  # the lighthouse does not know of it: it was restarted, or a member is gone
        self._held = {rank: join.step for rank, join in self._joins.items()}
        others = self._not_joined()
        self._to_answer.update(others)
        return [HoldRanks(others, quorum_id)]

    def rank_holds(self, group_rank: int, quorum_id: int, step: int) -> list[Effect]:
        """Handle a rank that has not begun this step, and does not until it is told more.

        A rank answers each request to hold in turn. One that was told to go on may have begun a step since an
        earlier answer, so only the answer to the last request counts.
        """
        self._to_answer[group_rank] -= 1
        is_early = self._to_answer[group_rank] > 0
        if is_early or self._held is None or quorum_id != self.last_quorum_id:
            return []
        self._held[group_rank] = step
        return self._all_hold()

    def released(self, quorum_id: int, round_number: int, ask_at: int) -> list[Effect]:
        """Handle the step at which all members of the quorum ask for the next one."""
        is_late = self._is_released or self._open_join is not None
        if is_late or not self._is_standing(quorum_id, round_number):
            return []
        self._is_released = True
        effects = self._told_to_ask_at(ask_at) or [ReleaseRanks(self._not_joined(), quorum_id, ask_at)]
        self._held = None
        return effects

    def _all_hold(self) -> list[Effect]:
        """Go on once all ranks hold: the lighthouse names the step or, if the quorum is over, the group.

        So does the group without a lighthouse if ranks have begun a step before which others hold: they wait
        for the votes of those.
        """
        if self._held is None or len(self._held) < self.world_size:
            return []
        number = self.last_quorum_id, self.last_quorum_round
        step = max([self._held[rank] for rank in self._not_joined()])  # one at least, or the group would join
        if self._is_over or (self._is_alone and len({*self._held.values()}) > 1):
            return self.released(*number, step)
        return self._told_to_ask_at(step) or [GroupHolds(*number, step)]

    def _is_standing(self, quorum_id: int, round_number: int) -> bool:
        is_last = (quorum_id, round_number) == (self.last_quorum_id, self.last_quorum_round)
        return is_last and self.last_quorum_stands and self.lost_reason is None

    def _hold_others(self) -> list[Effect]:
        """Tell the other ranks to hold: one asks for a quorum, and not as all do after a failed step."""
        has_failed = any(join.commit_failures for join in self._joins.values())
        if has_failed or not self.last_quorum_stands or self._is_released or self.lost_reason is not None:
            return []
        if self._held is not None:
            self._held.update({rank: join.step for rank, join in self._joins.items()})
            return self._all_hold()
        return self.hold(self.last_quorum_id, self.last_quorum_round)

    def _told_to_ask_at(self, step: int) -> list[Effect]:
        """Give the quorum up if a rank has asked for an earlier step, which others have begun, or for a later
        one, with a state that it loaded; those that hold fail it.
        """
        apart = [rank for rank, join in self._joins.items() if join.step != step]
        if not apart:
            return []
        self._held = None
        given_up = self._give_up_for(f"rank {apart[0]} asks for a quorum, and others go on")
        return [given_up, ReleaseRanks(self._not_joined(), self.last_quorum_id, None)]

    def _not_joined(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self._joins)

    def quorum_formed(
        self,
        quorum_id: int,
        participants: Sequence[QuorumMemberLike],
        round_number: int,
        stands: bool = False,
        first_quorum_id: int = 0,
        secret: bytes = b"",
    ) -> list[Effect]:
        """Handle a quorum of the lighthouse; the round is 0 for torchft's, which does not count rounds."""
        replica_ids = tuple(sorted([member.replica_id for member in participants]))
        own = next((member for member in participants if member.replica_id == self.replica_id), None)
        if own is None:
            return []
        number = QuorumNumber(quorum_id, round_number)
        if self._open_join is None or not _answers(number, own, self._open_join):
            return self._meet_nobody(number)
        self._unmet_quorum_id = 0
        joins, self._joins, self._open_join = self._joins, {}, None
        self._answered.update({rank: join.request for rank, join in joins.items()})
        self._votes = {}  # from ranks that had withdrawn their joins: they are of an earlier quorum
        self.last_quorum_id, self.last_quorum_replica_ids = quorum_id, replica_ids
        self._held, self._is_released, self._is_over, self._is_given_up = None, False, False, False
        before = tuple(self._links.unreachable)
        self._links.quorum_formed(participants)
        unreachable = tuple(self._links.unreachable)
        # The lighthouse has forgotten one that is a member nevertheless, or too few others would have stayed.
        is_told = unreachable == before and not self._links.members_out_of_reach()
        report = [] if is_told else [BrokenLinks(unreachable)]
        parts = [
            (rank, assign(quorum_id, participants, self.replica_id, rank, join.init_sync))
            for rank, join in sorted(joins.items())
        ]
        # One may heal although all say that they hold the same state: if their fingerprints differ.
        stands = stands and not any(part.healing_replica_ids for _, part in parts)
        self.last_quorum_round, self.last_quorum_stands = round_number, stands
        of_all: dict[str, Any] = {
            "stands": stands,
            "first_quorum_id": first_quorum_id,
            "secret": QuorumSecret(secret),
        }
        answers = [
            RankQuorum(rank, part._replace(**of_all, request=joins[rank].request)) for rank, part in parts
        ]
        if self._is_torn and not all(answer.result.heal for answer in answers):
            return [
                *self._lose(
                    f"the ranks of replica group {self.replica_id} hold states of different steps, or a part "
                    "of a peer's, and no replica group has a state that they could take over: if they began "
                    "from a checkpoint, let all of them take one of the same committed step"
                )
            ]
        return [*answers, *report]

    def _meet_nobody(self, number: QuorumNumber) -> list[Effect]:
        """Have the other members told not to wait in a quorum that answers an earlier request than the last
        one: a rank may have asked again, as its time was up, before it could hear of the answer to the first.

        The quorum in which the ranks are is over then: the lighthouse tells no more who is lost in it.
        """
        if number == (self.last_quorum_id, self.last_quorum_round):
            return []
        self._unmet_quorum_id = number.quorum_id
        if self._open_join is None:  # the next join says so
            reason = f"the lighthouse has formed quorum {number.quorum_id} with this replica group meanwhile"
            last = self.last_quorum_id
            return self.member_lost(last, self.replica_id, reason, is_alive=True) if last else []
        self._open_join = self._open_join._replace(broken_quorum_id=number.quorum_id)
        return [*self._say_join()]

    def member_lost(
        self,
        quorum_id: int,
        replica_id: str,
        reason: str,
        is_alive: bool = False,
        unknown: bytes = b"",
        must_answer: bool = False,
    ) -> list[Effect]:
        """Handle the lighthouse's alarm that a member of a quorum is gone, or, alive, has given the quorum
        up.

        If this group is that member, it was away, and is alive. Where it `must_answer`, others wait until it
        says that it commits nothing more in the quorum: a rank may hang, and the group answers for it.
        """
        if not is_alive:
            self._links.session_ended(replica_id)
        if quorum_id != self.last_quorum_id:
            return []
        is_own = replica_id == self.replica_id
        gives_up = is_own and must_answer and self._open_join is None and self.lost_reason is None
        notice = LossNotice(quorum_id, replica_id, reason, is_alive or is_own, unknown, gives_up)
        hold = self._end_quorum()
        if gives_up:
            self._is_given_up = True
            return [notice, *hold, GroupHolds(quorum_id, self.last_quorum_round, 0, gives_up=True)]
        if is_alive:  # it may have given the quorum up for a broken link
            return [notice, *hold]
        return [notice, *hold, *self._settle(lambda: self._links.member_lost(replica_id))]

    def _end_quorum(self) -> list[Effect]:
        """Have all ranks ask for the next quorum at one step, which those yet to begin it need not lose."""
        self._is_over = True
        return self.hold(self.last_quorum_id, self.last_quorum_round) or self._all_hold()

    def step_stalled(self, quorum_id: int, *, for_long: bool = False) -> list[Effect]:
        """Handle a step in a quorum that waits for other replica groups, and has for longer than earlier
        steps did.

        Args:
            for_long: whether it has waited for longer than most network cuts last.
        """
        is_current = quorum_id == self.last_quorum_id and self._open_join is None
        if not is_current or self.lost_reason is not None:
            return []
        if for_long and (out_of_reach := self._links.members_out_of_reach()):
            return [self._give_up(out_of_reach)]
        return [*self._links.step_stalled()]

    def step_overdue(self, quorum_id: int, join_timeout_s: float) -> list[Effect]:
        """Handle a step in the quorum that stands which has waited for other replica groups for the time that
        the lighthouse waits for one to join: one has perhaps not begun it.
        """
        if not self._is_standing(quorum_id, self.last_quorum_round) or self._open_join is not None:
            return []
        reason = f"it waits for longer than join_timeout, {join_timeout_s:g} s, for a member in this step"
        return [self._give_up_for(reason)]

    def answered(self, probe: Probe, replica_id: str) -> Sequence[Effect]:
        """Handle an answer to a probe that goes on: the join may have waited for it alone."""
        return self._settle(lambda: self._links.answered(probe, replica_id))

    def _settle(self, change: Callable[[], None]) -> list[GroupJoin]:
        """Record news of the links; return the join, if it has waited for that."""
        was_unsettled = self._links.is_unsettled
        change()
        return self._say_join() if was_unsettled else []

    def probed(self, probe: Probe, silent: Collection[str]) -> list[Effect]:
        """Handle the end of a probe: all replica groups but the `silent` ones have answered."""
        was_unsettled, before = self._links.is_unsettled, tuple(self._links.unreachable)
        probes = self._links.probed(probe, silent)
        if self.lost_reason is not None:
            return []
        unreachable = tuple(self._links.unreachable)
        report = [BrokenLinks(unreachable)] if unreachable != before else []
        effects: list[Effect] = [*report, *probes, *(self._say_join() if was_unsettled else [])]
        out_of_reach = self._links.members_out_of_reach(since_quorum=True)
        if not out_of_reach or self._open_join is not None:
            return effects
        return [*effects, self._give_up(out_of_reach)]

    def _give_up(self, out_of_reach: Sequence[str]) -> LossNotice:
        """Give the quorum up; the join that follows tells the other replica groups."""
        names = ", ".join(out_of_reach)
        notice = self._give_up_for(f"it waits, and cannot reach {names}; check the network between them")
        return notice._replace(unreachable=tuple(out_of_reach))

    def _give_up_for(self, reason: str) -> LossNotice:
        return LossNotice(self.last_quorum_id, self.replica_id, reason, is_alive=True)

    def left_out(
        self, quorum_id: int, unreachable: Sequence[str], reason: str = "", unknown: bytes = b""
    ) -> list[Effect]:
        """Handle a quorum without this group, for links that do not work or a reason; its join stays open."""
        if self._open_join is None:
            return []
        return [LeftOutNotice(quorum_id, self.replica_id, tuple(unreachable), reason, unknown)]

    def rank_voted(self, group_rank: int, vote: Verdict) -> list[Effect]:
        """Handle a rank's vote on a step: the verdict that it wants."""
        if self.lost_reason is not None:
            return [GroupLeftNotice((group_rank,), self.lost_reason, self.is_foreign)]
        was_lost = any(_says_lost(other) for other in self._votes.values())
        self._votes[group_rank] = vote
        if vote.stop and group_rank in self._joins:
            return self._leave()
        if self._joins or self._suspects or self._is_leaving:
            return self._refuse_votes()
        if len(self._votes) < self.world_size:
            is_news = _says_lost(vote) and not was_lost
            others = tuple(rank for rank in range(self.world_size) if rank not in self._votes)
            return [StepLostNotice(others, self.last_quorum_id)] if is_news else []
        votes, self._votes = self._votes, {}
        same_step = len({vote.step for vote in votes.values()}) == 1 and not self._is_given_up
        common = Verdict(
            step=0,
            committed=same_step and all(vote.committed for vote in votes.values()),
            stop=any(vote.stop for vote in votes.values()),
            passed=same_step and all(vote.passed for vote in votes.values()),
            has_fetched=all(vote.has_fetched for vote in votes.values()),
        )
        return [RankVerdict(rank, common._replace(step=vote.step)) for rank, vote in sorted(votes.items())]

    def _refuse_votes(self) -> list[Effect]:
        """Answer the votes on a step that another rank has given up, or that waits for a suspect."""
        votes, self._votes = self._votes, {}
        refused = Verdict(0, False, stop=self._is_leaving)
        return [RankVerdict(rank, refused._replace(step=vote.step)) for rank, vote in sorted(votes.items())]

    def _leave(self) -> list[Effect]:
        """Have all ranks leave without a quorum, for which one that was asked to stop has waited in vain.

        Those that have yet to begin that step are told now: by then the one that was asked may be gone.
        """
        self._is_leaving = True
        steps = dict.fromkeys(range(self.world_size), max(join.step for join in self._joins.values()))
        steps |= self._held or {}  # by rank: the next step, which some of them have yet to begin
        steps |= {rank: join.step for rank, join in self._joins.items()}
        steps |= {rank: vote.step for rank, vote in self._votes.items()}
        self._held, self._joins, self._open_join, self._votes = None, {}, None, {}
        away = [] if self._suspects else [GroupAway(is_back=False)]
        return [*away, *[_stops(rank, step) for rank, step in steps.items()]]

    def rank_left(self, group_rank: int, reason: str) -> list[Effect]:
        """Handle a rank that has left between two steps, and with it the group."""
        waits = self._joins.keys() | self._votes.keys()
        going_on = self._go_on()
        if self._held is not None:  # the quorum is over, and no step will be named for those that hold
            waits |= {*self._not_joined()} - {group_rank}
        waiting = tuple(sorted(waits))
        notices = self._lose(f"rank {group_rank} of replica group {self.replica_id} has left: {reason}")
        return [*going_on, *[GroupLeftNotice(waiting, notice.reason) for notice in notices]]

    def rank_suspected(self, group_rank: int, reason: str) -> list[Effect]:
        """Handle a rank that is silent: no replica group waits for it, and no other rank for a verdict."""
        if self.lost_reason is not None:
            return []
        was_away, self._suspects = bool(self._suspects), self._suspects | {group_rank}
        away = [] if was_away else [GroupAway(is_back=False)]
        notice = SuspectNotice(group_rank, f"rank {group_rank} of this replica group is silent: {reason}")
        return [*away, notice, *self._refuse_votes(), *self._end_quorum()]

    def rank_resumed(self, group_rank: int) -> list[Effect]:
        """Handle a suspect that answers again."""
        if group_rank not in self._suspects or self.lost_reason is not None:
            return []
        self._suspects -= {group_rank}
        back = [] if self._suspects or self._is_leaving else [GroupAway(is_back=True)]
        return [SuspectNotice(group_rank, ""), *back]

    def rank_lost(self, group_rank: int, reason: str) -> Sequence[Effect]:
        """Handle a rank whose process is gone, and with it its part of the model."""
        absent = f"; {absent}" if (absent := self._absent()) else ""  # which it may have waited for in vain
        return self._lose(f"rank {group_rank} of replica group {self.replica_id} is gone: {reason}{absent}")

    def refused(self, reason: str) -> Sequence[Effect]:
        """Handle the lighthouse's refusal of this group, which is foreign to the job of the others."""
        self.is_foreign = self.is_foreign or self.lost_reason is None
        return self._lose(
            f"replica group {self.replica_id} is foreign to the job of this lighthouse: {reason}"
        )

    def _lose(self, reason: str) -> list[GroupLostNotice]:
        if self.lost_reason is not None:
            return []
        self.lost_reason = reason
        self._joins, self._open_join, self._votes = {}, None, {}
        return [GroupLostNotice(reason, self.is_foreign)]

    def checkpoint_metadata(self, group_rank: int) -> str | None:
        """Return where that rank's state can be fetched, as it said in its last join."""
        return self._metadata.get(group_rank)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _says_lost(vote: Verdict) -> bool:
    return not (vote.committed or vote.passed or vote.went_well)


def _stops(group_rank: int, step: int) -> RankVerdict:
    return RankVerdict(group_rank, Verdict(step, False, stop=True))


def _answers(number: QuorumNumber, own: QuorumMemberLike, join: GroupJoin) -> bool:
    """Return whether a quorum with this entry for a group answers its join. The lighthouse may not believe
    that the group has a state, and torchft's names no quorum of a commit.

    One with the id that the join gives up was formed before the lighthouse, if it counts rounds, heard that.
    """
    if number.round > 0 and number.quorum_id == join.broken_quorum_id:
        return False
    is_alike = own.step == join.step and own.commit_quorum_id in (0, join.commit_quorum_id)
    return is_alike or own.commit_quorum_id == NO_STATE
