"""The quorum core: a pure state machine that decides which replicas are in the quorum.

Events and the time at which they happen go in, decisions come out; `next_deadline` says when
`advance` has to be called if nothing else happens before. The same events always give the same
decisions. There is no socket, thread, clock or logger in here, and nothing a peer reports makes it
raise: a late event of a session that has ended is ignored.

Theory of operation. Time is divided into *rounds*. In a round replicas join; the event that makes a
quorum possible forms it, and the next round begins. A quorum is possible when

1. it would have at least `min_replicas` members, and
2. either every member of the last quorum has joined (the *fast* quorum), or
3. more than half of the healthy have joined, and no healthy replica is still to come or the first to
   join has waited for `join_timeout`, since a member of the last quorum has joined or is gone, if one has.

A replica that is healthy and does not join counts for the majority until `join_timeout` after it registered,
or was in a quorum. Members of the last quorum count for longer: they may go on in it, and two quorums could
commit the same step. When there is no majority `join_timeout` after the first to join, and after a member has
joined or is gone, the others are told to give that quorum up, in which no member can get on. A member that
heals in it is given the time that its operations have, from when the quorum was formed.
Their servers answer, also for a training thread that hangs: they commit nothing more in it, and count no
more. Nor does a member that gives no answer for another `join_timeout`: its whole process hangs, and it
counts as little as one that answers no PING.

But the job does not begin anew while steps are left. Where the last quorum had some, and no member of it that
still has them has joined, others wait for the members that are there, however long they hang. They wait for
those that are silent, too, which may be training, cut off from here: until it is known that their processes
are gone, or for as long as such members go on (`standing_lease_ms`). So they do for a member of an earlier
quorum that was silent when the others went on without it, and these are gone now: it lacks a few steps, and
newcomers lack all.

A quorum takes all replicas that have joined, or, if a member of the last quorum asked to `shrink_only`,
those that were in that; the others stay joined for the next round. The wish is void where too few of these
are there for any quorum, and where some of them have not joined by `join_timeout` and the rest is no
majority, or fewer than `min_replicas`. These are torchft's rules, but there the fast quorum and a shrinking
one may fall below `min_replicas`, a wish to shrink is never void, and that of a newcomer keeps it out.

Two replicas that cannot reach each other are not in one quorum (`left_out.py`): as few as possible are left
out, and stay joined for a later one. No rule above knows of links, so no replica waits for one. Where fewer
than `min_replicas`, or than half of those that count, would stay, no replica is left out.

Nor is a replica in a quorum that has spoilt several by itself, until its pause is over (`left_out.py`): it
stays joined, and ends a quorum that stands only then. As many as `min_replicas`, and half of those that
count, stay: those that are left out are then no majority. Where that takes sick ones, they are tried again.

A replica that is foreign to the job (`identity.py`) is refused, on its side alone: it is forgotten before its
join could end a quorum that stands, or before a quorum with it could form. Where those that have joined are
not of one job, the rules hold for those of the chosen one, once that has `min_replicas`.

What a replica says of its state is believed where what this lighthouse remembers shows it (`claims.py`). One
that is not believed is a member as one without a state is: it is the newest nowhere, and heals.

A spare (`Spares`) is none of those that the rules speak of. When the others have all but formed a quorum,
and fewer than `replicas` of them are healthy, spares take the free places in it, also where there are fewer
than `min_replicas` without them; not in one that shrinks. Before the first quorum, where others may be about
to come, a spare waits for `join_timeout`.

A quorum id stands for one set of process groups that are connected to each other. It is kept as long
as these can be used on, so a new one is given when the members differ, when a participant reports a
failed commit, and when a member of the last quorum was gone in between, even if it is back: the
others aborted their groups. Ids only grow, over restarts too: the first is handed in (wall-clock
milliseconds do), and every id that a replica reports counts as used up. Where such an id is beyond those
of this lighthouse, the clock was set back, and there may be others that no replica has reported yet: the next
ids then keep a distance that no other start has, as two quorums with one id would pass for the same.

A restarted lighthouse remembers nothing, but the replicas do. It gives them `start_grace` to tell it, before
newcomers form a quorum of their own. The newest quorum that any of them reports becomes the last quorum, and
its members count as healthy until they are back or `reconnect_grace` is over, so that the first one back does
not form a quorum of its own. Once it has formed a quorum itself it learns no more: a quorum that is reported
then is older, even if its id is greater, as it is where the wall clock was set back.

Every quorum has the number of its round as well, which grows even where the id is kept. A lighthouse that
dies while it hands out a quorum leaves some members with it, which wait in a collective for the others, and
some without, which ask for the next one. The id alone does not tell them apart when it was kept; id and round
do, so the members that have the quorum are told that the others came back without it.

A member may also find that it cannot use the process group of the last quorum, perhaps before it has
met the others in it. Its join says so, and the others are told not to wait for it.
Only sessions report. Nothing is concluded about unary callers, which report nothing.

A quorum may stand: then its members ask for no other one until they are told to (`StandingQuorum`). It has
steps, so no quorum is formed beside it that has none of its members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lighthouse.core.claims import Claims, Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    NO_QUORUM,
    NO_STATE,
    Decision,
    FindMembers,
    HoldQuorum,
    LeftOut,
    Link,
    Member,
    MemberLost,
    Quorum,
    QuorumBroken,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    QuorumState,
    Refused,
    SessionSuperseded,
)
from lighthouse.core.explanation import Facts, describe
from lighthouse.core.identity import Identities, Identity
from lighthouse.core.left_out import Links, Losses, describe_pause, leave_out, leave_out_sick, pause_s
from lighthouse.core.membership import HealthyReplicas, QuorumNumber, Session

# Every survivor of a quorum is told about the first losses in it. Then all of them have aborted, and a
# thousand replicas that are lost at once must not cost a million messages.
ALARMS_PER_QUORUM_MAX = 16

# If the clock was set back, the next ids begin this far above a reported one at most; each start has its own
# distance.
_LEAP_MAX = 1_000_003

_NONE_LEFT_OUT: tuple[object, ...] = (frozenset(), (), frozenset())

_REFUSED_TOLD_MAX = 8  # refused replicas that the explanation names

_LATELY = 2  # longest pauses: after one, a replica has as long to be lost again

_FIND_EVERY_S = 1.0  # while a quorum waits for members that may be training


IS_A_SPARE = "is a spare, and waits for a place"


@dataclass(slots=True)
class Spare:
    """A spare, since when it is there, and what it has said."""

    replica_id: str
    session: Session
    since: float
    member: Member | None = None


class Spares:
    """The spares in the order in which they came: replicas that are there, and take part in nothing until
    there is a place for one.

    To the rules here a spare is a replica whose process has yet to start: it is not healthy, has not joined,
    and no quorum waits for it. What it says is kept, and heard when it takes a place. From then on it is a
    replica like any other, also when it comes back: it reports a quorum then, and is no spare any more.
    """

    def __init__(self) -> None:
        self._spares: dict[str, Spare] = {}
        self._names: dict[int, str] = {}  # by session

    def __len__(self) -> int:
        return len(self._spares)

    def __iter__(self) -> Iterator[Spare]:
        return iter(self._spares.values())

    def open(self, spare: Spare) -> None:
        """Add a spare."""
        self._spares[spare.replica_id] = spare
        self._names[spare.session.number] = spare.replica_id

    def named(self, replica_id: str) -> Spare | None:
        """Return the spare with this name."""
        return self._spares.get(replica_id)

    def of_session(self, session: int) -> Spare | None:
        """Return the spare that speaks through a session."""
        return self._spares.get(self._names.get(session, ""))

    def close(self, session: int) -> Spare | None:
        """Forget the spare that speaks through a session, and return it."""
        return self._spares.pop(self._names.pop(session, ""), None)

    def joined(self) -> list[Member]:
        """Return what those say that ask for a quorum."""
        return [spare.member for spare in self if spare.member is not None]

    def first_joined(self) -> Spare | None:
        """Return the first spare that asks for a quorum."""
        return next((spare for spare in self if spare.member is not None), None)


@dataclass(slots=True)
class _Join:
    """A member's part in this round: since when it has joined, and where it awaits its answer."""

    member: Member
    since: float
    in_session: bool = False
    in_call: bool = False
    pause_s: float = 0.0  # for so long it is left out, as it spoils quorums by itself
    let_in_at: float = 0.0  # until then
    left_out: bool = False  # left out of a quorum that was formed since
    told: bool = False  # told so since its last join
    is_unproven: bool = False  # nothing shows what it claims of its state, in the quorum that is formed

    @property
    def as_believed(self) -> Member:
        """The member, with the state that others are to believe it has."""
        if not self.is_unproven:
            return self.member
        return self.member._replace(step=0, commit_quorum_id=NO_STATE)


class QuorumCore:
    """The lighthouse without its network. `now` is in seconds on any clock that never runs backwards.

    Every event costs constant time until the one that forms a quorum, which sorts its members.
    """

    def __init__(self, config: LighthouseConfig, first_quorum_id: int) -> None:
        self._min_replicas, self._places = config.min_replicas, config.places
        self._join_timeout = config.join_timeout_ms / 1000
        self._reconnect_grace = config.reconnect_grace_ms / 1000
        self._start_grace = config.start_grace_ms / 1000
        self._lease = config.lease_s
        self._pauses_s = config.sick_pause_ms / 1000, config.sick_pause_max_ms / 1000
        self._not_before: float | None = None  # until then it forms no quorum, if it knows of none
        self._healthy = HealthyReplicas(config.heartbeat_timeout_ms / 1000)
        self._highest_id = first_quorum_id - 1
        self._leap = first_quorum_id % _LEAP_MAX
        self._highest_round = 0

        self._number = QuorumNumber(NO_QUORUM, 0)  # of the last quorum
        self._last: frozenset[str] = frozenset()
        # Members of the last quorum that were lost, left, or came back without it; and the first that has
        # given it up.
        self._gone: set[str] = set()
        self._departed: set[str] = set()
        self._alarms = 0
        self._has_formed = False
        self._standing: StandingQuorum | None = None  # the last quorum, while it stands
        # Members of the last quorum that have given it up without asking for another one, and when they were
        # told to.
        self._given_up: set[str] = set()
        self._told_at: float | None = None
        self._silent: set[str] = set()  # members of the last quorum that were lost, and may live
        self._missed: dict[str, float] = {}  # those of earlier quorums, and until when they are awaited
        self._ended_at: float | None = None  # when the first of its members had joined, or was gone
        # Its members that heal in it, as far as they are awaited, and until when.
        self._healing: set[str] = set()
        self._heal_until = 0.0
        self._heard_at = 0.0  # when the last word of its members came, or went to them
        self._find_at: float | None = None  # when those that are silent are looked for next

        self._joined: dict[str, _Join] = {}  # in the order of `since`
        self._paused: dict[str, _Join] = {}  # those of them that have a pause, be it over or not
        self._missing = 0  # members of the last quorum that have not joined
        self._shrinking = 0  # joined members that want to shrink only
        self._deadline = math.inf
        self._links = Links()
        self._losses = Losses(_LATELY * self._pauses_s[1])
        self._spares = Spares()
        self._last_left_out: tuple[object, ...] = _NONE_LEFT_OUT
        self._identities = Identities(config.job_id)
        self._claims = Claims()
        self._first_quorum_id = 0  # of the job of the last quorum's members
        self._refused: dict[str, str] = {}  # the last ones, with the reason

    # -- sessions

    def register(
        self,
        session: int,
        replica_id: str,
        last: QuorumNumber,
        last_ids: Iterable[str],
        now: float,
        stands: bool = False,
        spare: bool = False,
    ) -> list[Decision]:
        """Handle a replica that opened a session (a number never used before) and says which quorum it saw
        last, and whether that stood.

        For a replica that has seen none, the id of `last` is 0 or less and `last_ids` is empty. For a replica
        that does not know of rounds, its round is 0. A `spare` that has seen none, and has no place, waits.
        """
        decisions = self.advance(now)
        if (waiting := self._spares.named(replica_id)) is not None:
            self._spares.close(waiting.session.number)
            decisions.append(SessionSuperseded(waiting.session.number, replica_id))
        if spare and last.quorum_id <= 0 and replica_id not in self._healthy:
            self._spares.open(Spare(replica_id, Session(session, last), now))
            self._form(now, decisions)
            return decisions
        self._open(replica_id, Session(session, last), now, decisions)
        self._learn(last, last_ids, now, decisions, stands)
        if last != self._number:
            self._depart(replica_id, "came back without the quorum", now, decisions)
        else:
            self._remind(session, replica_id, decisions)
        if self._is_over(last):
            must_answer = last == self._number and self._told_at is not None
            decisions.append(QuorumOver(session, replica_id, last.quorum_id, must_answer))
        self._form(now, decisions)
        return decisions

    def reported(self, replica_id: str, past: Past) -> None:
        """Record in which quorum of an earlier start a replica was last, as that start has stated, or could
        not, before it registers.
        """
        self._claims.reported(replica_id, past)

    def join(self, session: int, member: Member, now: float) -> list[Decision]:
        """Handle a join: this session's replica asks for the next quorum. That of another one is ignored."""
        decisions = self.advance(now)
        spare = self._spares.of_session(session)
        if spare is not None and spare.replica_id == member.replica_id:
            spare.member = member
            self._form(now, decisions)
            if self._spares.of_session(session) is not None:
                told = session, spare.replica_id
                reasons = ((spare.replica_id, IS_A_SPARE),)
                decisions.append(LeftOut(self._number.quorum_id, (spare.replica_id,), (), (told,), reasons))
        elif self._healthy.owner_of(session) == member.replica_id:
            self._ask(member, now, decisions)
            self._form(now, decisions)
        return decisions

    def identify(self, session: int, identity: Identity, now: float) -> list[Decision]:
        """Record how the replica of this session identifies itself, and refuse it if it is foreign."""
        decisions = self.advance(now)
        replica_id = self._healthy.owner_of(session)
        if (spare := self._spares.of_session(session)) is not None:
            self._identities.describe(spare.replica_id, identity)
        if replica_id is not None:
            self._identities.describe(replica_id, identity)
            if replica_id in self._last:
                self._first_quorum_id = identity.first_quorum_id or self._first_quorum_id
            self._refuse_foreign(replica_id, decisions)
            self._form(now, decisions)
        return decisions

    def report_links(self, session: int, unreachable: Sequence[str], now: float) -> list[Decision]:
        """Record that this session's replica cannot reach these others, and only these, for later quorums."""
        decisions = self.advance(now)
        replica_id = self._healthy.owner_of(session)
        if replica_id is not None:
            self._links.report(replica_id, unreachable)
        return decisions

    def hold(self, session: int, number: QuorumNumber, step: int, now: float) -> list[Decision]:
        """Handle a member that begins no step from this one on until it is told more: it was asked to hold,
        or a rank of it asks for a quorum, and the other members have to hold, too.
        """
        decisions = self.advance(now)
        replica_id, standing = self._healthy.owner_of(session), self._standing
        if standing is not None and number == self._number and replica_id in standing.members:
            standing.holds(replica_id, step)
            self._hold(replica_id, decisions)
        return decisions

    def give_up(self, session: int, number: QuorumNumber, now: float) -> list[Decision]:
        """Handle a member that commits nothing more in the last quorum, as it was told to give it up."""
        decisions = self.advance(now)
        replica_id = self._healthy.owner_of(session)
        if replica_id in self._last and number == self._number:
            self._given_up.add(str(replica_id))
            self._healing.discard(str(replica_id))
            self._form(now, decisions)
        return decisions

    def leave(self, session: int, now: float, step: int = 0, quorum_id: int = 0) -> list[Decision]:
        """Handle the orderly end of a replica before this step, which alarms no other that has not begun
        it.

        Args:
            quorum_id: of the last quorum in which no other waits for the replica, negative if it was in none:
                the others are told not to wait for it in a later one. 0 if it does not say.
        """
        decisions = self.advance(now)
        replica_id = self._healthy.owner_of(session)
        if (spare := self._spares.close(session)) is not None:
            self._identities.forget(spare.replica_id)
        if replica_id is not None:
            self._forget(replica_id)
            self._missed.pop(replica_id, None)
            if replica_id in self._last:
                if quorum_id not in (0, self._number.quorum_id):
                    self._break(replica_id, decisions)
                self._gone.add(replica_id)
                self._departed.add(replica_id)
                self._stand_no_more(replica_id, step, now, decisions)
            self._form(now, decisions)
        return decisions

    def lost(self, session: int, reason: str, now: float) -> list[Decision]:
        """Handle a session that ended without a leave."""
        decisions = self.advance(now)
        replica_id = self._healthy.owner_of(session)
        if (spare := self._spares.close(session)) is not None:
            self._identities.forget(spare.replica_id)
            decisions.append(MemberLost(NO_QUORUM, spare.replica_id, reason, ()))
        if replica_id is not None:
            self._lose(replica_id, reason, now, decisions)
            self._form(now, decisions)
        return decisions

    def gone(self, replica_id: str, now: float) -> list[Decision]:
        """Handle that the process of a member that was silent is gone."""
        decisions = self.advance(now)
        self._silent.discard(replica_id)
        self._missed.pop(replica_id, None)
        self._form(now, decisions)
        return decisions

    # -- unary calls of torchft's protocol

    def call(self, member: Member, now: float) -> list[Decision]:
        """Handle a unary Quorum call: the replica is healthy while it is open, and has joined."""
        decisions = self.advance(now)
        self._healthy.open_call(member.replica_id, now)
        self._enter(member, now).in_call = True
        self._stand_no_more(member.replica_id, member.step, now, decisions)
        self._form(now, decisions)
        return decisions

    def withdraw(self, replica_id: str, now: float) -> list[Decision]:
        """Handle the cancellation of the last open unary Quorum call of this replica by its caller."""
        decisions = self.advance(now)
        self._healthy.close_call(replica_id, now)
        self._answer_no_more(replica_id, session=False)
        self._form(now, decisions)
        return decisions

    def heartbeat(self, replica_id: str, now: float) -> list[Decision]:
        """Handle a unary Heartbeat. It adds a healthy replica that has not joined, so it forms no quorum."""
        decisions = self.advance(now)
        self._healthy.saw(replica_id, now)
        self._form(now, decisions)
        return decisions

    # -- time

    def advance(self, now: float) -> list[Decision]:
        """Decide what is due by now; every event does this first. Nothing happens when nothing is due."""
        decisions: list[Decision] = []
        if self._not_before is None:
            self._not_before = now + self._start_grace
        if now >= self._deadline:
            silent, missed = self._healthy.expire(now)
            for replica_id in silent:
                self._lose(replica_id, "no heartbeat within heartbeat_timeout", now, decisions)
            for replica_id in missed:
                self._lose(replica_id, "did not come back within reconnect_grace", now, decisions)
            for replica_id in sorted(i for i, join in self._paused.items() if now >= join.let_in_at):
                self._hold(replica_id, decisions)
            self._form(now, decisions)
        return decisions

    def next_deadline(self) -> float | None:
        """Return when `advance` must be called at the latest; None while only events can change anything."""
        return None if self._deadline == math.inf else self._deadline

    # -- views for the shell and for operators

    def __len__(self) -> int:
        """Return how many replicas are healthy, or spares."""
        return len(self._healthy) + len(self._spares)

    def __contains__(self, replica_id: str) -> bool:
        """Return whether the replica is healthy, or a spare."""
        return replica_id in self._healthy or self._spares.named(replica_id) is not None

    def replica_of(self, session: int) -> str | None:
        """Return the replica that a session speaks for; None if it ended or was superseded."""
        spare = self._spares.of_session(session)
        return self._healthy.owner_of(session) if spare is None else spare.replica_id

    @property
    def missed(self) -> Collection[str]:
        """The silent members of earlier quorums that are still awaited where their steps are needed."""
        return self._missed.keys()

    @property
    def highest(self) -> QuorumNumber:
        """The highest id and round that are used up."""
        return QuorumNumber(self._highest_id, self._highest_round)

    def session_of(self, replica_id: str) -> int | None:
        """Return the open session of a replica."""
        spare = self._spares.named(replica_id)
        session = self._healthy.session_of(replica_id) if spare is None else spare.session
        return None if session is None else session.number

    def sign_of(self, replica_id: str) -> str:
        """Return the sign by which a replica is healthy (`membership.py`); "" if it is not."""
        return self._healthy.sign_of(replica_id)

    def describe(self, now: float) -> str:
        """Describe the last quorum, the joined and the awaited replicas, and why there is no quorum yet."""
        return describe(self.facts(now))

    def facts(self, now: float) -> Facts:
        """Return the state that `describe` puts into words."""
        awaited = self._awaited(now)
        return Facts(
            last_id=self._number.quorum_id,
            last=self._last,
            departed=self._departed,
            healthy=self._healthy.ids(),
            joined=self._joined.keys(),
            expected=self._healthy.expected_ids(),
            left_out=[i for i, join in self._joined.items() if join.left_out],
            links=self._links.among(set(self._healthy.ids())),
            sick=self._sick(now, self._joined),
            standing=self._standing.describe(now) if self._standing is not None else "",
            state=self._state(now),
            candidates=self._candidates(now),
            min_replicas=self._min_replicas,
            is_shrinking=self._is_shrinking(now),
            majority=self._majority(now),
            # They count for a majority no more, as they do not join.
            idle=[i for i in self._healthy.ids() if i not in self._joined and i not in awaited],
            spares=[spare.replica_id for spare in self._spares],
            refused=self._refused,
            late_s=self._late_at() - now if self._joined else math.inf,
            lease_s=max(self._silence_ends(now), default=math.inf) - now,
            expiry_s=self._healthy.next_expiry() - now,
        )

    # -- the rules

    def _state(self, now: float) -> QuorumState:
        state = self._state_of_any_job(now)
        if state.forms and self._of_one_job()[0] < self._min_replicas:
            return QuorumState.DIVIDED
        return QuorumState.BEHIND if state.forms and self._would_go_back(now) else state

    def _would_go_back(self, now: float) -> bool:
        """Return whether the steps would be lost that the last quorum began with, and a member that may have
        them is there, or is silent.

        A first quorum began with none: a member that hangs before its first step makes no other wait.
        """
        newest = self._claims.newest
        joined = [join.member for i in self._last if (join := self._joined.get(i)) is not None]
        if newest[0] == 0 or any(member.version >= newest for member in joined):
            return False
        is_there = any(i in self._healthy and i not in self._joined for i in self._last)
        return is_there or bool(self._silence_ends(now))

    def _awaits_silent(self, now: float) -> bool:
        """Return whether members of the last quorum may be alive of which nothing is heard."""
        may_live = self._lease > 0 and any(i not in self._healthy for i in self._silent)
        return may_live and (self._find_at is None or now < self._heard_at + self._lease)

    def _silence_ends(self, now: float) -> list[float]:
        """Return when those are awaited no more that may be alive, and have steps, and of which nothing is
        heard: members of the last quorum, and of earlier ones, whose steps are nearly as many.
        """
        ends = [self._heard_at + self._lease] if self._awaits_silent(now) else []
        return ends + [self._missed[i] for i in self._still_missed(now)]

    def _still_missed(self, now: float) -> list[str]:
        return [i for i, until in self._missed.items() if now < until and i not in self._healthy]

    def _state_of_any_job(self, now: float) -> QuorumState:
        joined, healthy = len(self._joined), len(self._healthy)
        if not joined:
            return QuorumState.NOBODY
        if self._candidates(now) < self._min_replicas:
            return QuorumState.TOO_FEW
        if not self._last and now < (self._not_before or now):
            return QuorumState.STARTING
        if self._last and not self._missing:
            return QuorumState.FAST
        if joined <= healthy // 2 and (now < self._late_at() or joined < self._majority(now)):
            return QuorumState.NO_MAJORITY
        late = QuorumState.LATE if now >= self._late_at() else QuorumState.STRAGGLERS
        return QuorumState.COMPLETE if joined == healthy else late

    def _candidates(self, now: float) -> int:
        """Return how many members a quorum of the replicas that have joined would have."""
        return len(self._last) - self._missing if self._is_shrinking(now) else len(self._joined)

    def _is_shrinking(self, now: float) -> bool:
        """Return whether new replicas are left out because a member of the last quorum wishes so.

        The wish is void where fewer than `min_replicas` members are there, and once stragglers are left
        behind unless the rest is a majority, and enough.
        """
        if not self._shrinking:
            return False
        members = [join for i in self._last if (join := self._joined.get(i)) is not None]
        there = sum(i in self._healthy for i in self._last)
        if there < self._min_replicas or not any(join.member.shrink_only for join in members):
            return False
        if len(members) == there or now < self._late_at():
            return True
        return len(members) >= max(self._min_replicas, self._majority(now))

    def _late_at(self) -> float:
        """Return when stragglers are left behind, by the first join of a replica that does not wait for a
        link, by the first sign that members of the last quorum ask for another one, and by those that heal.

        A replica that was left out would otherwise shorten the time that stragglers get, and so would a
        newcomer that has waited for the end of a step longer than `join_timeout`: of members that end it at
        the same time the first to join would leave the others behind.
        """
        first = next((join for join in self._joined.values() if not join.left_out), None)
        since = (first or next(iter(self._joined.values()))).since
        late_at = max(since, self._ended_at or since) + self._join_timeout
        return max(late_at, self._heal_until) if self._healing else late_at

    def _majority(self, now: float) -> int:
        """Return how many replicas are more than half of those that count."""
        return self._counted(now) // 2 + 1

    def _counted(self, now: float) -> int:
        """Return how many replicas have joined, or are awaited."""
        return len(self._joined) + len(self._awaited(now))

    def _awaited(self, now: float) -> dict[str, float]:
        """Return until when each healthy replica that has not joined still counts for a majority."""
        until: dict[str, float] = {}
        for replica_id in self._healthy.ids():
            if replica_id not in self._joined:
                end = self._healthy.since(replica_id) + self._join_timeout
                if replica_id in self._last and replica_id not in self._given_up:
                    end = math.inf if self._told_at is None else max(end, self._told_at + self._join_timeout)
                if now < end:
                    until[replica_id] = end
        return until

    def _form(self, now: float, decisions: list[Decision]) -> None:
        self._look_for_end(now)
        if self._is_held_back(now):
            self._tell_to_give_up(now, decisions)
        if self._is_behind(now):
            self._find_members(now, decisions)
        self._fill_places(now, decisions)
        while (state := self._state(now)).forms:
            if foreign := self._of_one_job()[1]:
                for replica_id, why in foreign.items():
                    self._refuse(replica_id, why, decisions)
                self._form(now, decisions)  # anew: without them there may be no quorum
                return
            unproven = self._claims.unproven([join.member for join in self._joined.values()])
            for replica_id, join in self._joined.items():
                join.is_unproven = replica_id in unproven
            last_id, sick = self._number.quorum_id, self._sick(now, self._joined)
            chosen, links = self._choose(now)
            formed = self._next_quorum(chosen, now)
            for replica_id in formed.left:  # present, but too slow: the others have gone on
                session = self._healthy.session_of(replica_id)
                if session is not None and replica_id not in self._joined:
                    decisions.append(QuorumOver(session.number, replica_id, last_id))
            decisions.append(formed)
            if links or sick or self._last_left_out != _NONE_LEFT_OUT:
                self._tell_left_out(links, sick, decisions)
            self._fill_places(now, decisions)
        pauses = [join.let_in_at for join in self._paused.values() if join.let_in_at > now]
        ends = () if self._last else (spare.since + self._join_timeout for spare in self._spares)
        self._deadline = min([self._healthy.next_expiry(), *pauses, *(end for end in ends if end > now)])
        if state is QuorumState.STARTING:
            self._deadline = min(self._deadline, self._not_before or now)
        is_held = state is QuorumState.TOO_FEW and self._is_shrinking(now)
        if is_held or state in (QuorumState.STRAGGLERS, QuorumState.NO_MAJORITY):
            late_at = self._late_at()
            waits = [late_at] if now < late_at else self._awaited(now).values()
            self._deadline = min([self._deadline, *waits])
        if self._find_at is not None and self._is_behind(now) and (until := self._silence_ends(now)):
            self._deadline = min(self._deadline, self._find_at, *until)

    def _look_for_end(self, now: float) -> None:
        """Note when the first member of the last quorum has joined, or is gone."""
        if self._ended_at is None and (self._departed or self._missing < len(self._last)):
            self._ended_at = now

    def _fill_places(self, now: float, decisions: list[Decision]) -> None:
        """Let spares take the free places in the quorum that is about to be formed; what they have said is
        heard now. Where a quorum stands and lacks one, its members have to ask for another first.
        """
        while (spare := self._spares.first_joined()) is not None:
            state, is_known = self._state(now), self._last or now >= spare.since + self._join_timeout
            foreign = self._of_one_job()[1] if state is QuorumState.DIVIDED else ()
            if len(self._healthy) - len(foreign) >= self._places:
                return None
            is_due = state.forms or (self._is_short_of_spares(state) and not self._would_go_back(now))
            if spare.member is None or not is_known or not is_due or self._is_shrinking(now):
                return self._hold(spare.replica_id, decisions)
            self._spares.close(spare.session.number)
            self._open(spare.replica_id, spare.session, now, decisions)
            self._ask(spare.member, now, decisions)
        return None

    def _is_short_of_spares(self, state: QuorumState) -> bool:
        """Return whether all others have joined, and there are enough of one job with spares."""
        is_short = state in (QuorumState.TOO_FEW, QuorumState.DIVIDED)
        if not is_short or len(self._joined) < len(self._healthy):
            return False
        spares, at_least = self._spares.joined(), self._min_replicas
        return len(self._joined) + len(spares) >= at_least and self._of_one_job(spares)[0] >= at_least

    def _is_behind(self, now: float) -> bool:
        """Return whether there would be a quorum, perhaps with spares, if it did not have to wait for members
        that may have the steps.
        """
        state = self._state(now)
        return state is QuorumState.BEHIND or (self._is_short_of_spares(state) and self._would_go_back(now))

    def _of_one_job(self, spares: Iterable[Member] = ()) -> tuple[int, dict[str, str]]:
        """Return how many of those that have joined, and of these spares, are of one job, and why each of the
        others is not.
        """
        joined = (join.member for join in self._joined.values())
        return self._identities.choose([*joined, *spares], self._last)

    def _refuse_foreign(self, replica_id: str, decisions: list[Decision]) -> bool:
        """Refuse a newcomer that is foreign to the members of the last quorum; return whether it is."""
        if replica_id in self._last:
            return False
        why = self._identities.why_foreign(replica_id, self._last, self._first_quorum_id)
        if why:
            self._refuse(replica_id, why, decisions)
        return bool(why)

    def _refuse(self, replica_id: str, why: str, decisions: list[Decision]) -> None:
        session = self.session_of(replica_id)
        self._forget(replica_id)
        self._missed.pop(replica_id, None)
        self._refused[replica_id] = why
        if len(self._refused) > _REFUSED_TOLD_MAX:
            del self._refused[next(iter(self._refused))]
        if session is not None:
            decisions.append(Refused(session, replica_id, why))

    def _find_members(self, now: float, decisions: list[Decision]) -> None:
        """Tell members that go on, and those whose quorum has silent ones, to give it up; look for these."""
        if self._standing is not None or self._awaits_silent(now):
            self._tell_to_give_up(now, decisions)
        if self._silence_ends(now) and (self._find_at is None or now >= self._find_at):
            self._find_at = now + _FIND_EVERY_S
            silent = {i for i in self._silent if i not in self._healthy}
            decisions.append(FindMembers(tuple(sorted({*silent, *self._still_missed(now)}))))

    def _is_held_back(self, now: float) -> bool:
        """Return whether members of the last quorum do not ask for another one, although no member can get on
        in it, and replicas have waited for them for `join_timeout`.
        """
        if (
            self._healthy.expected_ids()
            or self._state(now) is not QuorumState.NO_MAJORITY
            or now < self._late_at()
        ):
            return False
        return bool(self._departed) or self._missing < len(self._last)

    def _tell_to_give_up(self, now: float, decisions: list[Decision]) -> None:
        """Tell members of the last quorum that do not ask for another one to give it up."""
        absent = [i for i in sorted(self._last.difference(self._joined)) if i in self._healthy]
        if self._told_at is not None or not absent:
            return
        self._told_at = self._heard_at = now
        self._alarms += 1
        self._standing = None
        there = [(i, session) for i in absent if (session := self.session_of(i)) is not None]
        decisions += [QuorumOver(session, i, self._number.quorum_id, True) for i, session in there]

    def _choose(self, now: float) -> tuple[dict[str, _Join], tuple[Link, ...]]:
        """Choose the members of the quorum that is about to be formed; return them, and the broken links
        heeded.

        INVARIANT: those that are left out are no majority of the replicas that count: they cannot form a
        quorum beside the others.
        """
        chosen, counted = self._joined, self._counted(now)
        at_least = max(self._min_replicas, counted - counted // 2)
        if self._is_shrinking(now):
            chosen = {i: join for i, join in chosen.items() if i in self._last}
        if sick := self._sick(now, chosen):
            out = leave_out_sick({i: join.as_believed for i, join in chosen.items()}, sick, at_least)
            chosen = {i: join for i, join in chosen.items() if i not in out}
        links = self._links.among(chosen) if self._links else ()
        if links:
            out = leave_out({i: join.as_believed for i, join in chosen.items()}, links, at_least)
            chosen = {i: join for i, join in chosen.items() if i not in out}
        return chosen, links

    def _sick(self, now: float, joins: Mapping[str, _Join]) -> dict[str, str]:
        """Return those that are to be left out as they spoil quorums by themselves, each with the reason."""
        sick = [(i, join) for i, join in joins.items() if now < join.let_in_at]
        return {i: describe_pause(join.member, join.pause_s) for i, join in sick}

    def _tell_left_out(
        self, links: tuple[Link, ...], sick: Mapping[str, str], decisions: list[Decision]
    ) -> None:
        """Tell each replica once a join, and operators of every change.

        A wish to `shrink_only` concerned the quorum that was formed, and is settled.
        """
        out = frozenset(i for i in [*(end for link in links for end in link), *sick] if i in self._joined)
        news = [i for i in sorted(out) if not self._joined[i].told]
        now_left_out = out, links, frozenset(sick)
        if (links or sick) and (news or now_left_out != self._last_left_out):
            sessions = tuple((s.number, i) for i in news if (s := self._healthy.session_of(i)) is not None)
            reasons = tuple(sorted(sick.items()))
            left = LeftOut(self._number.quorum_id, tuple(sorted(out)), links, sessions, reasons)
            decisions.append(left)
        self._last_left_out = now_left_out
        for join in map(self._joined.__getitem__, news):
            join.left_out = join.told = True
            self._shrinking -= join.member.shrink_only
            join.member = join.member._replace(shrink_only=False)

    def _next_quorum(self, chosen: dict[str, _Join], now: float) -> QuorumFormed:
        last, last_id = self._last, self._number.quorum_id
        self._highest_round += 1
        number = QuorumNumber(self._next_id(chosen), self._highest_round)
        if last.isdisjoint(chosen):  # another job
            self._first_quorum_id = 0
        began = self._first_quorum_id or self._identities.first_quorum_id(sorted(chosen))
        self._first_quorum_id = began or number.quorum_id
        self._adopt(number, last if self._is_same(chosen) else frozenset(chosen), now)
        self._has_formed = True
        self._healthy.were_in_a_quorum(last | self._last, now)
        # Those that were not chosen stay joined; the clock of the new round starts for them now.
        self._joined = {i: join for i, join in self._joined.items() if i not in chosen}
        self._paused = {i: join for i, join in self._paused.items() if i not in chosen}
        for join in self._joined.values():
            join.since = now
        self._shrinking = sum(join.member.shrink_only for join in self._joined.values())
        self._missing = len(self._last)
        stands = all(now < join.let_in_at for join in self._joined.values()) and _can_stand(chosen.values())
        self._stands(stands, now)
        ids = sorted(chosen)
        callers = tuple(i for i in ids if chosen[i].in_call)
        for replica_id in callers:
            self._healthy.close_call(replica_id, now)
        members = tuple(chosen[i].as_believed for i in ids)
        self._await_healing(members, now)
        quorum = Quorum(*number, members, stands, self._first_quorum_id)
        self._claims.formed(quorum)
        return QuorumFormed(
            quorum,
            sessions=self._sessions(i for i in ids if chosen[i].in_session),
            callers=callers,
            new_id=number.quorum_id != last_id,
            joined=tuple(sorted(self._last - last)),
            left=tuple(sorted(last - self._last)),
            unproven=tuple(i for i in ids if chosen[i].is_unproven),
        )

    def _await_healing(self, members: Sequence[Member], now: float) -> None:
        """Record which members of the new quorum heal in it, and how long the others wait for them: no longer
        than any of the others would wait for an operation, even if one that heals asks for more.
        """
        newest = max(member.version for member in members)
        behind = {member.replica_id: member.timeout_ms for member in members if member.version < newest}
        others = (member.timeout_ms for member in members if member.version == newest)
        self._healing = set(behind)
        self._heal_until = now + min(max(behind.values(), default=0), *others) / 1000

    def _next_id(self, chosen: dict[str, _Join]) -> int:
        failed = any(join.member.commit_failures > 0 for join in chosen.values())
        if self._is_same(chosen) and not self._departed and not failed:
            return self._number.quorum_id
        self._highest_id += 1
        return self._highest_id

    def _is_same(self, chosen: dict[str, _Join]) -> bool:
        if self._missing or len(chosen) != len(self._last):
            return False
        return len(chosen) == len(self._joined) or chosen.keys() == self._last

    # -- bookkeeping

    def _open(self, replica_id: str, session: Session, now: float, decisions: list[Decision]) -> None:
        """Count a replica as healthy by its new session."""
        older = self._healthy.open_session(replica_id, session, now)
        if older is not None:
            decisions.append(SessionSuperseded(older, replica_id))
            self._answer_no_more(replica_id, session=True)
        self._links.forget(replica_id)
        if session.last.quorum_id <= 0:
            self._links.forget_about(replica_id)

    def _ask(self, member: Member, now: float, decisions: list[Decision]) -> None:
        """Let a replica join through its session, unless it is foreign."""
        if self._refuse_foreign(member.replica_id, decisions):
            return
        self._enter(self._losses.with_losses(member, now), now).in_session = True
        if 0 < member.broken_quorum_id == self._number.quorum_id:
            self._break(member.replica_id, decisions)
        self._stand_no_more(member.replica_id, member.step, now, decisions)

    def _enter(self, member: Member, now: float) -> _Join:
        """Enter a replica into the round; if it has joined before, its news counts and its place stays."""
        self._use_up(member.commit_quorum_id)
        self._healing.discard(member.replica_id)
        join = self._joined.get(member.replica_id)
        is_news = join is None or join.member.own_failures != member.own_failures
        if join is None:
            join = self._joined[member.replica_id] = _Join(member, now)
            self._missing -= member.replica_id in self._last
        else:
            self._shrinking -= join.member.shrink_only
            member = member._replace(shrink_only=member.shrink_only and not join.left_out)  # settled
            join.member, join.told = member, False  # a new attempt of the replica, which does not know it yet
        self._shrinking += member.shrink_only
        if is_news and (pause := pause_s(member, *self._pauses_s)):
            join.pause_s, join.let_in_at = pause, now + pause
            self._paused[member.replica_id] = join
        elif is_news:
            join.pause_s = join.let_in_at = 0.0
            self._paused.pop(member.replica_id, None)
        return join

    def _answer_no_more(self, replica_id: str, *, session: bool) -> None:
        """Await no answer any more in the session, or in the call; without both the join is withdrawn."""
        join = self._joined.get(replica_id)
        if join is None:
            return
        join.in_session = join.in_session and not session
        join.in_call = join.in_call and session
        if not join.in_session and not join.in_call:
            self._unjoin(replica_id)

    def _unjoin(self, replica_id: str) -> None:
        join = self._joined.pop(replica_id, None)
        self._paused.pop(replica_id, None)
        if join is not None:
            self._shrinking -= join.member.shrink_only
            self._missing += replica_id in self._last

    def _forget(self, replica_id: str) -> None:
        self._healthy.forget(replica_id)
        self._healing.discard(replica_id)
        self._silent.discard(replica_id)
        self._links.forget(replica_id)
        self._identities.forget(replica_id)
        self._claims.forget(replica_id)
        self._unjoin(replica_id)

    def _lose(self, replica_id: str, reason: str, now: float, decisions: list[Decision]) -> None:
        self._forget(replica_id)
        if replica_id in self._last:
            self._heard_at = now
            self._silent.add(replica_id)
        if not self._depart(replica_id, reason, now, decisions):
            told = self._sessions(self._links.reporters_of(replica_id))
            decisions.append(MemberLost(NO_QUORUM, replica_id, reason, told))

    def _depart(self, replica_id: str, reason: str, now: float, decisions: list[Decision]) -> bool:
        """End the replica's part in the last quorum; return False if it had none, or none any more.

        One that has given the quorum up was alive, as the others know, and may offer them its state.
        """
        if replica_id not in self._last or replica_id in self._gone:
            return False
        self._gone.add(replica_id)
        self._departed.add(replica_id)
        self._healing.discard(replica_id)
        self._losses.lost(replica_id, self._number.quorum_id, reason, now)
        self._alarms += 1
        self._standing = None
        # Survivors that have given the quorum up are told, too: their operators want to know which replica
        # was lost.
        survivors = sorted(self._last - {replica_id}) if self._alarms <= ALARMS_PER_QUORUM_MAX else []
        decisions.append(MemberLost(self._number.quorum_id, replica_id, reason, self._sessions(survivors)))
        return True

    def _break(self, replica_id: str, decisions: list[Decision]) -> None:
        """Handle a replica that gave the last quorum up; the first alarm in it is enough for all others."""
        if replica_id not in self._last or self._alarms:
            return
        self._departed.add(replica_id)
        self._alarms += 1
        self._standing = None
        survivors = sorted(self._last - self._departed)
        decisions.append(QuorumBroken(self._number.quorum_id, replica_id, self._sessions(survivors)))

    # -- the quorum that stands

    def _stand_no_more(self, replica_id: str, step: int, now: float, decisions: list[Decision]) -> None:
        """Handle a replica that wants a quorum, or has left, while one stands."""
        if (standing := self._standing) is not None:
            join = self._joined.get(replica_id)
            if replica_id in standing.members:
                standing.ends_at(replica_id, step)
            elif join is not None and now < join.let_in_at:
                return  # `advance` lets it in
            self._hold(replica_id, decisions)

    def _hold(self, replica_id: str, decisions: list[Decision]) -> None:
        """Ask the members to hold for a replica, and name the step once all have answered. Where one has
        asked, or left, at another step, the others cannot meet it there: the quorum is broken.
        """
        standing = self._standing
        if standing is None:
            return
        if sessions := self._sessions(standing.hold(replica_id)):
            decisions.append(HoldQuorum(*self._number, replica_id, sessions))
        was_named = standing.ask_at is not None
        if not was_named and standing.is_settled:
            standing.settle()
        if (step := standing.ask_at) is None:
            return
        if (apart := standing.not_ended_at(step)) is not None:
            self._break(apart, decisions)
        elif not was_named and (sessions := self._sessions(standing.holding)):
            decisions.append(QuorumReleased(*self._number, step, sessions))

    def _remind(self, session: int, replica_id: str, decisions: list[Decision]) -> None:
        """Tell a member that has a new session what it may have missed in the last one."""
        standing = self._standing
        if standing is None:
            return
        if standing.ask_at is not None:
            decisions.append(QuorumReleased(*self._number, standing.ask_at, (session,)))
        elif standing.held_for is not None:
            standing.came_back(replica_id)
            decisions.append(HoldQuorum(*self._number, standing.held_for, (session,)))

    def _is_over(self, number: QuorumNumber) -> bool:
        """Return whether members of that quorum were told to give it up, or have gone on without it."""
        if number.quorum_id <= 0:
            return False
        if number == self._number:
            return self._alarms > 0
        return self._has_formed or number < self._number

    def _sessions(self, replica_ids: Iterable[str]) -> tuple[int, ...]:
        sessions = (self._healthy.session_of(i) for i in replica_ids)
        return tuple(session.number for session in sessions if session is not None)

    def _learn(
        self,
        number: QuorumNumber,
        ids: Iterable[str],
        now: float,
        decisions: list[Decision],
        stands: bool,
    ) -> None:
        """Learn from the last quorum that a replica knows of: news only after this lighthouse restarted."""
        self._use_up(number.quorum_id)
        self._highest_round = max(self._highest_round, number.round)
        ids = frozenset(ids)
        if number.quorum_id <= 0 or number <= self._number or not ids or self._has_formed:
            return
        self._adopt(number, ids, now)
        self._stands(stands, now)
        decisions += [
            QuorumOver(session.number, replica_id, session.last.quorum_id)
            for replica_id, session in self._healthy.sessions()
            if self._is_over(session.last)
        ]
        self._missing = len(ids.difference(self._joined))
        self._healthy.expect(ids, now + self._reconnect_grace)
        for replica_id in sorted(ids):
            session = self._healthy.session_of(replica_id)
            if session is not None and session.last != number:
                self._depart(replica_id, "came back without the quorum", now, decisions)
        for replica_id in sorted(self._joined):  # before this lighthouse knew that a quorum stands
            self._stand_no_more(replica_id, self._joined[replica_id].member.step, now, decisions)

    def _adopt(self, number: QuorumNumber, ids: frozenset[str], now: float) -> None:
        self._number, self._last = number, ids
        self._heard_at, self._find_at = now, None
        missed = {**self._missed, **dict.fromkeys(self._silent, now + self._lease)}
        self._missed = {i: until for i, until in missed.items() if now < until and i not in ids}
        self._gone, self._departed, self._silent = set(), set(), set()
        self._given_up, self._told_at, self._ended_at, self._healing = set(), None, None, set()
        self._alarms = 0

    def _stands(self, stands: bool, now: float) -> None:
        """Record whether the last quorum stands."""
        self._standing = StandingQuorum(self._last, now) if stands else None

    def _use_up(self, quorum_id: int) -> None:
        if quorum_id > self._highest_id:
            self._highest_id = quorum_id + self._leap


def _can_stand(joins: Collection[_Join]) -> bool:
    """Return whether these replicas can go on in their quorum by themselves.

    One alone cannot: it would complete its collectives also where the lighthouse has gone on without it. Nor
    can any before the first step, as newcomers wait for members that have steps only.
    """
    members = [join.as_believed for join in joins]
    return (
        len({member.version for member in members}) == 1 < len(members)
        and members[0].step > 0
        and all(join.in_session for join in joins)
        and all(member.may_stand and not member.commit_failures for member in members)
    )


class StandingQuorum:
    """A quorum that stands: its members go on in it from step to step and ask for nothing.

    A quorum stands if all of its members can go on by themselves: they hold the same state, and the last step
    of each had a collective that no member could complete without all others. It stands until something is
    news. A loss, a broken link or a failed step ends it at once, by the alarm that these are in any quorum.
    News that can wait (a newcomer, a member that leaves or that asks for a quorum by itself) ends it between
    two steps, so that no member loses one:

    1. the lighthouse asks the members to hold;
    2. each answers with the first step that it has not begun, and begins no step until it is told more. A
       member that has asked for a quorum has answered with the step for which it asked, one that has left
       with the step before which it left;
    3. the lighthouse names the greatest step of those that hold, and every member asks for a quorum at that
       step.

    INVARIANT: a member begins no step at which another one asks. Whoever answered in 2 begins none before 3,
    and no step that a member has begun is named in 3. Only one that asks by itself, or leaves, be it after 3,
    cannot do as it is told; where another member has begun a step that it will not do, or it asks at a later
    step than others have come to, the quorum is broken, as by a failed step.

    A member whose session ends has been told nothing and promised nothing: it goes on. So what it promised in
    one session is asked again in the next one, and a step that was named is named again.

    Attributes:
        members: the replica ids.
        since: the time at which it was formed.
        held_for: the replica for which the members were asked to hold; None if they were not.
        ask_at: the step at which all members ask for a quorum; None if it was not named yet.
    """

    def __init__(self, members: Collection[str], since: float) -> None:
        self.members = frozenset(members)
        self.since = since
        self.held_for: str | None = None
        self.ask_at: int | None = None
        self._not_begun: dict[str, int] = {}  # by member that holds: the first step that it has not begun
        self._not_done: dict[str, int] = {}  # by member that has asked or left: the first that it will not do
        self._ends: set[int] = set()  # all of these steps

    def hold(self, replica_id: str) -> list[str]:
        """Begin to hold for a replica; return the members to be asked, none if they were asked before."""
        if self.held_for is not None:
            return []
        self.held_for = replica_id
        return sorted(self.members.difference(self._not_done, self._not_begun))

    def holds(self, member: str, step: int) -> None:
        """Record that a member has not begun this step, and waits before it, unless it has asked by now."""
        if member not in self._not_done:
            self._not_begun[member] = step

    def ends_at(self, member: str, step: int) -> None:
        """Record that a member has asked for a quorum at this step, or has left before it."""
        self._not_begun.pop(member, None)
        self._not_done[member] = step
        self._ends.add(step)

    def came_back(self, member: str) -> None:
        """Forget what a member promised in a session that has ended."""
        self._not_begun.pop(member, None)

    def describe(self, now: float) -> str:
        """Describe since when it stands, or what ends it."""
        if self.held_for is None:
            return f"the quorum stands since {now - self.since:.3f} s: its members ask for no other"
        if self.ask_at is not None:
            return f"the quorum stood; all members ask at step {self.ask_at}, because of {self.held_for}"
        awaited = " ".join(sorted(self.members.difference(self._not_begun, self._not_done)))
        return f"the quorum stood; it is held because of {self.held_for}, still to answer: {awaited}"

    @property
    def holding(self) -> list[str]:
        """The members that wait to be told the step."""
        return sorted(self._not_begun)

    @property
    def is_settled(self) -> bool:
        """Whether every member has answered."""
        return len(self._not_begun) + len(self._not_done) == len(self.members)

    def settle(self) -> None:
        """Name the step at which all ask."""
        self.ask_at = max((self._not_begun or self._not_done).values())

    def not_ended_at(self, step: int) -> str | None:
        """Return a member, if there is one, that has asked or left before a step which others do, or at a
        later one, to which it has not come with them: by a state that it loaded.
        """
        if self._ends <= {step}:  # as a rule: each member that asks comes here
            return None
        others = {member: ended for member, ended in self._not_done.items() if ended != step}
        return min(others, key=others.__getitem__, default=None)
