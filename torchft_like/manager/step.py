"""The step protocol of one rank: may this step commit? Pure: no threads, clocks, sockets or torch.

One attempt at a step runs through

    begin -> agreed -> (configured) -> (healed) -> vote -> decide

and anything may go wrong in between. What holds throughout:

* An error belongs to the quorum in which it happened. It makes every later step of that quorum
  fail, and no step of any other (`no_zombie`).
* A quorum is recorded as configured only after the process group was.
* The state version (step, commit_quorum_id) changes in two places: a commit, and a complete heal.
* A replica whose process group is broken says so when it joins, so that the next quorum has a new
  id and with it a fresh store prefix.

Callers serialize the calls; decisions are returned, and acting on them is the Manager's job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchft_like.manager.assignment import QuorumResult


class WorldSizeMode(Enum):
    """How many replicas contribute gradients when more than `min_replica_size` are there.

    DYNAMIC: all of them; averages divide by their number.
    FIXED_WITH_SPARES: exactly `min_replica_size`; the others are spares that contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class StepRules:
    """The settings that bear on whether a step may commit."""

    min_replica_size: int
    use_async_quorum: bool = True
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    max_retries: int | None = None


@dataclass(frozen=True)
class Join:
    """What a rank says of itself when it asks for a quorum."""

    step: int
    commit_failures: int
    commit_quorum_id: int


@dataclass(frozen=True)
class Plan:
    """What has to be done before the quorum can be used."""

    configure: bool
    serve: bool
    heal: bool

    @property
    def is_empty(self) -> bool:
        """The common case: the same members as last time, all up to date."""
        return not (self.configure or self.serve or self.heal)


@dataclass(frozen=True)
class Failure:
    """Why the current step will not commit. `group_broken`: the process group cannot be used either."""

    reason: Exception
    group_broken: bool


NO_QUORUM = -1


class StepProtocol:
    """The state of one rank between and during steps."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self.step = 0
        self.commit_quorum_id = 0
        self.batches_committed = 0
        self.commit_failures = 0
        self.quorum_id = NO_QUORUM
        self.in_step = False
        self.healing = False
        self.participating_rank: int | None = None
        self.num_participants = 0
        self._configured_quorum_id = NO_QUORUM
        self._failures: dict[int, Failure] = {}
        self._failure_before_quorum: Failure | None = None
        self._agreed = False

    def begin(self) -> Join:
        """A new attempt starts: what to send with the join."""
        broken = self.failure is not None and self.failure.group_broken
        self.in_step = True
        self.healing = False
        self._agreed = False
        self._failure_before_quorum = None
        return Join(self.step, max(self.commit_failures, int(broken)), self.commit_quorum_id)

    def agreed(self, result: QuorumResult, allow_heal: bool) -> Plan:
        """The quorum of this attempt is known."""
        self.quorum_id = result.quorum_id
        self._agreed = True
        self._failures = {q: f for q, f in self._failures.items() if q >= result.quorum_id}
        if self._failure_before_quorum is not None:
            self._failures.setdefault(result.quorum_id, self._failure_before_quorum)
        self.healing = result.heal and allow_heal
        self._choose_participants(result, allow_heal)
        return Plan(
            configure=result.quorum_id != self._configured_quorum_id,
            serve=allow_heal and bool(result.recover_dst_replica_ranks),
            heal=self.healing,
        )

    def configured(self, quorum_id: int) -> None:
        """The process group is ready for this quorum."""
        self._configured_quorum_id = quorum_id

    def healed(self, step: int, commit_quorum_id: int, batches_committed: int) -> None:
        """The whole state of a peer is loaded."""
        self.step = step
        self.commit_quorum_id = commit_quorum_id
        self.batches_committed = batches_committed
        if not self._rules.use_async_quorum:
            # The forward pass has not begun: this replica takes part like any other.
            self.healing = False

    def fail(self, quorum_id: int, reason: Exception, *, group_broken: bool = True) -> bool:
        """Something went wrong in a quorum. True when that is news for the current attempt or a later one."""
        if quorum_id < self.quorum_id:
            return False
        known = self._failures.get(quorum_id)
        if known is not None and (known.group_broken or not group_broken):
            return False
        self._failures[quorum_id] = Failure(reason if known is None else known.reason, group_broken)
        return True

    def fail_current(self, reason: Exception) -> bool:
        """Something went wrong in the current attempt, whether or not its quorum is known yet."""
        if self.in_step and not self._agreed:
            self._failure_before_quorum = self._failure_before_quorum or Failure(reason, group_broken=True)
            return False
        return self.fail(self.quorum_id, reason)

    @property
    def failure(self) -> Failure | None:
        """The first failure of the current attempt."""
        if self.in_step and not self._agreed:
            return self._failure_before_quorum
        return self._failures.get(self.quorum_id)

    @property
    def can_communicate(self) -> bool:
        """Whether collectives of the current attempt can be issued."""
        failure = self.failure
        configured = self._configured_quorum_id == self.quorum_id != NO_QUORUM
        return configured and (failure is None or not failure.group_broken)

    @property
    def is_participating(self) -> bool:
        """Whether this replica's gradients count in the current attempt."""
        return self.participating_rank is not None and not self.healing

    def vote(self) -> bool:
        """Whether this rank may commit."""
        return self.failure is None and self.num_participants >= self._rules.min_replica_size

    def decide(self, committed: bool) -> None:
        """The whole replica group has voted."""
        self.in_step = False
        if committed:
            self.step += 1
            self.commit_quorum_id = self.quorum_id
            self.batches_committed += self.num_participants
            self.commit_failures = 0
        else:
            self.commit_failures += 1

    @property
    def out_of_retries(self) -> bool:
        """More failed attempts in a row than `max_retries` allows."""
        limit = self._rules.max_retries
        return limit is not None and self.commit_failures > limit

    def _choose_participants(self, result: QuorumResult, allow_heal: bool) -> None:
        if self._rules.use_async_quorum or not allow_heal:
            rank, size = result.max_replica_rank, result.max_world_size
        else:
            rank, size = result.replica_rank, result.replica_world_size
        if self._rules.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
            size = min(size, self._rules.min_replica_size)
            rank = rank if rank is not None and rank < size else None
        self.participating_rank, self.num_participants = rank, size
