"""The step protocol of one rank, which decides whether a step may commit. It is pure: no threads, clocks,
sockets or torch.

One attempt at a step runs through

    begin -> agreed -> (configured) -> (healed) -> vote -> decide

and anything may go wrong in between. In a quorum that stands the next attempt needs no new one (`goes_on`):

    begin -> stand -> enter -> vote -> decide

Between `stand` and `enter` it may still be told to ask. A rank that catches up with its peers (`catch_up.py`)
passes the steps that it keeps:

    begin -> agreed -> (configured) -> passes -> decide

until it `loads`. Invariants:

* An error belongs to the quorum in which it happened. It makes every later step of that quorum
  fail, and no step of any other (`no_zombie`).
* A broken process group is not yet a failed step: when every collective of the step has already
  succeeded, its result is the same on all members, and it may be committed although one died since.
* A quorum is recorded as configured only after the process group was.
* An attempt is not entered, and so takes part in no collective and no vote, while this rank holds, nor at a
  step at which the members ask for a quorum.
* The state version (step, commit_quorum_id) changes in three places: a commit, a complete heal, and when a
  rank that catches up has taken all steps that it kept. Until then it has the version that it had before.
* A replica whose process group is broken says so when it joins, so that the next quorum has a new
  id and with it a fresh store prefix, and that peers that wait for it in the old one are released.
* Where this rank has spoilt a quorum by itself, its next joins say so, and how often it has lately: once more
  for each quorum, once less for each step that is committed. An error that comes after the quorum broke for
  another reason does not count.

Callers serialize the calls; decisions are returned, and acting on them is the Manager's job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lighthouse.core.decisions import DISOWNED, NO_STATE, STEP_MAX
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.catch_up import NOWHERE, CatchUp, KeptStep, Version
from torchft_like.core.replica_group import LossNotice, RankJoin, Verdict
from torchft_like.errors import StepLostError


class WorldSizeMode(Enum):
    """How many replicas contribute gradients if there are more than `min_replica_size`.

    DYNAMIC: all of them; averages divide by their number.
    FIXED_WITH_SPARES: exactly `min_replica_size`; the others are spares that contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class StepRules:
    """The settings that decide whether a step may commit."""

    min_replica_size: int
    use_async_quorum: bool = True
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    max_retries: int | None = None


class Plan(NamedTuple):
    """What has to be done before the quorum can be used."""

    configure: bool
    serve: bool
    heal: bool
    help: bool = False  # offer the state beside the source of a member that heals, which needs it less
    catch_up: bool = False  # heal beside this step and those that follow
    hold: bool = False  # keep the offer of an earlier step


class OnVerdict(NamedTuple):
    """What a rank does when it hears a verdict of its replica group.

    Attributes:
        gives_up: waits for a quorum no more.
        decides: ends the attempt with the verdict, once the script is there.
        ends_behind: ends, as it is a step behind the other ranks of its group, which leave: it cannot heal.
    """

    gives_up: bool = False
    decides: bool = False
    ends_behind: bool = False


class Share(NamedTuple):
    """A replica group's part of the work of a step.

    Attributes:
        rank: its rank among the replica groups whose gradients count; None if its own do not.
        size: how many replica groups those are.
        divisor: the number by which averages divide; greater in a first step, in which all but one add zeros.
    """

    rank: int | None
    size: int
    divisor: int


NO_QUORUM = -1
OWN_FAILURES_MAX = 8  # with so many the lighthouse leaves a replica out for the longest time


GIVEN_UP = "it gave a step up without a verdict"
IN_VAIN = "this replica group was asked to stop, and leaves as there was no quorum for its step"


class StepProtocol:
    """The state of one rank between and during steps.

    Attributes:
        steps_kept_max: how many steps may pass while a state comes to this rank beside them; 0: it waits for
          the state.
        catch_up: the steps that it keeps meanwhile.
        is_bound: whether this attempt has a collective that cannot complete without all members; the
          code that issues one sets it.
        is_given_up: whether this attempt waits for a quorum no more, and is not committed.
        verdict: that of the ranks of this group on this attempt, once it was heard, or on the last one.
        farewell: the verdict with which all of them leave without a quorum. A rank that hears it between two
          steps, or whose script skips the end of its step, leaves with the next one.
    """

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self.step: int = 0
        self.commit_quorum_id: int = 0
        self.first_quorum_id: int = 0  # of the job in which the training of this state began
        self.batches_committed: int = 0
        self.commit_failures: int = 0
        self.quorum_id: int = NO_QUORUM
        self._attempts = 0
        self._answered = 0  # the last one whose request for a quorum was answered
        self.in_step: bool = False
        self.steps_given_up: int = 0
        self.has_committed: bool = False  # a step, in this process
        self.healing: bool = False
        self.steps_kept_max: int = 0
        self.catch_up: CatchUp | None = None
        self.participating_rank: int | None = None
        self.num_participants: int = 0
        self._counted: Sequence[int] = ()  # the participants whose gradients count
        self._configured_quorum_id = NO_QUORUM
        self._jobs_first_quorum_id = 0  # as the lighthouse says
        self._failures: dict[int, Exception] = {}
        self._failure_before_quorum: Exception | None = None
        self._broken: set[int] = set()
        self._own_failure = ""  # what this rank spoilt the last quorum with, by itself
        self._own_failures = 0
        self._own_failure_before_quorum = ""
        self._agreed = False
        self._lacks_state = False
        self._stays_behind = False  # its state is none of the newest, and it may not heal in this attempt
        self._stands = False  # the quorum, until this rank is told the step at which it asks for another one
        self._ask_at: int | None = None
        self._is_held = False
        self._is_entered = False
        self._has_gone_on = False  # this attempt is made in a quorum of an earlier one
        self.is_bound: bool = False
        self._was_bound = False  # the last attempt, which was committed
        self._is_settled = False  # the script has carried out all that was committed, and nothing more
        self.is_given_up: bool = False
        self.verdict: Verdict | None = None
        self.farewell: Verdict | None = None
        self._votes_on_state = False  # the next verdict is not on the step yet

    def begin(self) -> RankJoin:
        """Start a new attempt; return the join, without the rank that asks.

        An attempt that was given up without a verdict has left collectives behind, which must not meet those
        of this attempt: its process group is used no more.
        """
        if self.in_step and self._agreed and self._is_entered:
            self._blame_itself(self.quorum_id, GIVEN_UP)
            self._broken.add(self.quorum_id)
        self.steps_given_up += self.in_step
        self._failures.pop(self.quorum_id, None)  # of an earlier attempt; what it broke stays broken
        broken = self.quorum_id if self.quorum_id in self._broken else 0
        self.in_step = True
        self._attempts += 1
        self.settle()
        self.healing = self._lacks_state = False
        self._agreed = self._is_entered = self._has_gone_on = self.is_bound = False
        self._failure_before_quorum, self._own_failure_before_quorum = None, ""
        self.is_given_up = self._votes_on_state = False
        self.verdict = self.farewell
        if self.farewell is not None:
            self.give_up()
        failures = max(self.commit_failures, int(broken > 0))
        # With a synchronous quorum a replica heals before the forward pass; its source may be in it already.
        may_stand = self._was_bound and self._rules.use_async_quorum
        # With a synchronous quorum the others count this replica, which has to heal first. With a part of a
        # peer's state, which is none, no script should compute for longer than it has to.
        has_state = self.commit_quorum_id != NO_STATE
        reached = NOWHERE if self.catch_up is None else self.catch_up.reached
        return RankJoin(
            group_rank=0,
            step=self.step,
            checkpoint_metadata="",
            commit_failures=failures,
            commit_quorum_id=self.commit_quorum_id,
            broken_quorum_id=broken,
            may_stand=may_stand,
            own_failure=self._own_failure,
            own_failures=self._own_failures,
            first_quorum_id=self.first_quorum_id,
            may_catch_up=self.steps_kept_max > 0 and self._rules.use_async_quorum and has_state,
            reached_step=reached.step,
            reached_quorum_id=reached.commit_quorum_id,
            has_fetched=self.all_have_fetched,
            request=self._attempts,
            answered=self._answered,
        )

    def awaits(self, result: QuorumResult) -> bool:
        """Return whether a quorum answers the request of this attempt.

        One that answers an earlier request was formed with the state of then, and its members are told not to
        wait for this rank.
        """
        return self.is_waiting and result.request in (0, self._attempts)  # 0: the server does not count

    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        """Record the quorum of this attempt, and return what has to be done before it can be used."""
        self.quorum_id, self._answered = result.quorum_id, self._attempts
        self._jobs_first_quorum_id = result.first_quorum_id
        self._agreed = self._is_entered = True
        self._has_gone_on = False
        self._stands, self._is_held, self._ask_at = result.stands, False, None
        self._failures = {q: reason for q, reason in self._failures.items() if q >= result.quorum_id}
        self._broken = {q for q in self._broken if q >= result.quorum_id}
        self._own_failure = ""
        if self._failure_before_quorum is not None:
            self.fail(result.quorum_id, self._failure_before_quorum, own=self._own_failure_before_quorum)
        self.healing = self._lacks_state = (result.heal or result.catches_up) and allow_heal
        self._stays_behind = result.max_replica_rank is None and not allow_heal
        if not (result.catches_up and allow_heal):  # what it kept leads nowhere
            self.catch_up = None
        self._choose_participants(result, allow_heal)
        return Plan(
            configure=result.quorum_id != self._configured_quorum_id,
            serve=allow_heal and bool(result.recover_dst_replica_ranks),
            heal=result.heal and allow_heal,
            help=allow_heal and bool(result.helped_ranks),
            catch_up=result.begins_to_catch_up and allow_heal,
            hold=result.is_awaited,
        )

    # -- a quorum that stands

    @property
    def goes_on(self) -> bool:
        """Whether the next attempt is made in the present quorum, without asking for another one.

        This is the same on all ranks of a replica group, so it does not look at what each learns at another
        time, such as that the process group broke.
        """
        is_over = self.farewell is not None or self.step == self._ask_at
        return self._stands and self._was_bound and not self.in_step and not is_over

    def stand(self) -> None:
        """Make the attempt that has just begun in the present quorum."""
        self._agreed = self._has_gone_on = True

    def enter(self) -> bool:
        """Take part in the attempt from now on; return False while this rank holds, or has to ask."""
        if self._agreed and not self._is_held:
            self._is_entered = True
        return self._is_entered

    @property
    def needs_asking(self) -> bool:
        """Whether the attempt could be committed, but without all members, in a quorum that may be over."""
        is_lost = self.failure is not None or self.quorum_id in self._broken
        return self._has_gone_on and not self.is_bound and not is_lost

    def hold(self, quorum_id: int) -> int:
        """Enter no attempt in this quorum until told more; return the first step that was not entered."""
        if quorum_id == self.quorum_id:
            self._is_held = self._stands
        return self.step + int(self.in_step and self._is_entered)

    def released(self, quorum_id: int, step: int) -> bool:
        """Ask for a quorum at this step, and go on until then; return False if that step was entered."""
        if quorum_id != self.quorum_id or not self._stands:
            return True
        self._is_held = False
        self._ask_at = step
        return self.step + int(self.in_step and self._is_entered) <= step

    @property
    def is_held(self) -> bool:
        """Whether this rank has begun an attempt that it does not enter until told more."""
        return self._is_held and self.in_step and not self._is_entered

    def resume(self) -> None:
        """Go on: there is no lighthouse any more that could tell when."""
        self._is_held = False

    def ask_instead(self) -> bool:
        """Turn the attempt into one that asks for a quorum; return False if it has asked, or has a collective
        with all members. A failure of the attempt stays one, and what ended the quorum before the attempt
        was entered is none.
        """
        if not self._has_gone_on or self.is_bound:
            return False
        if self._is_entered:
            self._failure_before_quorum = self._failures.get(self.quorum_id)
        self._stands = self._agreed = self._has_gone_on = self._is_entered = False
        return True

    def ask_instead_of_holding(self) -> bool:
        """Turn an attempt that is not entered into one that asks, for which its group takes none that holds;
        return False if this rank does not hold.
        """
        if not self.is_held:
            return False
        self._is_held = False
        return self.ask_instead()

    @property
    def is_due(self) -> bool:
        """Whether the attempt has begun at the step at which the members ask for a quorum."""
        return self._has_gone_on and not self._is_entered and self.step == self._ask_at

    # -- the process group and the state

    def configured(self, quorum_id: int) -> None:
        """Record that the process group is ready for this quorum."""
        self._configured_quorum_id = quorum_id

    def restore(self, counters: Mapping[str, object]) -> None:
        """Take over counters of a periodic checkpoint, which `counters` returned.

        Raises:
            ValueError: they are none; nothing has changed then.
        """
        version = _version(counters)
        # Where the quorum is named in which the others went on, an older step would speak against theirs.
        if self.quorum_id != NO_QUORUM and version.commit_quorum_id > 0 and version != self._version:
            counters = {**counters, "commit_quorum_id": 0}
        self._take_over(counters)

    def _take_over(self, counters: Mapping[str, object]) -> None:
        version, batches = _version(counters), _count(counters, "batches_committed", 0)
        first_quorum_id = _count(counters, "first_quorum_id", 0)
        self._stands, self.catch_up = False, None
        self._is_settled = False
        self.step, self.commit_quorum_id = version
        self.batches_committed, self.first_quorum_id = batches, first_quorum_id

    def heal(self, counters: Mapping[str, object]) -> None:
        """Take over the counters of a peer whose state was loaded, after which this replica may commit.

        With a synchronous quorum that happens before the forward pass, so this replica contributes like any
        other.
        """
        self._take_over(counters)
        self.settle()
        self._lacks_state = False
        self.healing = self._rules.use_async_quorum

    def begin_to_catch_up(self, start: Version) -> None:
        """Keep the steps from now on: the state of this version is on its way, beside them."""
        self.catch_up = CatchUp(start)

    def steps_to_take(self, counters: Mapping[str, object]) -> list[object]:
        """Return the averages of the kept steps, which are to be taken from the state with these counters.

        Raises:
            ValueError: the steps were kept since another state.
        """
        found = _version(counters)
        if self.catch_up is None or found != self.catch_up.start:
            raise ValueError(f"a state of {found} was fetched for steps that were kept since another one")
        return [step.averages for step in self.catch_up.kept]

    def caught_up(self, counters: Mapping[str, object]) -> None:
        """Take over the counters of the state that was fetched and loaded, and count the steps that were kept
        and are taken.
        """
        catch_up = self.catch_up
        self.heal(counters)
        if catch_up is not None:
            self.step, self.commit_quorum_id = catch_up.reached
            self.batches_committed += sum(step.participants for step in catch_up.kept)

    def stop_catching_up(self) -> None:
        """Keep no step any more: the state does not come, or an average could not be kept."""
        self.catch_up = None

    def disown_state(self) -> None:
        """Declare the state not to be that of the step, so that a replica that has it is ahead of this rank,
        and one that has not either is not equal to it.
        """
        if self.commit_quorum_id != NO_STATE:
            self.commit_quorum_id = DISOWNED
        self._stands = self._was_bound = False
        self.catch_up = None

    def lose_state(self) -> None:
        """Declare that there is no state, as a part is a peer's: this rank takes one over, or is lost."""
        self.commit_quorum_id = NO_STATE
        self._stands = self._was_bound = False
        self.catch_up = None

    def settle(self) -> None:
        """Note that the script is done with what was committed, as it says by beginning the next step."""
        self._is_settled = True

    @property
    def held(self) -> Version | None:
        """The version of the state that the script has; None where that is not certain.

        So it is from a commit on until the script begins the next step: the optimizer may have done any part
        of its step. With a synchronous quorum scripts may change their state between two commits, too.
        """
        is_certain = self._is_settled and self._rules.use_async_quorum and self.commit_quorum_id > 0
        return self._version if is_certain else None

    @property
    def _version(self) -> Version:
        return Version(self.step, self.commit_quorum_id)

    def takes(self, kept: Version, result: QuorumResult) -> bool:
        """Return whether a state of this version, which the process has kept, is that to which it heals."""
        return kept == Version(result.max_step, result.max_commit_quorum_id)

    def heals_to(self, counters: Mapping[str, object], result: QuorumResult) -> bool:
        """Return whether a peer's state with these counters is that to which this quorum has a replica heal.

        One of the same step may be another: from before the peer's script has loaded a checkpoint of that
        step, as long as the peer offers it still. torchft's lighthouse names no quorum of a commit.
        """
        newest = Version(result.max_step, result.max_commit_quorum_id)
        is_named = newest.commit_quorum_id > 0 or result.begins_to_catch_up
        quorum_id = counters.get("commit_quorum_id") if is_named else newest.commit_quorum_id
        return (counters.get("step"), quorum_id) == newest

    def counters(self) -> dict[str, int]:
        """Return the state's version, origin and number of batches, for peers and periodic checkpoints."""
        return {
            "step": self.step,
            "batches_committed": self.batches_committed,
            "commit_quorum_id": self.commit_quorum_id,
            "first_quorum_id": self.first_quorum_id,
        }

    def fail(self, quorum_id: int, reason: Exception, *, group_broken: bool = True, own: str = "") -> bool:
        """Record an error in a quorum; return True if that is news and concerns the current one.

        Args:
            own: the error in words, if it is this rank's own (`errors.is_own_error`).
        """
        if quorum_id < self.quorum_id:
            return False
        self._blame_itself(quorum_id, own)
        is_news = quorum_id not in self._failures or (group_broken and quorum_id not in self._broken)
        self._failures.setdefault(quorum_id, reason)
        if group_broken:
            self._broken.add(quorum_id)
        return is_news

    def fail_current(self, reason: Exception, own: str = "") -> bool:
        """Record an error in the current attempt, whether or not its quorum is known yet."""
        if not self.is_waiting:
            if self._has_gone_on and not self.is_bound and self._failure_before_quorum is None:
                self._failure_before_quorum = reason  # the attempt may ask for another quorum yet
            return self.fail(self.quorum_id, reason, own=own)
        if self._failure_before_quorum is None:
            self._failure_before_quorum, self._own_failure_before_quorum = reason, own
        return False

    def _blame_itself(self, quorum_id: int, own: str) -> None:
        """Count an error of this rank, once for each quorum, unless the quorum was spoilt before."""
        is_first = quorum_id == self.quorum_id and not self.is_broken(quorum_id) and not self._own_failure
        if own and is_first:
            self._own_failure, self._own_failures = own, min(self._own_failures + 1, OWN_FAILURES_MAX)

    def group_broke(self, quorum_id: int) -> bool:
        """Record that the process group of a quorum cannot be used any more; return True if that is news."""
        if quorum_id < self.quorum_id or quorum_id in self._broken:
            return False
        self._broken.add(quorum_id)
        return True

    def is_broken(self, quorum_id: int) -> bool:
        """Return whether the process group of that quorum cannot be used, configured or not."""
        return quorum_id < self.quorum_id or quorum_id in self._broken

    @property
    def failure(self) -> Exception | None:
        """The first failure of the current attempt."""
        return self._failure_before_quorum if self.is_waiting else self._failures.get(self.quorum_id)

    @property
    def can_communicate(self) -> bool:
        """Whether collectives of the current attempt can be issued."""
        configured = self._configured_quorum_id == self.quorum_id != NO_QUORUM
        return configured and self.quorum_id not in self._broken and self._failure_before_quorum is None

    @property
    def may_wait_for_state(self) -> bool:
        """Whether a source comes to the end of the step: it may wait in `configure` for a rank not met."""
        return self._configured_quorum_id == self.quorum_id

    def ends_fetch(self, notice: LossNotice, own: str) -> bool:
        """Return whether nothing comes from a member any more, or to this replica, `own`.

        A source that is alive, and has given the quorum up, goes on offering the state that it had in it, or
        refuses it: a rank that comes to the end of the step after it heals nevertheless.
        """
        return not notice.is_alive or notice.replica_id == own

    def still_has(self, result: QuorumResult) -> bool:
        """Return whether an attempt in this quorum, which was given up, has left the state as it was.

        With a synchronous quorum scripts may change it between two commits.
        """
        return self._rules.use_async_quorum and self.takes(self._version, result)

    @property
    def is_waiting(self) -> bool:
        """Whether the current attempt has no quorum yet."""
        return self.in_step and not self._agreed

    @property
    def is_participating(self) -> bool:
        """Whether this replica's gradients count in the current attempt."""
        return self.participating_rank is not None and not self.healing

    @property
    def is_counted_on(self) -> bool:
        """Whether the others' averages count this replica although it has to heal before it contributes.

        A synchronous quorum heals first and counts all replicas: if that fails, every sum is wrong.
        """
        return self.participating_rank is not None and not self._rules.use_async_quorum

    @property
    def share(self) -> Share:
        """This replica group's part of the current attempt."""
        rank, counted = self.participating_rank, self._counted
        place = None if rank is None or rank not in counted else counted.index(rank)
        # A first step may end without a quorum: nothing of it counts, but a script divides by the numbers.
        return Share(place, max(len(counted), 1), max(self.num_participants, 1))

    def vote(self) -> bool:
        """Return whether this rank may commit."""
        return self.objection is None

    @property
    def objection(self) -> str | None:
        """Why this rank does not commit the current attempt, or the last one; None if it does."""
        if (error := self.failure) is not None:
            return str(error) or repr(error)
        if self._lacks_state:
            return "this rank has no state to commit with"
        if self._has_gone_on and not self.is_bound:
            return "it had no collective of all members"
        if not self._are_enough:
            count = self.num_participants
            return (
                f"{count} replica group{'s' * (count != 1)} took part in it, and min_replica_size is "
                f"{self._rules.min_replica_size}: start more of them, or lower it. The lighthouse forms such "
                "a quorum where its --min_replicas is lower"
            )
        return None

    @property
    def _are_enough(self) -> bool:
        return self.num_participants >= self._rules.min_replica_size

    @property
    def loads(self) -> bool:
        """Whether this rank, which catches up, takes the state over in this attempt, and waits until it has
        come.

        So it does once all ranks of the group have it, and in a step that it cannot keep: one too many, one
        in which the others are too few, or one without a collective of all members, of which it may not hear.
        """
        if (catch_up := self.catch_up) is None:
            return False
        is_full = len(catch_up.kept) >= self.steps_kept_max
        can_keep = self.is_bound and self._are_enough and not is_full
        return catch_up.has_fetched or (self.failure is None and not can_keep)

    @property
    def all_have_fetched(self) -> bool:
        """Whether all ranks of the group have had the state of a catch-up since an earlier step."""
        return self.catch_up is not None and self.catch_up.has_fetched

    @property
    def passes(self) -> bool:
        """Whether this rank, which catches up, may keep the step, as nothing went wrong in it here."""
        return self.catch_up is not None and self.failure is None and not self.loads

    def hear(self, verdict: Verdict) -> OnVerdict:
        """Take a verdict of the ranks of this group, which is perhaps on an earlier attempt than this one."""
        if verdict.step != self.step:
            return OnVerdict()
        is_over = not self.in_step or self.verdict is not None
        if verdict.stop and not verdict.committed and (is_over or self.is_waiting or self.is_held):
            self.farewell = verdict
        if is_over:
            return OnVerdict()
        if verdict.committed and self.is_waiting:
            # The script gave that attempt up after its vote: the averages are gone.
            return OnVerdict(ends_behind=verdict.stop or self.is_given_up)
        gives_up = verdict.stop and self.give_up()
        decides = self._agreed or self.is_given_up
        if decides:
            self.verdict = verdict
        return OnVerdict(gives_up, decides)

    def vote_on_state(self, has_fetched: bool) -> Verdict:
        """Return this rank's vote on whether the state is loaded, which comes before that on the step."""
        self._votes_on_state = True
        return Verdict(self.step, False, passed=has_fetched, has_fetched=has_fetched)

    def reopen(self) -> None:
        """Take the next verdict for that on the step: all ranks know whether the state is loaded."""
        self.verdict, self._votes_on_state = None, False

    def give_up(self) -> bool:
        """Wait for a quorum no more: the step goes on to its end without one, and is not committed. Return
        False if there is nothing to wait for.
        """
        self.ask_instead_of_holding()
        if not self.is_waiting or self.is_given_up:
            return False
        self.is_given_up = True
        self._failure_before_quorum = self._failure_before_quorum or StepLostError(IN_VAIN)
        return True

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks of this group leave now: the first to do so ends the group for the others, which
        may still save their states with collectives.
        """
        is_told = self.verdict is not None and self.verdict.stop and not self._votes_on_state
        return self.farewell is not None or is_told

    def decide(self, committed: bool, averages: object = None, has_fetched: bool = False) -> None:
        """Record the decision of the whole replica group.

        Args:
            averages: those of the step, if all of its ranks keep it.
            has_fetched: whether all of them have the state that they fetch.
        """
        self.in_step = False
        self._was_bound = committed and self.is_bound
        if committed:
            self.has_committed = True
            self._is_settled = False
            self.step += 1
            if self._stays_behind:  # what it has after the step is not what the others have
                self.disown_state()
            else:
                self.commit_quorum_id = self.quorum_id
            self.first_quorum_id = self.first_quorum_id or self._jobs_first_quorum_id
            self.batches_committed += self.num_participants
            self.commit_failures = 0
            self._own_failures = max(self._own_failures - 1, 0)
        elif averages is not None and self.catch_up is not None:
            self.catch_up.kept.append(KeptStep(self.quorum_id, self.num_participants, averages))
            self.commit_failures = 0
        else:
            self.commit_failures += 1
        if self.catch_up is not None:
            self.catch_up.has_fetched |= has_fetched

    @property
    def leaves_in_order(self) -> bool:
        """Whether a replica that leaves now need not alarm any other.

        After a step that it did not commit, peers may still wait for it, even in a process group that it
        has never entered.
        """
        return not self.in_step and self.commit_failures == 0

    @property
    def out_of_retries(self) -> bool:
        """Whether more attempts in a row failed than `max_retries` allows."""
        limit = self._rules.max_retries
        return limit is not None and self.commit_failures > limit

    def _choose_participants(self, result: QuorumResult, allow_heal: bool) -> None:
        if self._rules.use_async_quorum or not allow_heal:
            rank, size = result.max_replica_rank, result.max_world_size
        else:
            rank, size = result.replica_rank, result.replica_world_size
        late = result.late_ranks if self._rules.use_async_quorum and allow_heal else ()
        counted = [rank for rank in range(size) if rank not in late]
        if self._rules.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
            if late and rank is not None:  # they are the spares, or no gradients could count
                rank = [*counted, *sorted(late)].index(rank)
                counted = list(range(len(counted)))
            size = min(size, self._rules.min_replica_size)
            rank = rank if rank is not None and rank < size else None
        self.participating_rank, self.num_participants = rank, size
        self._counted = [rank for rank in counted if rank < size]


def _version(counters: Mapping[str, object]) -> Version:
    """Return the version that the counters name; those of torchft name no quorum."""
    return Version(_count(counters, "step"), _count(counters, "commit_quorum_id", 0, least=DISOWNED))


def _count(counters: Mapping[str, object], name: str, otherwise: int | None = None, *, least: int = 0) -> int:
    value = counters.get(name, otherwise)
    if type(value) is not int or not least <= value <= STEP_MAX:
        what = f"{name}={value!r:.100}" if name in counters else f"no {name!r}"
        raise ValueError(
            f"the Manager's state has {what}, and not a whole number from {least} to {STEP_MAX}: load what "
            "the Manager's state_dict returned"
        )
    return value
