"""Cores that are broken on purpose, one rule each: the simulation has to catch every one.

A check that cannot fail is worthless. Each mutant forgets a rule that a person could forget; some forget
one that was indeed missing until the simulation found it. A seed that catches each stands beside it;
`python -m tests.simulation --mutants` hunts them anew, and prints how many seeds that took.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lighthouse.core.decisions import Member
from lighthouse.core.quorum import QuorumCore
from tests.simulation.cores import Cores
from tests.simulation.replica import JoinMessage
from tests.simulation.scenario import draw
from tests.simulation.simulation import run
from tests.simulation.world import Process, World
from torchft_like.core import replica_group as group_module
from torchft_like.core.assignment import QuorumMemberLike, QuorumResult
from torchft_like.core.replica_group import Effect, RankQuorum, ReplicaGroup
from torchft_like.core.step import Plan, StepProtocol

SEEDS_MAX = 3000


class Mutant(NamedTuple):
    """A set of cores, one of which lacks a rule; a seed that catches it, and the invariant it breaks."""

    name: str
    lacks: str
    cores: Cores
    seed: int
    invariant: str


class Catch(NamedTuple):
    """After how many seeds a mutant was caught; `seeds` is None if it was not."""

    seeds: int | None
    violation: str | None


def hunt(mutant: Mutant, seeds: Iterable[int]) -> Catch:
    """Run a mutant until the checker objects."""
    for count, seed in enumerate(seeds, 1):
        violation = run(draw(seed), mutant.cores).violation
        if violation is not None:
            return Catch(count, violation)
    return Catch(None, None)


# What these lack is not in one place of their source.


class _TakesTheFarthestForTheJob(QuorumCore):
    def _of_one_job(self, spares: Iterable[Member] = ()) -> tuple[int, dict[str, str]]:
        count, foreign = super()._of_one_job(spares)
        farthest = max(self._joined.values(), key=lambda join: join.member.step).member.replica_id
        others = {i: foreign[farthest] for i in self._joined if i != farthest} if farthest in foreign else {}
        return (1, others) if others else (count, foreign)


class _ReleasesTheSameStepOnly(ReplicaGroup):
    max_step = 0

    def quorum_formed(
        self, quorum_id: int, participants: Sequence[QuorumMemberLike], *more: Any
    ) -> list[Effect]:
        self.max_step = max([member.step for member in participants])
        return super().quorum_formed(quorum_id, participants, *more)

    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        effects = super().rank_voted(group_rank, vote)
        is_same = vote.step == self.max_step
        return [e for e in effects if is_same or not isinstance(e, group_module.StepLostNotice)]


class _HealsFromManyGroups(ReplicaGroup):
    def quorum_formed(
        self, quorum_id: int, participants: Sequence[QuorumMemberLike], *more: Any
    ) -> list[Effect]:
        by_id = {member.replica_id: member for member in participants}
        effects: list[Effect] = []
        for e in super().quorum_formed(quorum_id, participants, *more):
            if isinstance(e, RankQuorum) and e.result.heal and e.group_rank > 0:
                sources = [i for i in e.result.replica_ids if i not in e.result.healing_replica_ids]
                source = sources[e.group_rank % len(sources)]
                result = e.result._replace(
                    recover_src_replica_rank=e.result.replica_ids.index(source),
                    recover_src_manager_address=by_id[source].address,
                )
                effects.append(RankQuorum(e.group_rank, result))
            else:
                effects.append(e)
        return effects


class _KeepsItsProcessGroup(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        is_first = not self.can_communicate
        plan = super().agreed(result, allow_heal)
        if is_first:
            return plan
        self.configured(result.quorum_id)
        return plan._replace(configure=False)


class _LeadsToAnySuchStep(ReplicaGroup):
    def quorum_formed(
        self, quorum_id: int, participants: Sequence[QuorumMemberLike], *more: Any
    ) -> list[Effect]:
        step, newest = max((member.step, member.commit_quorum_id) for member in participants)
        said = [
            m._replace(reached_quorum_id=newest)
            if isinstance(m, JoinMessage) and m.reached_step == step
            else m
            for m in participants
        ]
        return super().quorum_formed(quorum_id, said, *more)


def _counts_its_own_absence(world: World, process: Process) -> float:
    return world.now


# Each mutant with the rule that it lacks, a seed that catches it, and the invariant that it breaks; and what
# is otherwise in it: a text that stands in a method once is another one, or missing, or a method gives the
# same always.
CHANGED = """
reuses ids: a new id for new members (8, monotonic)
QuorumCore._next_id
- self._is_same(chosen) and not self._departed and not failed
+ self._last
believes claims: a step counts where history shows it (334, no_regress)
QuorumCore._form
- self._claims.unproven([join.member for join in self._joined.values()])
+ ()
forgets reported ids: ids above all that replicas have seen (5, monotonic)
QuorumCore._use_up = None
forgets the majority: more than half of the healthy, for a late quorum (250, one_quorum_per_step)
QuorumCore._state_of_any_job
- joined <= healthy // 2
+ False
goes back: newcomers wait for a member that alone has the steps (122, no_regress)
QuorumCore._would_go_back = False
ignores min replicas: quorums of min_replicas and more (3, one_quorum_per_step)
QuorumCore.__init__
- self._min_replicas, self._places = config.min_replicas
+ self._min_replicas, self._places = 1
keeps the id after a failure: a new id after a failed commit (0, progress)
QuorumCore._next_id
- and not self._departed and not failed
forgets rounds: telling apart two quorums with one id (447, progress)
QuorumCore.register
- decisions = self.advance(now)
+ decisions = self.advance(now)
+     if last.quorum_id == self._number.quorum_id:
+         last = self._number
does not say it is over: the alarm that a replica missed (359, progress)
QuorumCore._is_over = False
does not warn of broken groups: the alarm for who gave a quorum up (9, progress)
QuorumCore._break = None
forgets whom it broke for: the loss of one that gave a quorum up is told in it, too (2320, progress)
QuorumCore._break
- self._departed.add(replica_id)
+ self._departed.add(replica_id)
+     self._gone.add(replica_id)
learns too late: what is reported after a quorum is of the past (71, progress)
QuorumCore._learn
- or self._has_formed
keeps the dead: a lost session ends the membership (2, progress)
QuorumCore.lost
- if replica_id is not None
+ if False
leaves nobody out: two who cannot reach each other in one quorum (7, progress)
QuorumCore.report_links
- if replica_id is not None
+ if False
leaves both ends out: as few as possible are left out (3, one_quorum_per_step)
QuorumCore._choose
- leave_out({i: join.as_believed for i, join in chosen.items()}, links, at_least)
+ ends if len(ends := {end for link in links for end in link}) < len(chosen) else ()
leaves the slower behind: members of a quorum have the same time to join (506, progress)
QuorumCore._look_for_end = None
gives the reconnected no time: a session counts for a while (118842, one_quorum_per_step)
QuorumCore._awaited
- max(end, self._told_at + self._join_timeout)
+ self._told_at + self._join_timeout
awaits the idle for ever: who does not join counts until join_timeout only (1, progress)
QuorumCore._awaited
- if now < end
+ if now < (end := math.inf)
ends heals for want of others: a no where only too few take part releases no rank of the group (458, progress)
ReplicaGroup.rank_voted
- _says_lost(vote)
+ not (vote.committed or vote.passed)
waits for no heal: a member that heals has the time that its operations have (286, progress)
QuorumCore._await_healing = None
waits for a heal for ever: nobody waits for a heal longer than for an operation (286, progress)
QuorumCore._await_healing
- , *others)
+ , math.inf)
shrinks for ever: a wish to shrink that no quorum can heed is void (5, progress)
QuorumCore._is_shrinking
- if not self._shrinking:
+ if self._shrinking and self._last:
+         return True
+     if True:
shrinks to a minority: a wish to shrink is void if stragglers are most (3682, one_quorum_per_step)
QuorumCore._is_shrinking
- max(self._min_replicas, self._majority(now))
+ self._min_replicas
leaves too many out: at least half stay where some are left out (195, one_quorum_per_step)
QuorumCore._choose
- max(self._min_replicas, counted - counted // 2)
+ self._min_replicas
never lets back: whoever can be reached again is let in (67, progress)
QuorumCore.report_links
- if replica_id is not None
+ if replica_id is not None and unreachable
forgets the sick: who spoils quorums by itself is left out of them (1, progress)
QuorumCore._sick = {}
leaves the sick out for ever: who was left out is tried again (104, progress)
QuorumCore._sick
- now < join.let_in_at
+ join.let_in_at
blames the victims: who is left out is the one that failed by itself (1, progress)
QuorumCore._sick
- now < join.let_in_at
+ any(now < each.let_in_at for each in joins.values()) and now >= join.let_in_at
leaves all sick out: min_replicas, and half of those that count, stay (33, one_quorum_per_step)
QuorumCore._choose
- leave_out_sick({i: join.as_believed for i, join in chosen.items()}, sick, at_least)
+ sick if len(sick) < len(chosen) else ()
stands in the way of the cured: the end of a pause ends a quorum that stands (250, progress)
QuorumCore.advance
- self._hold(replica_id, decisions)
+ pass
counts members only: a new id where one is out for another one (49, progress)
QuorumCore._is_same
- len(chosen) == len(self._joined) or chosen.keys() == self._last
+ True
leaves behind in silence: who was too slow hears that it is over (93, progress)
QuorumCore._form
- decisions.append(QuorumOver(session.number, replica_id, last_id))
+ pass
keeps no distance: no id twice where the clock was set back (71, monotonic)
QuorumCore._use_up
- quorum_id + self._leap
+ quorum_id
names any step: who asks at a later step has not come there with others (46, progress)
QuorumCore._hold
- standing.not_ended_at(step)) is not None
+ standing.not_ended_at(step)) is not None and standing._not_done[apart] < step
lets a foreign state in: who differs from the job is refused (1, heal_is_clean)
QuorumCore.identify
- if replica_id is not None
+ if False
refuses at the first quorum only: the job is that of the members (1, heal_is_clean)
QuorumCore._of_one_job
- return self
+ return (len(self._joined), {}) if self._last else self
QuorumCore._refuse_foreign
- if replica_id in self._last
+ if True
says not who it is: a replica group says whose state it has (1, heal_is_clean)
ReplicaGroup._identify = Identity()
says once who it is: a new lighthouse hears whose state it is (7, heal_is_clean)
ReplicaGroup.lighthouse_connected
- report.insert(0, GroupIdentity(self._identity))
+ pass
lets them hold: who holds when its quorum is given up goes on (145, progress)
ReplicaGroup._told_to_ask_at
- , ReleaseRanks(self._not_joined(), self.last_quorum_id, None)]
+ ]
gives up quietly: a rank that gives a step up releases the others (1205, progress)
ReplicaGroup._release_others = []
refuses no votes: votes on a step that a rank gave up are answered (0, progress)
ReplicaGroup._refuse_votes = []
answers nobody late: a rank that asks when its group has left is told (1277, progress)
ReplicaGroup.rank_joined
- [GroupLeftNotice((join.group_rank,), self.lost_reason, self.is_foreign)]
+ []
ReplicaGroup.rank_voted
- [GroupLeftNotice((group_rank,), self.lost_reason, self.is_foreign)]
+ []
leaves without a word: a leave is told to ranks that wait (8, progress)
ReplicaGroup.rank_left
- [*going_on, *[GroupLeftNotice(waiting, notice.reason) for notice in notices]]
+ []
stops one rank only: all ranks leave after the same step (36, leave_together)
ReplicaGroup.rank_voted
- common._replace(step=vote.step)
+ common._replace(step=vote.step, stop=vote.stop)
waits in vain: one that was asked to stop waits for a quorum for a while only (6, progress)
ReplicaGroup.rank_voted
- if vote.stop and group_rank
+ if False and group_rank
leaves others waiting: all ranks leave where no quorum comes (6, leave_together)
ReplicaGroup._leave
- range(self.world_size)
+ ()
ReplicaGroup._leave
- {rank: join.step for rank, join in self._joins.items()}
+ {}
leaves others holding: all ranks leave where those that stand hold (83, leave_together)
ReplicaGroup._leave
- range(self.world_size)
+ ()
ReplicaGroup._leave
- steps |= self._held or {}
+ pass
holds at two steps: without a lighthouse the ranks of a group hold at one step (608, progress)
ReplicaGroup._all_hold
- or (self._is_alone and
+ or (False and
goes on torn: a group whose ranks hold different states heals or ends (129, heal_is_clean)
ReplicaGroup.quorum_formed
- if self._is_torn and
+ if False and
keeps steps that failed: a step that failed is thrown away (4624, heal_is_clean)
StepProtocol.passes
- and self.failure is None
forgets the last kept step: each kept step is taken (16, heal_is_clean)
StepProtocol.steps_to_take
- in self.catch_up.kept]
+ in self.catch_up.kept[:-1]]
takes a kept step twice: each kept step is taken once (16, heal_is_clean)
StepProtocol.steps_to_take
- in self.catch_up.kept]
+ in [*self.catch_up.kept, *self.catch_up.kept[-1:]]]
takes kept steps in reverse: kept steps are taken in their order (16, heal_is_clean)
StepProtocol.steps_to_take
- in self.catch_up.kept]
+ in self.catch_up.kept[::-1]]
speaks as the newest: who catches up has the version that it had before (16, heal_is_clean)
StepProtocol.begin
- step=self.step,
+ step=max(self.step, reached.step),
StepProtocol.begin
- commit_quorum_id=self.commit_quorum_id,
+ commit_quorum_id=max(self.commit_quorum_id, reached.commit_quorum_id),
commits what it keeps: who catches up commits nothing (16, heal_is_clean)
StepProtocol.vote
- self.objection is None
+ self.objection is None or self.passes
waits for no state: where a step cannot be kept, the state is awaited (18, progress)
StepProtocol.loads
- or (self.failure is None and not can_keep)
begins before the fetch: kept steps are those since the fetched state (5781, heal_is_clean)
StepProtocol.agreed
- self._choose_participants(result, allow_heal)
+ self._choose_participants(result, allow_heal)
+     if result.begins_to_catch_up and allow_heal:
+         self.begin_to_catch_up(Version(result.max_step, result.max_commit_quorum_id))
keeps what one rank keeps: all ranks keep a step, or none (1844, heal_is_clean)
ReplicaGroup.rank_voted
- passed=same_step and all(
+ passed=any(
goes on after giving up: a step given up leaves its process group (10, progress)
StepProtocol.begin
- if self.in_step and self._agreed and self._is_entered
+ if False
votes yes unhealed: who could not heal does not commit (16, heal_is_clean)
StepProtocol.objection
- if self._lacks_state
+ if False
asks no source that is alive: one that gave its step up goes on offering its state (209, progress)
StepProtocol.ends_fetch
- not notice.is_alive or notice.replica_id == own
+ True
leaves no state behind: who gives a step up offers its state (397, progress)
StepProtocol.still_has = False
asks whom it cannot reach: who gives its step up for a link asks nobody (1619, progress)
StepProtocol.ends_fetch
- or notice.replica_id == own
keeps an early error to itself: peers hear of an early error (203, progress)
StepProtocol.agreed
- self.fail(result.quorum_id, self._failure_before_quorum, own=self._own_failure_before_quorum)
+ self._failures[result.quorum_id] = self._failure_before_quorum
owns what it spoilt: a state that was changed in part is of no version (1, heal_is_clean)
StepProtocol.disown_state
- if self.commit_quorum_id != NO_STATE
+ if False
takes the spoilt for equal: states of no version are not equal (54, heal_is_clean)
StepProtocol.disown_state
- self.commit_quorum_id = DISOWNED
+ self.commit_quorum_id = 0
takes every step for bound: a step without a collective asks first (5, progress)
StepProtocol.stand
- self._has_gone_on = True
+ self._has_gone_on = self.is_bound = True
names the quorum of a checkpoint: a checkpoint speaks against no later step (200477, no_regress)
StepProtocol.restore
- counters = {**counters, "commit_quorum_id": 0}
+ pass
stands after a restore: who has loaded a state asks for a quorum (61, heal_is_clean)
StepProtocol._take_over
- self._stands, self.catch_up = False, None
+ self.catch_up = None
waits beside those that leave: who waits for a quorum leaves with the others (6, progress)
StepProtocol.hear
- verdict.stop and self.give_up()
+ False
holds beside those that leave: who holds leaves with the others (83, progress)
StepProtocol.give_up
- self.ask_instead_of_holding()
+ pass
commits in vain: what waits for a quorum no more is not committed (13, heal_is_clean)
StepProtocol.give_up
- self._failure_before_quorum = self._failure_before_quorum or StepLostError(IN_VAIN)
+ pass
is ended by a quicker rank: all ranks leave, though one is the first (4416, leave_together)
StepProtocol.is_leaving = False
drops member lost: the alarm reaches the ranks (2, progress)
ReplicaGroup.member_lost = []
one vote is enough: every rank has to vote yes (0, heal_is_clean)
ReplicaGroup.rank_voted
- all(vote.committed for
+ any(vote.committed for
ReplicaGroup.rank_voted
- if is_news else []
+ if False else []
every rank its own verdict: one verdict for all ranks (0, agreement)
ReplicaGroup.rank_voted
- common._replace(step=vote.step)
+ vote
keeps its no to itself: the first no releases the other ranks (237, progress)
ReplicaGroup.rank_voted
- if is_news else []
+ if False else []
joins once only: the join is repeated after a reconnect (0, progress)
ReplicaGroup.lighthouse_connected = []
compares steps only: the quorum of the commit in the version (5, heal_is_clean)
ReplicaGroup.quorum_formed
- assign(quorum_id, participants
+ assign(quorum_id, [m._replace(commit_quorum_id=0) for m in participants]
speaks for its first rank: the state of all ranks in the join (129, heal_is_clean)
ReplicaGroup.rank_joined
- step, commit_quorum_id = (0, NO_STATE) if self._is_torn else versions.pop()
+ self._is_torn, step, commit_quorum_id = False, joins[0].step, joins[0].commit_quorum_id
survives its ranks: a lost rank ends its group (0, progress)
ReplicaGroup.rank_lost = []
probes nobody: the search for a link after a failed step (7, progress)
ReplicaGroup.rank_joined
- self._metadata[join.group_rank] = join.checkpoint_metadata
+ self._metadata[join.group_rank] = join.checkpoint_metadata
+     self._links.quorum_formed(())
probes once: whoever could not be reached is probed again (67, progress)
ReplicaGroup.probed
- *probes,
never tries again: a step that waits for long for a known link is given up (80, progress)
ReplicaGroup.step_stalled
- if for_long and
+ if False and
gives nothing up: a step that waits for whom it cannot reach is given up (64, progress)
ReplicaGroup.step_stalled
- if for_long and
+ if False and
ReplicaGroup.probed
- [*effects, self._give_up(out_of_reach)]
+ effects
reports links once: links are reported again, after a reconnect or in a quorum (65, progress)
ReplicaGroup.lighthouse_connected
- [BrokenLinks(unreachable)] if unreachable else []
+ []
ReplicaGroup.quorum_formed
- [*answers, *report]
+ answers
applies late errors: an error belongs to its quorum (34, no_zombie)
StepProtocol.fail
- if quorum_id < self.quorum_id
+ if (quorum_id := max(quorum_id, self.quorum_id)) < self.quorum_id
commits before healing: who is behind heals first (0, heal_is_clean)
StepProtocol.agreed
- self.healing = self._lacks_state
+ self._lacks_state
StepProtocol.agreed
- heal=result.heal and allow_heal
+ heal=False
healing takes part: who heals adds zeros (0, heal_is_clean)
StepProtocol.is_participating = True
counts who heals: averages are over those who add something (0, no_zombie)
StepProtocol._choose_participants
- self.num_participants = rank, size
+ self.num_participants = rank, result.replica_world_size
lets others go on: who is counted and cannot heal spoils the step (14, no_zombie)
StepProtocol.is_counted_on = False
loads alone: all ranks of a group have a state that they load (25, heal_is_clean)
ReplicaGroup.rank_voted
- has_fetched=all(
+ has_fetched=any(
keeps a torn state: who has a part of a peer's state has none (129, heal_is_clean)
StepProtocol.lose_state = None
counts on those that heal: in a first step its source's gradients count (149753, heal_is_clean)
StepProtocol._choose_participants
- result.late_ranks if
+ result.late_ranks if result.max_world_size == result.replica_world_size and
votes yes after an error: a failed step is not committed (0, heal_is_clean)
StepProtocol.vote
- self.objection is None
+ self._are_enough
keeps the old commit quorum: the quorum of the commit in the version (58, heal_is_clean)
StepProtocol.decide
- self.commit_quorum_id = self.quorum_id
+ pass
leaves quietly: who leaves after a failed step alarms the others (11, progress)
StepProtocol.leaves_in_order
- and self.commit_failures == 0
hides broken groups: who needs a new process group says so (83, no_zombie)
StepProtocol.begin
- failures = max(self.commit_failures, int(broken > 0))
+ failures = broken = 0
takes any answer: a rank takes the answer to its last request only (57538, progress)
StepProtocol.awaits
- and result.request in (0, self._attempts)
forgets what it missed: who asked again before it heard of a quorum gives that up (7190, progress)
ReplicaGroup._with_what_it_missed
- if join.answered >= self._answered.get(join.group_rank, 0)
+ if True
meets nobody: the others are told of a quorum in which nobody here is (384, progress)
ReplicaGroup._meet_nobody = []
forgets the healed version: a heal takes over the whole version (131, progress)
StepProtocol.heal
- self._take_over(counters)
+ self._take_over({**counters, "commit_quorum_id": self.commit_quorum_id})
lets spares in: a spare waits until a place is free (12, spares_wait)
QuorumCore.register
- if spare and
+ if False and
leaves places empty: a spare takes a free place (4, progress)
QuorumCore._fill_places = None
lets spares in too early: no spare is let in while members wish to shrink (116, spares_wait)
QuorumCore._fill_places
- or self._is_shrinking(now)
lets spares in for strangers: a spare helps others of its job only (700516, spares_wait)
QuorumCore._is_short_of_spares
- self._of_one_job(spares)[0] >= at_least
+ True
holds nobody for spares: a free place ends a quorum that stands (1636, progress)
QuorumCore._fill_places
- return self._hold(spare.replica_id, decisions)
+ return None
holds nobody: a newcomer ends a quorum that stands (83, progress)
QuorumCore._hold = None
asks nobody again: a new session is told what the last one missed (11425, progress)
QuorumCore._remind = None
forgets that it stands: a restart, while a quorum stands (573, progress)
QuorumCore._learn
- self._stands(stands, now)
+ self._stands(False, now)
names the first step: no member has begun the step that is named (4976, no_zombie)
QuorumCore._hold
- standing.settle()
+ standing.ask_at = min((standing._not_begun or standing._not_done).values())
waits for one answer: every member answers before a step is named (145, no_zombie)
QuorumCore.hold
- standing.holds(replica_id, step)
+ unanswered = standing.members.difference(standing._not_begun, standing._not_done)
+         standing._not_begun |= dict.fromkeys(unanswered, step)
+         standing.holds(replica_id, step)
lets all quorums stand: a quorum in which somebody heals does not stand (22, progress)
QuorumCore._next_quorum
- self._stands(stands, now)
+ stands = not self._joined
+     self._stands(stands, now)
forms beside the silent: members that are silent may go on in their quorum (255, one_quorum_per_step)
QuorumCore._awaits_silent = False
goes on for ever: members that hear nothing give their quorum up in time (255, one_quorum_per_step)
ReplicaGroup.lease_ended = []
commits after the lease: a step is lost where the lease ends in it (14719, one_quorum_per_step)
ReplicaGroup.lease_ended
- ._replace(must_fail=True)
answers for one rank: the steps of all ranks in the answer (657, no_zombie)
ReplicaGroup.rank_holds
- self._held[group_rank] = step
+ self._held = dict.fromkeys(range(self.world_size), step)
holds without a lighthouse: who holds goes on when nobody tells when (851, progress)
ReplicaGroup._go_on = []
tells one rank only: all ranks ask at the same step (83, progress)
ReplicaGroup.released
- ReleaseRanks(self._not_joined()
+ ReleaseRanks(self._not_joined()[:1]
does not hold: who was asked to hold begins no step (1023, no_zombie)
StepProtocol.hold
- self._is_held = self._stands
+ self._is_held = False
forgets what it began: the answer counts the step that was begun (35, no_zombie)
StepProtocol.hold
- self.step + int(self.in_step and self._is_entered)
+ self.step
asks at once: all members ask at the step that was named (4976, no_zombie)
StepProtocol.released
- self._ask_at = step
+ self._ask_at = step = self.step + int(self.in_step and self._is_entered)
keeps its failures to itself: who spoils a quorum by itself says so (1, progress)
StepProtocol.begin
- own_failure=self._own_failure,
+ own_failure="",
takes all errors for its own: what others have caused does not count (1, progress)
StepProtocol.fail
- self._blame_itself(quorum_id, own)
+ self._blame_itself(quorum_id, own or "an error")
StepProtocol.group_broke
- self._broken.add(quorum_id)
+ self._blame_itself(quorum_id, "an error")
+     self._broken.add(quorum_id)
goes on after failures: after a failed step a quorum is asked for (27, no_zombie)
StepProtocol.decide
- self._was_bound = committed and self.is_bound
+ self._was_bound = True
fails for the quorum that is over: what ended a quorum fails no step in the next (2173, no_zombie)
StepProtocol.ask_instead
- if self._is_entered:
+ if True:
takes suspects for dead: a rank that answers again goes on (2, suspicion)
ReplicaGroup.rank_suspected
- was_away, self._suspects = bool(self._suspects), self._suspects | {group_rank}
+ return [*self.rank_lost(group_rank, reason)]
commits without suspects: a group commits nothing without a rank (8127, suspicion)
ReplicaGroup.rank_suspected
- [*away, notice, *self._refuse_votes(), *self._end_quorum()]
+ away
ReplicaGroup.rank_voted
- if self._joins or self._suspects
+ if self._joins
lets others wait: the others go on without a suspect's group (25, progress)
ReplicaGroup.rank_suspected
- [*away, notice
+ [notice
stays away: a group whose ranks all answer again is back (2, progress)
ReplicaGroup.rank_resumed
- , *back]
+ ]
lets any process in: no other process takes a rank's place (40, suspicion)
ReplicaGroup.rank_registered = True
waits for ever: a rank that is silent for the dead time is lost (190, progress)
ReplicaGroup.rank_lost
- return self._lose(
+ return [] if group_rank in self._suspects else self._lose(
repeats nothing: what a session lost is said again in the next one (2, progress)
Conversation.to_repeat = ()
repeats everything: what has arrived is not said again (4600, agreement)
Conversation.arrived = True
loses the delay: a sync ends so many inner steps after its begin (230, on_schedule)
SyncSchedule.received
- or self._steps < self._interval
loses what is under way: a sync that has begun comes to its end (6, progress)
SyncSchedule.sent = None
counts syncs that failed: all sync the same fragment (6, agreement)
SyncSchedule.next_fragment
- return syncs
+ self._begun = getattr(self, "_begun", 0) + 1
+     return self._begun
applies a failed sync: a failed sync changes no global parameters (6, no_trace)
Fragments.receive
- if committed:
+ if committed := True:
keeps failed inner steps: after a failed sync a fragment begins anew (6, no_trace)
Fragments.receive
- self.local[fragment] = self.global_[fragment], kept
+ if committed:
+         self.local[fragment] = self.global_[fragment], kept
steps from local parameters: the outer step is from global ones (6, agreement)
Fragments._step_outer
- mix(self.global_[fragment]
+ mix(mix(*self.local[fragment])
heals without the outer state: the outer state heals with the rest (6, heal_is_clean)
Fragments.load
- list(outer)
+ self.outer
heals without global parameters: global parameters heal with the rest (6, heal_is_clean)
Fragments.load
- list(shared)
+ self.global_
heals without local parameters: the model heals with its global parameters (6, heal_is_clean)
Fragments.load
- list(local)
+ self.local
keeps half a step: a state is kept once the script is done with its last step (2583, heal_is_clean)
StepProtocol.decide
- self._is_settled = False
+ self._is_settled = True
takes any kept state: a kept state is of the step and quorum of the newest (151, heal_is_clean)
StepProtocol.takes = True
tells two of a place: a place is told to one spare (1898, one_process_per_place)
Vacancies._on_its_way = None
forgets lost spares: the place of a lost spare is told to another one (1706, progress)
Vacancies.lost
- self._free(spare)
+ pass
keeps declining spares: a spare that has declined is free again (3095, progress)
Vacancies.declined = []
takes a taken place: the first spare has the place (87, one_process_per_place)
MeetingProtocol._take
- said = yield from _put(_taken(attempt, self.own.rank), self._admission)
+ said = self._admission
+         yield Write(_taken(attempt, self.own.rank), said.text())
leaves no word: who has left a meeting says so in the next store (9687, progress)
MeetingProtocol._leave_word = ()
says nothing of the dead: the others speak for a rank that has ended (10, progress)
MeetingProtocol._agree_in
- in sorted(self._gone.items())
+ in ()
keeps the dead in mind: a place that a spare has taken has a rank (87, one_process_per_place)
MeetingProtocol._admit
- self._gone.pop(rank, None)
+ pass
goes on alone: a spare that finds nobody left gives up (5367, progress)
MeetingProtocol.visit
- self._record(_ADMITTED), False
+ self._record(_ADMITTED), True
goes on in smaller sides: of two sides of a cut one goes on (458, one_process_per_place)
MeetingProtocol.silent
- or not (is_half or 2 * len(answer) > len(voters))
asks nobody when it is back: who was passed over ends (599, progress)
MeetingProtocol._ask_whether_passed_over = ()
begins without a rank: no try begins without a rank (10, one_process_per_place)
MeetingProtocol._agree_in
- each.told(rank) for
+ Told(Ending.SECONDHAND, "gone") if each.ending == Ending.GONE.value else each.told(rank) for
"""
HEAD = r"(.*?): (.*) \((\d+), (\w+)\)\n"
CHANGE = r"^(\w+)\.(\w+)(?: = (.*)|\n- (.*)\n((?:\+ .*\n)*))"


def _read(entry: str) -> Mutant:
    """Return a mutant of `CHANGED`."""
    classes = {core.__name__: core for core in Cores() if isinstance(core, type)}
    head = re.match(HEAD, entry)
    assert head is not None, entry
    sources: dict[str, str] = {}  # a method may be changed in several places
    made: dict[str, Any] = {}
    for core, method, value, old, new in re.findall(CHANGE, entry[head.end() :], re.MULTILINE):
        base, found = classes[core], getattr(classes[core], method)
        sources.setdefault(method, textwrap.dedent(inspect.getsource(getattr(found, "fget", found))))
        if value:
            decorator = "@property\n" * isinstance(found, property)
            sources[method] = f"{decorator}def {method}(*_, **__):\n    return {value}"
        elif sources[method].count(old) != 1:
            raise ValueError(f"{head[1]}: in {core}.{method} there is not once {old}")
        else:
            sources[method] = sources[method].replace(old, "\n".join(line[2:] for line in new.splitlines()))
        exec(sources[method], vars(sys.modules[base.__module__]), made)
    return _mutant(type("_Changed", (base,), made), head[2], int(head[3]), head[4], head[1])


def _mutant(core: type[Any], lacks: str, seed: int, invariant: str, name: str = "") -> Mutant:
    """Return the mutant that has this core; it is called as the class is, unless it has another name."""
    name = name or re.sub("(?<!^)([A-Z])", r" \1", core.__name__[1:]).lower()
    parts = {part: base for part, base in Cores()._asdict().items() if isinstance(base, type)}
    (part,) = (part for part, base in parts.items() if issubclass(core, base))
    return Mutant(name, lacks, Cores()._replace(**{part: core}), seed, invariant)


MUTANTS = (
    *map(_read, re.split(r"^(?=[a-z])", CHANGED, flags=re.MULTILINE)[1:]),
    _mutant(_TakesTheFarthestForTheJob, "the job is that of most of them", 1, "progress"),
    _mutant(_ReleasesTheSameStepOnly, "a no releases ranks that have healed, too", 1325, "progress"),
    _mutant(_HealsFromManyGroups, "all ranks of a group heal from the same one", 8, "progress"),
    _mutant(_KeepsItsProcessGroup, "every quorum has a process group of its own", 8, "no_zombie"),
    _mutant(_LeadsToAnySuchStep, "kept steps lead to the state of a quorum", 47892, "heal_is_clean"),
    Mutant(
        "counts its own absence",
        "one that was stopped itself accuses nobody",
        Cores(heard=_counts_its_own_absence),
        67,
        "suspicion",
    ),
)
