"""Cores that are broken on purpose, one rule each: the simulation has to catch every one.

A check that cannot fail is worthless. Each mutant forgets a rule that a person could forget; some forget
one that was indeed missing until the simulation found it. `MUTANTS` has a seed that catches each;
`python -m tests.simulation --mutants` hunts them anew, and prints how many seeds that took.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lighthouse.core.claims import Claims
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Decision, Link, Member, QuorumOver, QuorumState
from lighthouse.core.identity import Identity
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.core.standing import StandingQuorum
from lighthouse.core.vacancies import Decision as VacancyDecision
from lighthouse.core.vacancies import Vacancies
from tests.simulation.cores import Cores
from tests.simulation.fragments import Fragments, Held, mix
from tests.simulation.replica import JoinMessage
from tests.simulation.scenario import draw
from tests.simulation.simulation import run
from tests.simulation.world import Process, World
from torchft_like.core import replica_group as group_module
from torchft_like.core.assignment import QuorumMemberLike, QuorumResult
from torchft_like.core.catch_up import Version
from torchft_like.core.conversation import Conversation
from torchft_like.core.meeting import MeetingProtocol, Record, Steps, Write
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import Effect, RankJoin, RankQuorum, RankVerdict, ReplicaGroup
from torchft_like.core.restarts import Ending, RankProcess, Told
from torchft_like.core.step import Plan, StepProtocol
from torchft_like.core.sync_schedule import SyncSchedule

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


# -- the lighthouse


class _ReusesIds(QuorumCore):
    def _next_id(self, chosen: Any) -> int:
        return self._number.quorum_id if self._last else super()._next_id(chosen)


class _Credulous(Claims):
    def unproven(self, joined: Sequence[Member]) -> frozenset[str]:
        return frozenset()


class _BelievesClaims(QuorumCore):
    def __init__(self, config: LighthouseConfig, first_quorum_id: int) -> None:
        super().__init__(config, first_quorum_id)
        self._claims = _Credulous()


class _ForgetsTheMajority(QuorumCore):
    def _state(self, now: float) -> QuorumState:
        state = super()._state(now)
        if state is QuorumState.NO_MAJORITY:
            return QuorumState.LATE if now >= self._late_at() else QuorumState.STRAGGLERS
        return state


class _LeavesTheSlowerBehind(QuorumCore):
    def _look_for_end(self, now: float) -> None:
        pass


class _GivesTheReconnectedNoTime(QuorumCore):
    def _awaited(self, now: float) -> dict[str, float]:
        is_over = self._told_at is not None and now >= self._told_at + self._join_timeout
        ended = self._last - self._given_up if is_over else frozenset()
        return {i: end for i, end in super()._awaited(now).items() if i not in ended}


class _GoesBack(QuorumCore):
    def _would_go_back(self, now: float) -> bool:
        return False


class _IgnoresMinReplicas(QuorumCore):
    def _candidates(self, now: float) -> int:
        return max(super()._candidates(now), self._min_replicas)

    def _of_one_job(self) -> tuple[int, dict[str, str]]:
        count, foreign = super()._of_one_job()
        return max(count, self._min_replicas), foreign


class _KeepsTheIdAfterAFailure(QuorumCore):
    def _next_id(self, chosen: Any) -> int:
        if self._last and self._is_same(chosen):
            return self._number.quorum_id
        return super()._next_id(chosen)


class _ForgetsRounds(QuorumCore):
    def register(self, session: int, replica_id: str, last: QuorumNumber, *more: Any) -> list[Decision]:
        round_number = self._number.round if last.quorum_id == self._number.quorum_id else last.round
        number = QuorumNumber(last.quorum_id, round_number)
        return super().register(session, replica_id, number, *more)


class _LearnsTooLate(QuorumCore):
    def _learn(self, *reported: Any) -> None:
        self._has_formed = False
        super()._learn(*reported)


class _KeepsTheDead(QuorumCore):
    def lost(self, session: int, reason: str, now: float) -> list[Decision]:
        return self.advance(now)


class _LeavesNobodyOut(QuorumCore):
    def report_links(self, session: int, unreachable: Sequence[str], now: float) -> list[Decision]:
        return self.advance(now)


class _LeavesBothEndsOut(QuorumCore):
    def _choose(self, now: float) -> tuple[dict[str, Any], tuple[Link, ...]]:
        _, links = super()._choose(now)
        ends = {end for link in links for end in link}
        return {i: join for i, join in self._joined.items() if i not in ends}, links


class _LeavesTooManyOut(QuorumCore):
    is_choosing = False

    def _choose(self, now: float) -> tuple[dict[str, Any], tuple[Link, ...]]:
        self.is_choosing = True
        chosen = super()._choose(now)
        self.is_choosing = False
        return chosen

    def _majority(self, now: float) -> int:
        return 0 if self.is_choosing else super()._majority(now)


class _AwaitsTheIdleForEver(QuorumCore):
    def _awaited(self, now: float) -> dict[str, float]:
        return {i: math.inf for i in self._healthy.ids() if i not in self._joined}


class _ShrinksForEver(QuorumCore):
    def _is_shrinking(self, now: float) -> bool:
        return bool(self._shrinking and self._last)


class _ShrinksToAMinority(QuorumCore):
    def _is_shrinking(self, now: float) -> bool:
        members = [join.member for i, join in self._joined.items() if i in self._last]
        is_enough = len(members) >= self._min_replicas
        return super()._is_shrinking(now) or (is_enough and any(member.shrink_only for member in members))


class _FormsBesideTheSilent(QuorumCore):
    def _awaits_silent(self, now: float) -> bool:
        return False


class _NeverLetsBack(QuorumCore):
    def report_links(self, session: int, unreachable: Sequence[str], now: float) -> list[Decision]:
        return super().report_links(session, unreachable, now) if unreachable else self.advance(now)


class _CountsMembersOnly(QuorumCore):
    def _is_same(self, chosen: Any) -> bool:
        return not self._missing and len(chosen) == len(self._last)


class _LeavesTheSickOutForEver(QuorumCore):
    def _sick(self, now: float, joins: Any) -> dict[str, str]:
        return {i: "" for i, join in joins.items() if join.let_in_at > 0}


class _BlamesTheVictims(QuorumCore):
    def _sick(self, now: float, joins: Any) -> dict[str, str]:
        sick = super()._sick(now, joins)
        return {i: "" for i in joins if i not in sick} if sick else {}


class _LeavesAllSickOut(QuorumCore):
    def _choose(self, now: float) -> tuple[dict[str, Any], tuple[Link, ...]]:
        chosen, links = super()._choose(now)
        well = {i: join for i, join in chosen.items() if now >= join.let_in_at}
        return well or chosen, links


class _LetsAForeignStateIn(QuorumCore):
    def identify(self, session: int, identity: Identity, now: float) -> list[Decision]:
        return self.advance(now)


class _RefusesAtTheFirstQuorumOnly(QuorumCore):
    def _of_one_job(self) -> tuple[int, dict[str, str]]:
        return super()._of_one_job() if not self._last else (len(self._joined), {})

    def _refuse_foreign(self, replica_id: str, decisions: list[Decision]) -> bool:
        return False


class _TakesTheFarthestForTheJob(QuorumCore):
    def _of_one_job(self) -> tuple[int, dict[str, str]]:
        count, foreign = super()._of_one_job()
        farthest = max(self._joined.values(), key=lambda join: join.member.step).member.replica_id
        others = {i: foreign[farthest] for i in self._joined if i != farthest} if farthest in foreign else {}
        return (1, others) if others else (count, foreign)


class _StandsInTheWayOfTheCured(QuorumCore):
    def _hold(self, replica_id: str, decisions: list[Decision]) -> None:
        join = self._joined.get(replica_id)
        if join is None or not join.let_in_at:
            super()._hold(replica_id, decisions)


class _LeavesBehindInSilence(QuorumCore):
    def _form(self, now: float, decisions: list[Decision]) -> None:
        before = len(decisions)
        super()._form(now, decisions)
        decisions[before:] = [each for each in decisions[before:] if not isinstance(each, QuorumOver)]


class _KeepsNoDistance(QuorumCore):
    def _use_up(self, quorum_id: int) -> None:
        self._highest_id = max(self._highest_id, quorum_id)


# -- the replica group


def _changed(effects: Iterable[Effect], **fields: bool) -> list[Effect]:
    """Return the effects, with these fields in each verdict."""
    return [
        e._replace(verdict=e.verdict._replace(**fields)) if isinstance(e, RankVerdict) else e for e in effects
    ]


class _OneVoteIsEnough(ReplicaGroup):
    has_one = False

    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        has_one = self.has_one or vote.committed
        effects = super().rank_voted(group_rank, vote._replace(committed=True))
        self.has_one = has_one and not effects
        return _changed(effects, committed=has_one)


class _EveryRankItsOwnVerdict(ReplicaGroup):
    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        votes = {**self._votes, group_rank: vote}
        return [
            RankVerdict(e.group_rank, votes[e.group_rank]) if isinstance(e, RankVerdict) else e
            for e in super().rank_voted(group_rank, vote)
        ]


class _ComparesStepsOnly(ReplicaGroup):
    def quorum_formed(
        self, quorum_id: int, participants: Sequence[QuorumMemberLike], *more: Any
    ) -> list[Effect]:
        same = [m._replace(commit_quorum_id=0) if isinstance(m, JoinMessage) else m for m in participants]
        return super().quorum_formed(quorum_id, same, *more)


class _SpeaksForItsFirstRank(ReplicaGroup):
    def rank_joined(self, join: RankJoin) -> list[Effect]:
        effects = super().rank_joined(join)
        self._is_torn = False
        if self._open_join is None or len(self._joins) < self.world_size:
            return effects
        first = self._joins[min(self._joins)]
        told = self._open_join._replace(step=first.step, commit_quorum_id=first.commit_quorum_id)
        self._open_join = told
        return [told if isinstance(effect, group_module.GroupJoin) else effect for effect in effects]


class _NeverTriesAgain(ReplicaGroup):
    def step_stalled(self, quorum_id: int, *, for_long: bool = False) -> list[Effect]:
        return super().step_stalled(quorum_id)


class _GivesNothingUp(_NeverTriesAgain):
    def probed(self, probe: Probe, silent: Collection[str]) -> list[Effect]:
        return [e for e in super().probed(probe, silent) if not isinstance(e, group_module.LossNotice)]


class _WaitsForWhoJumps(StandingQuorum):
    def not_ended_at(self, step: int) -> str | None:
        apart = super().not_ended_at(step)
        return apart if apart is not None and self._not_done[apart] < step else None


class _NamesAnyStep(QuorumCore):
    def _stands(self, stands: bool, now: float) -> None:
        super()._stands(stands, now)
        self._standing = _WaitsForWhoJumps(self._last, now) if stands else None


class _LetsThemHold(ReplicaGroup):
    def _told_to_ask_at(self, step: int) -> list[Effect]:
        return super()._told_to_ask_at(step)[:1]


class _AnswersNobodyLate(ReplicaGroup):
    def rank_joined(self, join: RankJoin) -> list[Effect]:
        return [] if self.lost_reason is not None else super().rank_joined(join)

    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        return [] if self.lost_reason is not None else super().rank_voted(group_rank, vote)


class _LeavesWithoutAWord(ReplicaGroup):
    def rank_left(self, group_rank: int, reason: str) -> list[Effect]:
        super().rank_left(group_rank, reason)
        return []


class _StopsOneRankOnly(ReplicaGroup):
    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        votes = {**self._votes, group_rank: vote}
        return [
            RankVerdict(e.group_rank, e.verdict._replace(stop=votes[e.group_rank].stop))
            if isinstance(e, RankVerdict)
            else e
            for e in super().rank_voted(group_rank, vote)
        ]


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


class _GoesOnTorn(ReplicaGroup):
    def quorum_formed(
        self, quorum_id: int, participants: Sequence[QuorumMemberLike], *more: Any
    ) -> list[Effect]:
        self._is_torn = False
        return super().quorum_formed(quorum_id, participants, *more)


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


class _ProbesNobody(ReplicaGroup):
    def rank_joined(self, join: RankJoin) -> list[Effect]:
        self._links.quorum_formed(())
        return super().rank_joined(join)


# -- silence


class _TakesSuspectsForDead(ReplicaGroup):
    def rank_suspected(self, group_rank: int, reason: str) -> list[Effect]:
        return [*self.rank_lost(group_rank, reason)]


class _CommitsWithoutSuspects(ReplicaGroup):
    def rank_suspected(self, group_rank: int, reason: str) -> list[Effect]:
        self._suspects |= {group_rank}
        return [group_module.GroupAway(is_back=False)]

    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        suspects, self._suspects = self._suspects, frozenset()
        effects = super().rank_voted(group_rank, vote)
        self._suspects = suspects
        return effects


class _WaitsForEver(ReplicaGroup):
    def rank_lost(self, group_rank: int, reason: str) -> Sequence[Effect]:
        return [] if group_rank in self._suspects else super().rank_lost(group_rank, reason)


def _counts_its_own_absence(world: World, process: Process) -> float:
    return world.now


# -- spares


class _LetsSparesIn(QuorumCore):
    def register(self, *seen: Any) -> list[Decision]:
        return super().register(*seen[:6])


class _HoldsNobodyForSpares(QuorumCore):
    def _fill_places(self, now: float, decisions: list[Decision]) -> None:
        if self._standing is None:
            super()._fill_places(now, decisions)


# -- a quorum that stands


class _ForgetsThatItStands(QuorumCore):
    def _learn(self, *reported: Any) -> None:
        forgetful: list[Any] = [*reported[:-1], False]
        super()._learn(*forgetful)


class _NamesTheFirstStep(QuorumCore):
    def _hold(self, replica_id: str, decisions: list[Decision]) -> None:
        if (standing := self._standing) is not None and standing.ask_at is None:
            standing._not_begun = dict.fromkeys(
                standing._not_begun, min(standing._not_begun.values(), default=0)
            )
        super()._hold(replica_id, decisions)


class _WaitsForOneAnswer(QuorumCore):
    def hold(self, session: int, number: QuorumNumber, step: int, now: float) -> list[Decision]:
        for member in self._standing.members if self._standing is not None else ():
            if self._standing is not None and member not in self._standing._not_done:
                self._standing._not_begun.setdefault(member, step)
        return super().hold(session, number, step, now)


class _LetsAllQuorumsStand(QuorumCore):
    def _next_quorum(self, chosen: Any, now: float) -> Any:
        formed = super()._next_quorum(chosen, now)
        self._standing = StandingQuorum(self._last, now) if not self._joined else None
        return formed._replace(quorum=formed.quorum._replace(stands=self._standing is not None))


class _AnswersForOneRank(ReplicaGroup):
    def rank_holds(self, group_rank: int, quorum_id: int, step: int) -> list[Effect]:
        if self._held is not None:
            self._held.update(dict.fromkeys(range(self.world_size), step))
        return super().rank_holds(group_rank, quorum_id, step)


class _TellsOneRankOnly(ReplicaGroup):
    def released(self, quorum_id: int, round_number: int, ask_at: int) -> list[Effect]:
        effects = super().released(quorum_id, round_number, ask_at)
        return [
            e._replace(group_ranks=e.group_ranks[:1]) if isinstance(e, group_module.ReleaseRanks) else e
            for e in effects
        ]


class _DoesNotHold(StepProtocol):
    def hold(self, quorum_id: int) -> int:
        step = super().hold(quorum_id)
        self.resume()
        return step


class _ForgetsWhatItBegan(StepProtocol):
    def hold(self, quorum_id: int) -> int:
        return min(super().hold(quorum_id), self.step)


class _AsksAtOnce(StepProtocol):
    def released(self, quorum_id: int, step: int) -> bool:
        return super().released(quorum_id, super().hold(quorum_id))


class _GoesOnAfterFailures(StepProtocol):
    def decide(self, committed: bool, averages: object = None, has_fetched: bool = False) -> None:
        super().decide(committed, averages, has_fetched)
        self._was_bound = True


class _FailsForTheQuorumThatIsOver(StepProtocol):
    def ask_instead(self) -> bool:
        failure = self._failures.get(self.quorum_id)
        if not super().ask_instead():
            return False
        self._failure_before_quorum = self._failure_before_quorum or failure
        return True


# -- the step protocol


class _AppliesLateErrors(StepProtocol):
    def fail(self, quorum_id: int, reason: Exception, *, group_broken: bool = True, own: str = "") -> bool:
        return super().fail(max(quorum_id, self.quorum_id), reason, group_broken=group_broken, own=own)


class _CommitsBeforeHealing(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        plan = super().agreed(result, allow_heal)
        self.healing = False
        return plan._replace(heal=False)


class _CountsWhoHeals(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        plan = super().agreed(result, allow_heal)
        self.num_participants = result.replica_world_size
        return plan


class _VotesYesAfterAnError(StepProtocol):
    def vote(self) -> bool:
        return self.num_participants >= self._rules.min_replica_size


class _KeepsTheOldCommitQuorum(StepProtocol):
    def decide(self, committed: bool, averages: object = None, has_fetched: bool = False) -> None:
        before = self.commit_quorum_id
        super().decide(committed, averages, has_fetched)
        self.commit_quorum_id = before


class _KeepsItsProcessGroup(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        is_first = not self.can_communicate
        plan = super().agreed(result, allow_heal)
        if is_first:
            return plan
        self.configured(result.quorum_id)
        return plan._replace(configure=False)


class _LeavesQuietly(StepProtocol):
    @property
    def leaves_in_order(self) -> bool:
        return not self.in_step


class _HidesBrokenGroups(StepProtocol):
    def begin(self) -> RankJoin:
        return super().begin()._replace(commit_failures=0, broken_quorum_id=0)


class _GoesOnAfterGivingUp(StepProtocol):
    def begin(self) -> RankJoin:
        self._is_entered = False
        return super().begin()


class _VotesYesUnhealed(StepProtocol):
    def vote(self) -> bool:
        self._lacks_state = False
        return super().vote()


class _KeepsAnEarlyErrorToItself(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        early, self._failure_before_quorum = self._failure_before_quorum, None
        plan = super().agreed(result, allow_heal)
        if early is not None:
            self._failure_before_quorum = early
            self._failures.setdefault(result.quorum_id, early)
        return plan


class _OwnsWhatItSpoilt(StepProtocol):
    def disown_state(self) -> None:
        self._stands = False


class _TakesTheSpoiltForEqual(StepProtocol):
    def disown_state(self) -> None:
        super().disown_state()
        self.commit_quorum_id = 0


class _TakesEveryStepForBound(StepProtocol):
    def stand(self) -> None:
        super().stand()
        self.is_bound = True


class _StandsAfterARestore(StepProtocol):
    def restore(self, counters: Any) -> None:
        stands = self._stands
        super().restore(counters)
        self._stands = stands


class _ForgetsTheHealedVersion(StepProtocol):
    def heal(self, counters: Any) -> None:
        super().heal({**counters, "commit_quorum_id": self.commit_quorum_id})


class _NamesTheQuorumOfACheckpoint(StepProtocol):
    def restore(self, counters: Any) -> None:
        super().restore(counters)
        self.commit_quorum_id = counters["commit_quorum_id"]


class _KeepsItsFailuresToItself(StepProtocol):
    def begin(self) -> RankJoin:
        return super().begin()._replace(own_failure="")


class _TakesAllErrorsForItsOwn(StepProtocol):
    def fail(self, quorum_id: int, reason: Exception, *, group_broken: bool = True, own: str = "") -> bool:
        return super().fail(quorum_id, reason, group_broken=group_broken, own=own or "an error")

    def group_broke(self, quorum_id: int) -> bool:
        self._blame_itself(quorum_id, "an error")
        return super().group_broke(quorum_id)


# -- catching up


class _KeepsStepsThatFailed(StepProtocol):
    @property
    def passes(self) -> bool:
        return self.catch_up is not None and not self.loads


class _ForgetsTheLastKeptStep(StepProtocol):
    def steps_to_take(self, counters: Mapping[str, object]) -> list[object]:
        return super().steps_to_take(counters)[:-1]


class _TakesAKeptStepTwice(StepProtocol):
    def steps_to_take(self, counters: Mapping[str, object]) -> list[object]:
        steps = super().steps_to_take(counters)
        return [*steps, *steps[-1:]]


class _TakesKeptStepsInReverse(StepProtocol):
    def steps_to_take(self, counters: Mapping[str, object]) -> list[object]:
        return super().steps_to_take(counters)[::-1]


class _SpeaksAsTheNewest(StepProtocol):
    def begin(self) -> RankJoin:
        own = super().begin()
        return own._replace(
            step=max(own.step, own.reached_step),
            commit_quorum_id=max(own.commit_quorum_id, own.reached_quorum_id),
        )


class _CommitsWhatItKeeps(StepProtocol):
    def vote(self) -> bool:
        return super().vote() or self.passes


class _WaitsForNoState(StepProtocol):
    @property
    def loads(self) -> bool:
        return self.catch_up is not None and self.catch_up.has_fetched


class _BeginsBeforeTheFetch(StepProtocol):
    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        plan = super().agreed(result, allow_heal)
        if plan.catch_up:
            self.begin_to_catch_up(Version(result.max_step, result.max_commit_quorum_id))
        return plan


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


class _KeepsWhatOneRankKeeps(ReplicaGroup):
    def rank_voted(self, group_rank: int, vote: Any) -> list[Effect]:
        passed = any(vote.passed for vote in {**self._votes, group_rank: vote}.values())
        return _changed(super().rank_voted(group_rank, vote), passed=passed)


# -- DiLoCo


class _LosesTheDelay(SyncSchedule):
    def received(self) -> int | None:
        self._interval, interval = 0, self._interval
        fragment = super().received()
        self._interval = interval
        return fragment


class _CountsSyncsThatFailed(SyncSchedule):
    begun = 0

    def next_fragment(self, syncs: int) -> int:
        self.begun += 1
        return super().next_fragment(self.begun)


class _AppliesAFailedSync(Fragments):
    def receive(self, fragment: int, total: int, committed: bool) -> None:
        super().receive(fragment, total, True)


class _KeepsFailedInnerSteps(Fragments):
    def receive(self, fragment: int, total: int, committed: bool) -> None:
        if committed:
            super().receive(fragment, total, committed)


class _StepsFromLocalParameters(Fragments):
    def _step_outer(self, fragment: int, total: int) -> None:
        self.global_[fragment] = mix(*self.local[fragment])
        super()._step_outer(fragment, total)


class _HealsWithoutTheOuterState(Fragments):
    def load(self, state: Held) -> None:
        outer = self.outer
        super().load(state)
        self.outer = outer


class _HealsWithoutGlobalParameters(Fragments):
    def load(self, state: Held) -> None:
        shared = self.global_
        super().load(state)
        self.global_ = shared


class _HealsWithoutLocalParameters(Fragments):
    def load(self, state: Held) -> None:
        local = self.local
        super().load(state)
        self.local = local


class _KeepsHalfAStep(StepProtocol):
    def decide(self, committed: bool, averages: object = None, has_fetched: bool = False) -> None:
        super().decide(committed, averages, has_fetched)
        self.settle()


# -- meetings between two tries, and spares


class _ForgetsLostSpares(Vacancies):
    def lost(self, session: int) -> list[VacancyDecision]:
        self._spares.pop(session, None)
        return []


class _TakesATakenPlace(MeetingProtocol):
    def _take(self, attempt: int, said: Record) -> Steps[None]:
        if self._admission is not None and attempt == self.own.since - 1:
            yield Write(f"{attempt}/taken/{self.own.rank}", self._admission.text())


class _SaysNothingOfTheDead(MeetingProtocol):
    def _agree_in(self, host: RankProcess, attempt: int, told: Told) -> Steps[tuple[int, list[Told]]]:
        gone, self._gone = self._gone, {}
        try:
            return (yield from super()._agree_in(host, attempt, told))
        finally:
            self._gone |= gone


class _KeepsTheDeadInMind(MeetingProtocol):
    def _admit(self, records: Sequence[Record]) -> None:
        gone = dict(self._gone)
        super()._admit(records)
        self._gone |= gone


class _GoesOnAlone(MeetingProtocol):
    def visit(self, store: str, world_size: int) -> Steps[None]:
        yield from super().visit(store, world_size)
        self._is_in = True


class _BeginsWithoutARank(MeetingProtocol):
    def agree(self, attempt: int, told: Told) -> Steps[tuple[int, list[Told]]]:
        attempt, everybody = yield from super().agree(attempt, told)
        lost = Told(Ending.SECONDHAND, "a rank is gone")
        return attempt, [lost if each.ending is Ending.GONE else each for each in everybody]


class _GoesOnInSmallerSides(MeetingProtocol):
    def silent(self, process: RankProcess, why: str) -> bool:
        if not why or self._processes.get(process.rank) != process or process.rank in self._gone:
            return False
        self._gone[process.rank] = why
        self._passed_over.add(process.rank)
        return True


# Of each of these cores a method does nothing, or gives the same always.
QUIET: dict[str, tuple[type[Any], str, Any]] = {
    "forgets reported ids": (QuorumCore, "_use_up", None),
    "does not say it is over": (QuorumCore, "_is_over", False),
    "does not warn of broken groups": (QuorumCore, "_break", None),
    "forgets the sick": (QuorumCore, "_sick", {}),
    "drops member lost": (ReplicaGroup, "member_lost", []),
    "joins once only": (ReplicaGroup, "lighthouse_connected", []),
    "survives its ranks": (ReplicaGroup, "rank_lost", []),
    "says not who it is": (ReplicaGroup, "_identify", Identity()),
    "gives up quietly": (ReplicaGroup, "_release_others", []),
    "refuses no votes": (ReplicaGroup, "_refuse_votes", []),
    "lets any process in": (ReplicaGroup, "rank_registered", True),
    "repeats nothing": (Conversation, "to_repeat", ()),
    "repeats everything": (Conversation, "arrived", True),
    "leaves places empty": (QuorumCore, "_fill_places", None),
    "holds nobody": (QuorumCore, "_hold", None),
    "asks nobody again": (QuorumCore, "_remind", None),
    "holds without a lighthouse": (ReplicaGroup, "_go_on", []),
    "goes on for ever": (ReplicaGroup, "lease_ended", []),
    "healing takes part": (StepProtocol, "is_participating", True),
    "lets others go on": (StepProtocol, "is_counted_on", False),
    "keeps a torn state": (StepProtocol, "lose_state", None),
    "loses what is under way": (SyncSchedule, "sent", None),
    "takes any kept state": (StepProtocol, "takes", True),
    "tells two of a place": (Vacancies, "_on_its_way", None),
    "keeps declining spares": (Vacancies, "declined", []),
    "leaves no word": (MeetingProtocol, "_leave_word", ()),
    "asks nobody when it is back": (MeetingProtocol, "_ask_whether_passed_over", ()),
}

# Of each of these replica groups a method has no effects of one kind.
WITHOUT: dict[str, tuple[str, type[Any]]] = {
    "keeps its no to itself": ("rank_voted", group_module.StepLostNotice),
    "probes once": ("probed", Probe),
    "reports links once": ("lighthouse_connected", group_module.BrokenLinks),
    "says once who it is": ("lighthouse_connected", group_module.GroupIdentity),
    "lets others wait": ("rank_suspected", group_module.GroupAway),
    "stays away": ("rank_resumed", group_module.GroupAway),
}


def _quiet(core: type[Any], method: str, value: Any) -> type[Any]:
    def act(*_: Any, **__: Any) -> Any:
        return copy.copy(value)

    is_property = isinstance(getattr(core, method), property)
    return type(core.__name__, (core,), {method: property(act) if is_property else act})


def _without(method: str, kind: type[Any]) -> type[Any]:
    real = getattr(ReplicaGroup, method)

    def act(*arguments: Any) -> list[Effect]:
        return [effect for effect in real(*arguments) if not isinstance(effect, kind)]

    return type("Without", (ReplicaGroup,), {method: act})


def _mutant(core: type[Any] | str, lacks: str, seed: int, invariant: str) -> Mutant:
    """Return the mutant that has this core, or one of the tables above; it is called as the class is."""
    if isinstance(core, str):
        name, core = core, _quiet(*QUIET[core]) if core in QUIET else _without(*WITHOUT[core])
    else:
        name = re.sub("(?<!^)([A-Z])", r" \1", core.__name__[1:]).lower()
    parts = {part: base for part, base in Cores()._asdict().items() if isinstance(base, type)}
    (part,) = (part for part, base in parts.items() if issubclass(core, base))
    return Mutant(name, lacks, Cores()._replace(**{part: core}), seed, invariant)


# The seed, counted from 0, is the first one that catches the mutant.
MUTANTS = (
    _mutant(_ReusesIds, "a new id for new members", 0, "monotonic"),
    _mutant(_BelievesClaims, "a step counts where history shows it", 334, "no_regress"),
    _mutant("forgets reported ids", "ids above all that replicas have seen", 5, "monotonic"),
    _mutant(
        _ForgetsTheMajority, "more than half of the healthy, for a late quorum", 250, "one_quorum_per_step"
    ),
    _mutant(_GoesBack, "newcomers wait for a member that alone has the steps", 373, "no_regress"),
    _mutant(_IgnoresMinReplicas, "quorums of min_replicas and more", 3, "one_quorum_per_step"),
    _mutant(_KeepsTheIdAfterAFailure, "a new id after a failed commit", 0, "progress"),
    _mutant(_ForgetsRounds, "telling apart two quorums with one id", 447, "progress"),
    _mutant("does not say it is over", "the alarm that a replica missed", 359, "progress"),
    _mutant("does not warn of broken groups", "the alarm for who gave a quorum up", 9, "progress"),
    _mutant(_LearnsTooLate, "what is reported after a quorum is of the past", 271, "progress"),
    _mutant(_KeepsTheDead, "a lost session ends the membership", 2, "progress"),
    _mutant(_LeavesNobodyOut, "two who cannot reach each other in one quorum", 7, "progress"),
    _mutant(_LeavesBothEndsOut, "as few as possible are left out", 1, "progress"),
    _mutant(_LeavesTheSlowerBehind, "members of a quorum have the same time to join", 506, "progress"),
    _mutant(_GivesTheReconnectedNoTime, "a session counts for a while", 118842, "one_quorum_per_step"),
    _mutant(_AwaitsTheIdleForEver, "who does not join counts until join_timeout only", 1, "progress"),
    _mutant(_ShrinksForEver, "a wish to shrink that no quorum can heed is void", 5, "progress"),
    _mutant(
        _ShrinksToAMinority, "a wish to shrink is void if stragglers are most", 1071, "one_quorum_per_step"
    ),
    _mutant(_LeavesTooManyOut, "at least half stay where some are left out", 1071, "one_quorum_per_step"),
    _mutant(_NeverLetsBack, "whoever can be reached again is let in", 67, "progress"),
    _mutant("forgets the sick", "who spoils quorums by itself is left out of them", 1, "progress"),
    _mutant(_LeavesTheSickOutForEver, "who was left out is tried again", 0, "progress"),
    _mutant(_BlamesTheVictims, "who is left out is the one that failed by itself", 1, "progress"),
    _mutant(_LeavesAllSickOut, "min_replicas, and half of those that count, stay", 33, "one_quorum_per_step"),
    _mutant(_StandsInTheWayOfTheCured, "the end of a pause ends a quorum that stands", 0, "progress"),
    _mutant(_CountsMembersOnly, "a new id where one is out for another one", 169, "progress"),
    _mutant(_LeavesBehindInSilence, "who was too slow hears that it is over", 122, "progress"),
    _mutant(_KeepsNoDistance, "no id twice where the clock was set back", 14, "monotonic"),
    _mutant(_NamesAnyStep, "who asks at a later step has not come there with others", 27054, "progress"),
    _mutant(_LetsAForeignStateIn, "who differs from the job is refused", 1, "heal_is_clean"),
    _mutant(_RefusesAtTheFirstQuorumOnly, "the job is that of the members", 1, "heal_is_clean"),
    _mutant(_TakesTheFarthestForTheJob, "the job is that of most of them", 32, "progress"),
    _mutant("says not who it is", "a replica group says whose state it has", 1, "heal_is_clean"),
    _mutant("says once who it is", "a new lighthouse hears whose state it is", 7, "heal_is_clean"),
    _mutant(_LetsThemHold, "who holds when its quorum is given up goes on", 145, "progress"),
    _mutant("gives up quietly", "a rank that gives a step up releases the others", 1205, "progress"),
    _mutant("refuses no votes", "votes on a step that a rank gave up are answered", 0, "progress"),
    _mutant(_AnswersNobodyLate, "a rank that asks when its group has left is told", 2174, "progress"),
    _mutant(_LeavesWithoutAWord, "a leave is told to ranks that wait", 8, "progress"),
    _mutant(_StopsOneRankOnly, "all ranks leave after the same step", 36, "leave_together"),
    _mutant(_ReleasesTheSameStepOnly, "a no releases ranks that have healed, too", 1325, "progress"),
    _mutant(_GoesOnTorn, "a group whose ranks hold different states heals or ends", 129, "heal_is_clean"),
    _mutant(_HealsFromManyGroups, "all ranks of a group heal from the same one", 0, "progress"),
    _mutant(_KeepsStepsThatFailed, "a step that failed is thrown away", 4624, "heal_is_clean"),
    _mutant(_ForgetsTheLastKeptStep, "each kept step is taken", 16, "heal_is_clean"),
    _mutant(_TakesAKeptStepTwice, "each kept step is taken once", 16, "heal_is_clean"),
    _mutant(_TakesKeptStepsInReverse, "kept steps are taken in their order", 16, "heal_is_clean"),
    _mutant(_SpeaksAsTheNewest, "who catches up has the version that it had before", 16, "heal_is_clean"),
    _mutant(_CommitsWhatItKeeps, "who catches up commits nothing", 16, "heal_is_clean"),
    _mutant(_WaitsForNoState, "where a step cannot be kept, the state is awaited", 18, "progress"),
    _mutant(_BeginsBeforeTheFetch, "kept steps are those since the fetched state", 5781, "heal_is_clean"),
    _mutant(_LeadsToAnySuchStep, "kept steps lead to the state of a quorum", 47892, "heal_is_clean"),
    _mutant(_KeepsWhatOneRankKeeps, "all ranks keep a step, or none", 114549, "heal_is_clean"),
    _mutant(_GoesOnAfterGivingUp, "a step given up leaves its process group", 8, "progress"),
    _mutant(_VotesYesUnhealed, "who could not heal does not commit", 16, "heal_is_clean"),
    _mutant(_KeepsAnEarlyErrorToItself, "peers hear of an early error", 0, "progress"),
    _mutant(_OwnsWhatItSpoilt, "a state that was changed in part is of no version", 1, "heal_is_clean"),
    _mutant(_TakesTheSpoiltForEqual, "states of no version are not equal", 54, "heal_is_clean"),
    _mutant(_TakesEveryStepForBound, "a step without a collective asks first", 0, "progress"),
    _mutant(_NamesTheQuorumOfACheckpoint, "a checkpoint speaks against no later step", 200477, "no_regress"),
    _mutant(_StandsAfterARestore, "who has loaded a state asks for a quorum", 45, "heal_is_clean"),
    _mutant("drops member lost", "the alarm reaches the ranks", 2, "progress"),
    _mutant(_OneVoteIsEnough, "every rank has to vote yes", 0, "heal_is_clean"),
    _mutant(_EveryRankItsOwnVerdict, "one verdict for all ranks", 0, "agreement"),
    _mutant("keeps its no to itself", "the first no releases the other ranks", 237, "progress"),
    _mutant("joins once only", "the join is repeated after a reconnect", 0, "progress"),
    _mutant(_ComparesStepsOnly, "the quorum of the commit in the version", 5, "heal_is_clean"),
    _mutant(_SpeaksForItsFirstRank, "the state of all ranks in the join", 0, "heal_is_clean"),
    _mutant("survives its ranks", "a lost rank ends its group", 0, "progress"),
    _mutant(_ProbesNobody, "the search for a link after a failed step", 7, "progress"),
    _mutant("probes once", "whoever could not be reached is probed again", 67, "progress"),
    _mutant(_NeverTriesAgain, "a step that waits for long for a known link is given up", 64, "progress"),
    _mutant(_GivesNothingUp, "a step that waits for whom it cannot reach is given up", 64, "progress"),
    _mutant("reports links once", "links are reported again after a reconnect", 65, "progress"),
    _mutant(_AppliesLateErrors, "an error belongs to its quorum", 34, "no_zombie"),
    _mutant(_CommitsBeforeHealing, "who is behind heals first", 0, "heal_is_clean"),
    _mutant("healing takes part", "who heals adds zeros", 0, "heal_is_clean"),
    _mutant(_CountsWhoHeals, "averages are over those who add something", 0, "no_zombie"),
    _mutant("lets others go on", "who is counted and cannot heal spoils the step", 14, "no_zombie"),
    _mutant("keeps a torn state", "who has a part of a peer's state has none", 104, "heal_is_clean"),
    _mutant(_VotesYesAfterAnError, "a failed step is not committed", 0, "heal_is_clean"),
    _mutant(_KeepsTheOldCommitQuorum, "the quorum of the commit in the version", 58, "heal_is_clean"),
    _mutant(_KeepsItsProcessGroup, "every quorum has a process group of its own", 0, "no_zombie"),
    _mutant(_LeavesQuietly, "who leaves after a failed step alarms the others", 11, "progress"),
    _mutant(_HidesBrokenGroups, "who needs a new process group says so", 0, "no_zombie"),
    _mutant(_ForgetsTheHealedVersion, "a heal takes over the whole version", 2, "progress"),
    _mutant(_LetsSparesIn, "a spare waits until a place is free", 12, "spares_wait"),
    _mutant("leaves places empty", "a spare takes a free place", 4, "progress"),
    _mutant(_HoldsNobodyForSpares, "a free place ends a quorum that stands", 4604, "progress"),
    _mutant("holds nobody", "a newcomer ends a quorum that stands", 0, "progress"),
    _mutant("asks nobody again", "a new session is told what the last one missed", 11425, "progress"),
    _mutant(_ForgetsThatItStands, "a restart, while a quorum stands", 857, "progress"),
    _mutant(_NamesTheFirstStep, "no member has begun the step that is named", 8, "no_zombie"),
    _mutant(_WaitsForOneAnswer, "every member answers before a step is named", 8, "no_zombie"),
    _mutant(_LetsAllQuorumsStand, "a quorum in which somebody heals does not stand", 22, "progress"),
    _mutant(
        _FormsBesideTheSilent, "members that are silent may go on in their quorum", 255, "one_quorum_per_step"
    ),
    _mutant(
        "goes on for ever",
        "members that hear nothing give their quorum up in time",
        255,
        "one_quorum_per_step",
    ),
    _mutant(_AnswersForOneRank, "the steps of all ranks in the answer", 8, "no_zombie"),
    _mutant("holds without a lighthouse", "who holds goes on when nobody tells when", 851, "progress"),
    _mutant(_TellsOneRankOnly, "all ranks ask at the same step", 0, "progress"),
    _mutant(_DoesNotHold, "who was asked to hold begins no step", 1023, "no_zombie"),
    _mutant(_ForgetsWhatItBegan, "the answer counts the step that was begun", 0, "no_zombie"),
    _mutant(_AsksAtOnce, "all members ask at the step that was named", 8, "no_zombie"),
    _mutant(_KeepsItsFailuresToItself, "who spoils a quorum by itself says so", 1, "progress"),
    _mutant(_TakesAllErrorsForItsOwn, "what others have caused does not count", 1, "progress"),
    _mutant(_GoesOnAfterFailures, "after a failed step a quorum is asked for", 27, "no_zombie"),
    _mutant(_FailsForTheQuorumThatIsOver, "what ended a quorum fails no step in the next", 2173, "no_zombie"),
    _mutant(_TakesSuspectsForDead, "a rank that answers again goes on", 2, "suspicion"),
    _mutant(_CommitsWithoutSuspects, "a group commits nothing without a rank", 191, "suspicion"),
    _mutant("lets others wait", "the others go on without a suspect's group", 25, "progress"),
    _mutant("stays away", "a group whose ranks all answer again is back", 2, "progress"),
    _mutant("lets any process in", "no other process takes a rank's place", 40, "suspicion"),
    _mutant(_WaitsForEver, "a rank that is silent for the dead time is lost", 59, "progress"),
    _mutant("repeats nothing", "what a session lost is said again in the next one", 2, "progress"),
    _mutant("repeats everything", "what has arrived is not said again", 0, "monotonic"),
    _mutant(_LosesTheDelay, "a sync ends so many inner steps after its begin", 230, "on_schedule"),
    _mutant("loses what is under way", "a sync that has begun comes to its end", 6, "progress"),
    _mutant(_CountsSyncsThatFailed, "all sync the same fragment", 6, "agreement"),
    _mutant(_AppliesAFailedSync, "a failed sync changes no global parameters", 6, "no_trace"),
    _mutant(_KeepsFailedInnerSteps, "after a failed sync a fragment begins anew", 6, "no_trace"),
    _mutant(_StepsFromLocalParameters, "the outer step is from global ones", 6, "agreement"),
    _mutant(_HealsWithoutTheOuterState, "the outer state heals with the rest", 6, "heal_is_clean"),
    _mutant(_HealsWithoutGlobalParameters, "global parameters heal with the rest", 6, "heal_is_clean"),
    _mutant(_HealsWithoutLocalParameters, "the model heals with its global parameters", 6, "heal_is_clean"),
    _mutant(
        _KeepsHalfAStep, "a state is kept once the script is done with its last step", 2570, "heal_is_clean"
    ),
    _mutant(
        "takes any kept state", "a kept state is of the step and quorum of the newest", 151, "heal_is_clean"
    ),
    _mutant("tells two of a place", "a place is told to one spare", 1898, "one_process_per_place"),
    _mutant(_ForgetsLostSpares, "the place of a lost spare is told to another one", 1143, "progress"),
    _mutant("keeps declining spares", "a spare that has declined is free again", 3095, "progress"),
    _mutant(_TakesATakenPlace, "the first spare has the place", 87, "one_process_per_place"),
    _mutant("leaves no word", "who has left a meeting says so in the next store", 6442, "progress"),
    _mutant(_SaysNothingOfTheDead, "the others speak for a rank that has ended", 10, "progress"),
    _mutant(_KeepsTheDeadInMind, "a place that a spare has taken has a rank", 87, "one_process_per_place"),
    _mutant(_GoesOnAlone, "a spare that finds nobody left gives up", 5002, "progress"),
    _mutant(_GoesOnInSmallerSides, "of two sides of a cut one goes on", 234, "one_process_per_place"),
    _mutant("asks nobody when it is back", "who was passed over ends", 599, "progress"),
    _mutant(_BeginsWithoutARank, "no try begins without a rank", 10, "one_process_per_place"),
    Mutant(
        "counts its own absence",
        "one that was stopped itself accuses nobody",
        Cores(heard=_counts_its_own_absence),
        67,
        "suspicion",
    ),
)
