"""One rank in the simulation: a training script and its Manager, around the real `StepProtocol`.

The Manager's four threads become events. What they do, and in which order they may do it, is what
`manager.py`, `quorum_driver.py`, `state_exchange.py` and `managed_group.py` do; there is no timeout in here,
so `progress` finds every wait for something that will not come.

The parameters are a number. Every step replaces it by a hash of itself and of the sum of all gradients;
a gradient is a hash of the parameters, of its replica and of the attempt. Equal numbers are equal
parameters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lighthouse.core.decisions import DISOWNED
from tests.simulation.fragments import Held, mix
from tests.simulation.mesh import Mesh, mesh_of
from tests.simulation.scenario import TINY_S
from tests.simulation.world import DEAD, PAUSED, Process
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.catch_up import Version
from torchft_like.core.replica_group import LossNotice, RankJoin, Verdict
from torchft_like.core.step import Plan, StepRules, WorldSizeMode

if TYPE_CHECKING:
    from tests.simulation.fragments import Fragments
    from tests.simulation.replica import Replica
    from tests.simulation.restarting import Trainer

FORWARD, GATE, COLLECTIVE, READY, VERDICT, PREPARE, HEAL, GIVEN_UP, TRAIN, AGREE = range(10)

OF_EARLIER_RUN = 40, {"step": 40, "batches_committed": 0, "commit_quorum_id": 1, "first_quorum_id": 1}

BROKEN = ConnectionError("a connection of the process group broke")
LOST = ConnectionError("a member was lost")
VOTED_NO = RuntimeError("another rank of the replica group voted no")
NOT_HEALED = ConnectionError("the state could not be fetched")
NOT_ALL_HEALED = RuntimeError("another rank of the replica group has not fetched the state")
SICK = OSError("the device is gone")
REPORTED = ValueError("the training script reported an error")
SKIPPED = RuntimeError("a collective had no part of a member that heals")
TOO_LATE = ConnectionError("the others ask for a quorum at a step that was begun")

NEWCOMERS_SLOW = 4.0  # how many times as long as others they compute in a fragile job

NO_FETCH = 0  # the number of no fetch

TORN = -1  # parameters of which a part is another's
Snapshot = tuple[int, int, dict[str, int], Held | None]  # step, parameters, counters, fragments
Sum = tuple[int, int | None, int]  # a sum of gradients, the parameters they were made from, their number


class Rank(Process):
    """A process of a replica group: a training script and its Manager."""

    def __init__(self, replica: Replica, number: int) -> None:
        super().__init__()
        world = replica.world
        scenario = world.scenario
        self.replica = replica
        self.number = number
        self.process = f"{replica.world.next_process()}".encode()
        self.name = replica.replica_id if scenario.ranks == 1 else f"{replica.replica_id}/{number}"
        mode = WorldSizeMode.FIXED_WITH_SPARES if scenario.is_fixed else WorldSizeMode.DYNAMIC
        rules = StepRules(scenario.min_replica_size, scenario.async_quorum, mode)
        self.protocol = world.cores.protocol(rules)
        seed = replica.slot * 1000 + replica.incarnation if scenario.init_sync else 0
        self.parameters = mix(seed, number)
        self.fragments: Fragments | None = None
        self._pseudogradient = 0
        self._over: int | None = None  # the fragment whose inner steps are done, with which its sync ends
        if scenario.fragments:
            self.fragments = world.cores.fragments(scenario, world.cores.schedule, self.parameters)
            self.parameters = self.fragments.digest()
        self.group_mesh: Mesh | None = None
        self.trainer: Trainer | None = None  # the process that runs it, where that may run others after it
        self.stop_wanted = False
        self._began = 0.0  # when the attempt began, or asked for a quorum
        self.sick_until = 0.0  # until then its process group fails whenever it is configured
        self.orders: dict[str, float] = {}  # by kind: what the script does next, as a fault has made it
        self.offer: Snapshot | None = None
        self._refused = -1  # the step whose state is not offered, as it was given up
        self._waiters: list[tuple[Rank, int, int]] = []
        self._hung: list[tuple[Rank, int]] = []  # whose transfers from here hang, until this process ends
        self._attempt = 0
        self._operation = 0
        self.phase = PREPARE
        self._is_leaving = False
        self._is_stepping = False  # the optimizer may have done any part of its step
        self._configured = self._has_computed = False
        self._configuring: Mesh | None = None
        self._result: QuorumResult | None = None
        self._replica_rank = 0
        self._plan: Plan | None = None
        self._promised: int | None = None  # the first step that it does not begin, as it was asked to hold
        self._named: int | None = None  # the step at which it was told to ask
        self._went_on = 0  # the quorum in which it did not hold any longer: the lighthouse may name that step
        self._own: RankJoin
        self._is_waiting = False
        self._lost: list[LossNotice] = []
        self._source: Rank | None = None
        self._heal_until = 0.0
        # While it catches up: the source of the state, which is None again once that has come or will not.
        self._beside: Rank | None = None
        self._beside_for: QuorumResult
        self._fetched: Snapshot | None = None
        self._arrived: Snapshot | None = None  # the state that is loaded if all ranks of the group have it
        self._fetches = NO_FETCH  # the number of the last fetch beside the steps
        self.protocol.steps_kept_max = 0 if scenario.fragments else scenario.steps_kept_max
        self._sum: Sum | None = None
        self._bucket = self._collectives = 0
        self._trouble = 0  # the newest quorum in which something really went wrong for this rank
        self._trouble_attempt = 0  # the newest attempt in which the training script had an error
        self._hurt: Mesh | None = None  # a group with a connection that broke while no collective used it
        self.failed_quorum = 0
        saved = world.saved.get((replica.slot, number))
        if saved is not None and scenario.saves:
            self.parameters = saved[0]
            self.protocol.restore(saved[1])

    @property
    def parts(self) -> tuple[Process, ...]:
        """It, and the process that runs it."""
        return (self,) if self.trainer is None else (self, self.trainer)

    @property
    def version(self) -> tuple[int, int]:
        """The step of its state, and the quorum in which that was committed."""
        return self.protocol.step, self.protocol.commit_quorum_id

    @property
    def first_quorum_id(self) -> int:
        """The quorum in which the training of its state began, 0 if it is yet to begin."""
        return self.protocol.first_quorum_id

    # -- a step, on the training thread

    def start(self) -> None:
        """Begin a step, or the inner steps before a sync."""
        if self.fragments is None:
            self.begin()
        else:
            self.phase = TRAIN
            self._train()

    def begin(self) -> None:
        """Begin a step, as start_quorum does."""
        if self._does("leave_alone") is not None:
            self._leave()
            return
        if self.protocol.goes_on or self.orders.get("restore", 1.0) % 0.5 < 0.25:  # many wait for quiet steps
            self._restore()
        scenario, goes_on = self.replica.world.scenario, self.protocol.goes_on
        self._leave_state()
        self._own, self._is_stepping = self.protocol.begin(), False
        self._attempt += 1
        self._has_computed = self._is_waiting = False
        self._began = self.replica.world.now
        self._plan, self._source = None, None
        self._sum, self._bucket = (0, None, 0), 0
        self.phase = FORWARD if scenario.async_quorum else PREPARE
        self._configured = goes_on
        if goes_on:
            self.protocol.stand()
            self._collectives = scenario.collectives(self.protocol.step)
        elif self.protocol.is_given_up:
            self._go_on_in_vain()
        else:
            self._ask()
            if self._does("report_early") is not None:
                self.report_error()
        if scenario.async_quorum:
            self._compute()

    @property
    def is_leaving(self) -> bool:
        """Whether it leaves with all ranks of its group, or knows that it does after this step."""
        return self._is_leaving or self.protocol.is_leaving

    @property
    def has_collectives(self) -> bool:
        """Whether the step has any."""
        return self._collectives > 0

    @property
    def is_anew(self) -> bool:
        """Whether members count that take over the state of another one, as all do in the first step."""
        return self._result is not None and bool(self._result.late_ranks)

    def give_up(self) -> bool:
        """Begin the next step without a verdict on this one, as after an exception in it; return False if
        there is no step.

        Where the quorum of this one is not known yet, start_quorum waits for it.
        """
        if not self.protocol.in_step or self.phase == GIVEN_UP:
            return False
        self.phase = GIVEN_UP
        self._named = None  # it asks at the step that it has given up
        if self._configured:
            self.replica.world.after(0.0, self, self._begin_after, self._attempt)
        return True

    def ask_to_stop(self) -> None:
        """Ask the script to stop, as SIGTERM does: from now on it waits for quorums for a while only."""
        world = self.replica.world
        self.stop_wanted = True
        if world.scenario.stop_wait_s < math.inf:
            world.after(world.scenario.stop_wait_s, self, self._wait_before_stop, world.now)

    def _wait_before_stop(self, since: float) -> None:
        """Have all ranks leave if this one has waited so long for a quorum; if not, look again later."""
        world = self.replica.world
        left_s = world.scenario.stop_wait_s
        if self.protocol.is_waiting or self.protocol.is_held:
            left_s -= world.now - max(self._began, since)
            if left_s <= TINY_S:
                world.felt["left_in_vain"] += 1
                if self.protocol.ask_instead_of_holding():
                    self._ask_again()
                if self.protocol.give_up():
                    self._go_on_in_vain()
                vote = Verdict(self.protocol.step, False, stop=True)
                self.replica.say(self.number, self.replica.vote, self.number, vote)
                left_s = world.scenario.stop_wait_s
        world.after(left_s, self, self._wait_before_stop, since)

    def _go_on_in_vain(self) -> None:
        """Go on to the end of the step without a quorum."""
        self._configured = self._is_waiting = False
        self._trouble_attempt = self._attempt
        self.replica.world.tell(self.name, "waits for no quorum any more")
        self.replica.world.after(0.0, self, self._open_in_vain, self._attempt)

    def _open_in_vain(self, attempt: int) -> None:
        if attempt == self._attempt and self.protocol.is_given_up:
            self._open()

    def time_out(self, *, is_noticed: bool) -> bool:
        """Let what this rank waits for take longer than its timeout; return False if it waits for nothing.

        The script goes on with the next step if there was no quorum in time.

        Args:
            is_noticed: whether its peers notice that it configures its process group no more. In a
                collective it is the timeout of operations then, else that of joins.
        """
        if (mesh := self._configuring) is not None:
            self._configuring = None
            if is_noticed:
                mesh.leave(self)
            self._fail(mesh.quorum_id)
            self._open()
        elif self.phase == COLLECTIVE and self.group_mesh is not None:
            if is_noticed or self.number > 0:
                self.hear_broken(self.group_mesh)
            else:
                return self.replica.overdue(self.protocol.quorum_id)
        elif self.phase == HEAL and self._source is not None:
            self._heal_failed(self._attempt)
        elif self._beside is not None:
            self._fetch_failed(self._fetches)
        elif not self.protocol.in_step:  # between two, or before the first
            return False
        elif self.phase in (GATE, PREPARE, GIVEN_UP) and (self._is_waiting or self.protocol.is_waiting):
            self.begin()
        else:
            return False
        return True

    def _begin_after(self, attempt: int) -> None:
        if attempt == self._attempt and self._configured:
            self.begin() if self.phase == GIVEN_UP else self.start()

    def _does(self, kind: str) -> float | None:
        """Return whether the script does this now, and how much of it: a fault has made it do so once."""
        amount = self.orders.pop(kind, None) if self.orders else None
        if amount is not None:
            world = self.replica.world
            world.feel(kind)
            world.tell("FAULT", kind, "in the script of", self.name)
        return amount

    def _restore(self) -> None:
        """Load a checkpoint: the state that this rank has, an older one, or that of an earlier run."""
        if (amount := self._does("restore")) is None:
            return
        world, counters = self.replica.world, self.protocol.counters()
        saved = world.saved.get((self.replica.slot, self.number)) if amount % 0.25 < 0.125 else OF_EARLIER_RUN
        if amount < 0.5 and saved is not None:
            self.parameters, counters = saved
            world.checker.disowned(self)
        self.protocol.restore(counters)
        self._named = None  # it asks with the state that it has loaded

    def _enter(self) -> bool:
        """Take part in the attempt, if this rank need not hold."""
        self._is_waiting = not self.protocol.enter()
        return not self._is_waiting

    def _ask(self) -> None:
        replica, scenario, own = self.replica, self.replica.world.scenario, self._own
        has_failed = own.commit_failures or self.protocol.is_broken(self.protocol.quorum_id)
        has_reason = has_failed or own.commit_quorum_id == DISOWNED
        if self._named is not None and self._named != own.step and not has_reason:
            replica.world.checker.asked_elsewhere(self.name, own.step, self._named)
        join = own._replace(
            group_rank=self.number,
            shrink_only=self._does("shrink") is not None,
            init_sync=scenario.init_sync,
            may_stand=own.may_stand and scenario.stands,
        )
        replica.say(self.number, replica.join, join)

    def _compute(self) -> None:
        world = self.replica.world
        self.phase = FORWARD
        time = world.scenario.compute_s * (0.7 + 0.6 * world.random()) * self.replica.slow
        if world.scenario.is_fragile and not self.protocol.has_committed:
            time *= NEWCOMERS_SLOW
        world.after(time, self, self._computed, self._attempt)

    def _computed(self, attempt: int) -> None:
        if attempt == self._attempt and self.phase == FORWARD:
            self.phase = GATE
            if self._configured:
                self._reduce()

    def _train(self) -> None:
        """Take an inner step, and all that follow it until it is time to begin or to end a sync."""
        world = self.replica.world
        time = world.scenario.compute_s * (0.7 + 0.6 * world.random()) / world.scenario.inner_steps
        world.after(time * self.replica.slow, self, self._trained, self._attempt)

    def _trained(self, attempt: int) -> None:
        fragments = self.fragments
        if attempt != self._attempt or fragments is None:
            return
        fragments.train(mix(self.replica.slot * 64 + self.number, self.replica.incarnation))
        self.replica.world.checker.trained(self.name)
        if fragments.schedule.is_due:
            self.begin()
        else:
            self._go_on_training(fragments)

    def _send_fragment(self, fragments: Fragments) -> None:
        """Begin the sync, and go on with inner steps beside it."""
        world = self.replica.world
        self._over, self._pseudogradient = None, fragments.send(self.protocol.step)
        if fragments.schedule.under_way is not None:
            world.checker.sends(self, fragments.schedule.under_way)
        self.phase = GATE
        self._go_on_training(fragments)
        self._reduce()

    def _go_on_training(self, fragments: Fragments) -> None:
        self._over = fragments.schedule.received()
        if self._over is None:
            self._train()
        elif self.phase == READY:
            self._end_step()

    def _reduce(self) -> None:
        """Begin the allreduce of the next bucket, or end the step."""
        protocol, world = self.protocol, self.replica.world
        if not self._collectives and protocol.needs_asking:
            self._ask_instead()
            return
        if not protocol.is_given_up and not self._enter():
            return
        if world.scenario.is_fragile and not self._bucket and self._loses_step():
            return
        mesh = self.group_mesh
        if self._bucket == self._collectives or not protocol.can_communicate or mesh is None:
            if self._bucket < self._collectives:
                self._sum = None
                if protocol.failure is None:
                    protocol.fail(protocol.quorum_id, LOST)
            self.phase = READY
            if self.fragments is None or self._over is not None:
                self._end_step()
            return
        protocol.is_bound = True
        part = None
        if protocol.is_participating:
            made_from = self.parameters if self.fragments is None else self._pseudogradient
            gradient = mix(made_from, mix(self.replica.slot * 64 + self._bucket, self._attempt))
            part = (self.name, protocol.quorum_id, protocol.step, self.parameters, gradient)
        self.phase = COLLECTIVE
        self._operation += 1
        if mesh is self._hurt:
            world.after(world.latency(), self, self.hear_broken, mesh)
        mesh.add(self._replica_rank, self._operation, part)

    def _loses_step(self) -> bool:
        """Lose a step in which another one heals, as some scripts do; return whether it has given it up."""
        world, result = self.replica.world, self._result
        if result is None or not result.healing_replica_ids or self.is_anew or self.protocol.healing:
            return False
        world.felt["fragile"] += 1
        if world.scenario.gives_up and self._plan is not None and self._plan.serve:
            return self.give_up()
        self._fail(self.protocol.quorum_id, SKIPPED)
        return False

    def hear_sum(self, mesh: Mesh, operation: int, total: Sum) -> None:
        """Take the sum of a collective, unless the collective has failed before."""
        if mesh is self.group_mesh and self.phase == COLLECTIVE and operation == self._operation:
            if self._sum is not None:
                self._sum = (mix(self._sum[0], total[0]), *total[1:])
            self._bucket += 1
            self.phase = GATE
            self._reduce()

    def _end_step(self) -> None:
        """Go on to should_commit, unless the script leaves that out or is late with it."""
        if self._does("skip_commit") is not None:
            self.give_up()
        elif (amount := self._does("vote_late")) is not None:
            world = self.replica.world
            world.after(world.scenario.keepalive_s * 4 * amount, self, self._commit, self._attempt)
        else:
            self._exchange()

    def _commit(self, attempt: int) -> None:
        if attempt == self._attempt and self.phase == READY:
            self._exchange()

    def _vote(self) -> None:
        """Vote, as the end of should_commit does."""
        protocol, replica = self.protocol, self.replica
        has_fetched = self._fetched is not None
        passes, went_well = protocol.passes, protocol.failure is None
        vote = Verdict(protocol.step, protocol.vote(), self.stop_wanted, passes, has_fetched, went_well)
        if not (vote.committed or vote.passed) and not self._is_excused():
            replica.world.checker.refused_for_nothing(self.name, protocol.quorum_id)
        self.phase = VERDICT
        if len(replica.ranks) == 1:
            self._decide(vote)
        else:
            heard = protocol.verdict
            replica.say(self.number, replica.vote, self.number, vote)
            if heard is not None:
                self._decide(heard)

    def _is_excused(self) -> bool:
        """Return whether there is a reason for not committing."""
        too_few = self.protocol.num_participants < self.replica.world.scenario.min_replica_size
        return too_few or self._trouble == self.protocol.quorum_id or self._trouble_attempt == self._attempt

    def hear_verdict(self, verdict: Verdict) -> None:
        """Take the verdict of this group's ranks."""
        plan = self.protocol.hear(verdict)
        if plan.gives_up:
            self._go_on_in_vain()
        if plan.ends_behind:
            self.die("its replica group leaves after a step that it gave up")
        elif plan.decides and self.phase in (VERDICT, AGREE):
            world = self.replica.world
            if self.phase == VERDICT and not verdict.passed:
                world.checker.decided(self, verdict.step + 1, verdict.committed)
            world.go_on(world.lag_s(), self, self._go_on_decided, self._attempt, verdict)

    def _go_on_decided(self, attempt: int, verdict: Verdict) -> None:
        if attempt != self._attempt:
            return
        if self.phase == VERDICT:
            self._decide(verdict)
        elif self.phase == AGREE:
            self.protocol.reopen()
            self._hear_agreed(verdict.has_fetched)

    def _decide(self, verdict: Verdict) -> None:
        protocol, replica = self.protocol, self.replica
        self._is_leaving = verdict.stop
        world, committed = replica.world, verdict.committed
        before = self.parameters
        averages = None
        if verdict.passed:
            averages = mix((self._sum or (0,))[0], protocol.num_participants)
            world.felt["kept_step"] += 1
        protocol.decide(committed, averages, verdict.has_fetched)
        if world.story is not None:
            verb = (
                "commits"
                if committed
                else "keeps the averages after"
                if verdict.passed
                else "does not commit"
            )
            step = protocol.step if committed else protocol.step + 1
            why = "" if committed else f": {protocol.failure}"
            world.tell(self.name, verb, f"step {step} in quorum {protocol.quorum_id}{why}")
        if committed:
            total, base, count = self._sum or (0, None, 0)
            result = self._result
            self.parameters = mix(before, mix(total, protocol.num_participants))
            self._receive_fragment(mix(total, protocol.num_participants), committed)
            self._is_stepping = True
            assert result is not None
            world.checker.committed(self, result.replica_ids, base, before, count)
            if not self._collectives:
                world.felt["bare_step"] += 1
            elif self._collectives > 1:
                world.felt["long_step"] += 1
            if protocol.step % 3 == 0:
                world.saved[(replica.slot, self.number)] = (self.parameters, protocol.counters())
        else:
            self._receive_fragment(0, committed)
        if not verdict.passed:  # the next step of one that lacks the state is another one
            world.checker.decided(self, protocol.step + int(not committed), committed)
        if (over := self._over) is not None:
            world.checker.synced(self, over, committed, before)
        if self._is_leaving:
            world.checker.left(self, committed)
            if world.is_ending:  # once the others have heard of the verdict: the script saves its state first
                world.after(world.scenario.compute_s, self, self._leave)
            elif self.trainer is None:
                self._leave()
            else:  # once the others were told of the verdict, as the server tells all of one thing first
                world.after(0.0, self, self._leave)
            return
        if committed and self._does("optimizer_error") is not None:
            self._spoil()
        world.after(world.latency(), self, self._begin_after, self._attempt)

    def _receive_fragment(self, total: int, committed: bool) -> None:
        if self.fragments is not None and self._over is not None and self.parameters != TORN:
            self.fragments.receive(self._over, total, committed)
            self.parameters = self.fragments.digest()

    def _leave(self) -> None:
        """Shut the Manager down between two steps."""
        protocol, replica = self.protocol, self.replica
        self._is_leaving = True
        if not protocol.leaves_in_order:
            self.die("left after a step that was not committed")
            return
        replica.say(self.number, replica.leave, self.number, protocol.step, protocol.quorum_id)
        if self.number > 0:
            replica.world.after(replica.world.scenario.compute_s * 5, self, self.die, "left")

    def _spoil(self) -> None:
        """Have a part of the state changed, and say so."""
        number = self.replica.slot * 64 + self._attempt
        self.parameters = mix(self.parameters, number)
        if self.fragments is not None:
            self.fragments.spoil(number)
            self.parameters = self.fragments.digest()
        self.protocol.disown_state()
        self.replica.world.checker.disowned(self)

    # -- the quorum, on the coordination loop

    def hear_quorum(self, result: QuorumResult) -> None:
        """Take the quorum that the rank asked for."""
        if not self.protocol.awaits(result):
            return
        world = self.replica.world
        world.checker.agreed(self.name, result.quorum_id, result.replica_ids)
        plan = self.protocol.agreed(result, True)
        self._result = result
        self._collectives = world.scenario.collectives(result.max_step)
        self._promised = self._named = None
        if self.protocol.is_broken(result.quorum_id):
            self._abort(result.quorum_id)
        self._plan = plan
        if plan.configure and not self.protocol.is_broken(result.quorum_id):
            self._configure(result)
        else:
            self._open()

    def hear_hold(self, quorum_id: int) -> None:
        """Begin no further step in this quorum, until told more."""
        self._promised = step = self.protocol.hold(quorum_id)
        self.replica.world.tell(self.name, "holds before attempt", step)
        self.replica.say(self.number, self.replica.holds, self.number, quorum_id, step)

    def hear_released(self, quorum_id: int, ask_at: int | None) -> None:
        """Go on, and ask for a quorum at this step."""
        protocol, promised = self.protocol, self._promised
        self._promised, self._named = None, self._named if ask_at is None else ask_at
        if ask_at is None:
            protocol.resume()
            self._went_on = quorum_id
        elif not protocol.released(quorum_id, ask_at):
            if promised is not None and self._went_on != quorum_id == protocol.quorum_id:
                self.replica.world.checker.released_too_late(self.name, promised, ask_at)
            self._fail(quorum_id, TOO_LATE)
        if protocol.is_due:
            self._ask_instead()
        elif self._is_waiting:
            self._reduce()

    def _ask_instead(self) -> None:
        """Ask for a quorum in an attempt that has begun in the one that stands."""
        if self.protocol.ask_instead():
            self._ask_again()

    def _ask_again(self) -> None:
        self.replica.world.tell(self.name, "asks at attempt", self.protocol.step)
        self._promised = None
        self._configured = self._is_waiting = False
        self._began = self.replica.world.now
        self._ask()

    def hear_lost(self, notice: LossNotice) -> None:
        """Abort what waits for a member that is gone."""
        if notice.must_fail:
            self.protocol.fail(notice.quorum_id, LOST, group_broken=False)
        if self.protocol.group_broke(notice.quorum_id):
            self._trouble = max(self._trouble, notice.quorum_id)
            self.replica.world.tell(
                self.name, "aborts", f"quorum {notice.quorum_id}: lost {notice.replica_id}"
            )
            self._abort(notice.quorum_id)
        self._lost = [lost for lost in self._lost if lost.quorum_id >= self.protocol.quorum_id]
        self._lost.append(notice)
        if not self._ends_fetch(notice):
            return
        source = self._source
        if source is not None and notice.replica_id in (source.replica.replica_id, self.replica.replica_id):
            self._heal_failed(self._attempt)
        beside = self._beside
        if beside is not None and notice.replica_id in (beside.replica.replica_id, self.replica.replica_id):
            self._fetch_failed(self._fetches)

    def hear_suspected(self) -> None:
        """Give the quorum up, as a rank of this replica group is silent."""
        self.hear_lost(LossNotice(self.protocol.quorum_id, self.replica.replica_id, "silent", is_alive=True))

    def hear_group_left(self) -> None:
        """Die because another rank of this replica group has left."""
        if not self.is_leaving and not self.protocol.steps_given_up:
            self.replica.world.checker.left_behind(self)
        self.hear_group_lost()

    def hear_group_lost(self) -> None:
        """Die because another rank of this replica group is gone."""
        if not self.is_leaving:
            self.die("its replica group is lost")

    # -- the process group

    def _configure(self, result: QuorumResult) -> None:
        world = self.replica.world
        old, self.group_mesh = self.group_mesh, None
        if old is not None:
            old.leave(self)
        world.go_on(world.lag_s(), self, self._begin_to_configure, result)

    def _begin_to_configure(self, result: QuorumResult) -> None:
        if self._result is not result:
            return
        if self.protocol.is_broken(result.quorum_id):
            self._open()
            return
        world = self.replica.world
        name = (result.store_address, result.quorum_id, self.number)
        mesh = self._configuring = mesh_of(world, name, result.quorum_id, result.replica_world_size)
        self._replica_rank = result.replica_rank
        if world.now < self.sick_until:
            world.after(world.latency(), self, self._cannot_configure, mesh, world.random() < 0.5)
        else:
            mesh.enter(result.replica_rank, self)

    def _cannot_configure(self, mesh: Mesh, is_late: bool) -> None:
        """Fail by this rank's own fault; if late, to the peers that looks like one of theirs."""
        if mesh is self._configuring:
            self._configuring = None
            if is_late:
                mesh.leave(self)
            self._fail(mesh.quorum_id, SICK, own="it is sick")
            self._open()

    def hear_configured(self, mesh: Mesh) -> None:
        """Note that the process group is connected."""
        if mesh is not self._configuring:
            return
        self._configuring = None
        self.group_mesh = mesh
        self._operation = 0
        self.protocol.configured(mesh.quorum_id)
        self._open()

    def hear_broken(self, mesh: Mesh) -> None:
        """Handle a broken connection of the process group; only a rank that uses it notices."""
        if mesh is self._configuring:
            self._configuring = None
            self._fail(mesh.quorum_id)
            self._open()
        elif mesh is self.group_mesh:
            self._trouble = max(self._trouble, mesh.quorum_id)
            if self.phase == COLLECTIVE:
                self._sum = None
                self._bucket += 1
                self.phase = GATE
                self._fail(mesh.quorum_id)
                self._reduce()
            else:
                self._hurt = mesh

    def _fail(
        self, quorum_id: int, reason: Exception = BROKEN, *, group_broken: bool = True, own: str = ""
    ) -> None:
        was_broken = self.protocol.is_broken(quorum_id)
        self.failed_quorum = quorum_id
        self._trouble = max(self._trouble, quorum_id)
        self.protocol.fail(quorum_id, reason, group_broken=group_broken, own=own)
        if group_broken and not was_broken:
            self._abort(quorum_id)

    def hear_late_error(self) -> bool:
        """Report an error of a past quorum, as a callback does; return False if there is none to report."""
        quorum_id = self.failed_quorum
        if quorum_id in (0, self.protocol.quorum_id):
            return False
        was_broken = self.protocol.is_broken(quorum_id)
        self.protocol.fail(quorum_id, BROKEN)
        if not was_broken:
            self._abort(quorum_id)
        return True

    def report_error(self) -> bool:
        """Report an error of the training script; return False if there is no step."""
        protocol = self.protocol
        if self.phase == VERDICT or not protocol.in_step:
            return False
        self._trouble_attempt = self._attempt
        if protocol.fail_current(REPORTED, own="it reported an error"):
            self._abort(protocol.quorum_id)
        return True

    def hear_step_lost(self, quorum_id: int) -> None:
        """Fail the step: another rank of the group has voted no."""
        self._fail(quorum_id, VOTED_NO)

    def _abort(self, quorum_id: int) -> None:
        """End what the process group does, unless a newer quorum is agreed."""
        if quorum_id < self.protocol.quorum_id:
            return
        if self.group_mesh is not None:
            mesh = self.group_mesh
            mesh.leave(self)
            if self.phase == COLLECTIVE:
                world = self.replica.world
                world.after(world.latency(), self, self.hear_broken, mesh)
        if self._configuring is not None:
            mesh, self._configuring = self._configuring, None
            mesh.leave(self)
            self._fail(mesh.quorum_id)
            self._open()

    # -- healing

    def _open(self) -> None:
        """Go on: the process group is configured, or not to be, and nothing more happens in the
        background.
        """
        self._configured = True
        if self.phase == GATE:
            self._reduce()
        elif self.phase == PREPARE:
            self._exchange()
        elif self.phase == GIVEN_UP:
            self.begin()

    def _exchange(self) -> None:
        """Serve the state to others, heal, or do neither."""
        plan, self._plan = self._plan, None
        if self.trainer is not None and self.protocol.has_committed:
            self.trainer.kept = None
        if plan is not None and plan.serve:
            self._serve()
        elif plan is not None and not plan.hold:
            self.offer, self._refused = None, -1
        if plan is not None and (plan.heal or self.protocol.catch_up is None):
            self._beside = self._fetched = None
        if plan is not None and (plan.catch_up or self.protocol.catch_up is not None):
            self._catch_up(plan)
            return
        if plan is None or not plan.heal:
            self._exchanged()
            return
        self._has_computed, self.phase = self.phase == READY, HEAL
        world, result = self.replica.world, self._result
        assert result is not None
        self._heal_until = world.now + world.scenario.timeout_s
        source = result.replica_ids[result.recover_src_replica_rank or 0]
        if self._is_lost(source, result) or not self.protocol.may_wait_for_state:
            self._heal_failed(self._attempt)
        else:
            self._heal()

    def _is_lost(self, source: str, result: QuorumResult) -> bool:
        """Return whether no state comes from this source in this quorum."""
        return any(
            notice.replica_id in (source, self.replica.replica_id) and self._ends_fetch(notice)
            for notice in self._lost
            if notice.quorum_id == result.quorum_id
        )

    def _ends_fetch(self, notice: LossNotice) -> bool:
        keeps_offers = self.replica.world.scenario.keeps_offers
        return not keeps_offers or self.protocol.ends_fetch(notice, self.replica.replica_id)

    def _catch_up(self, plan: Plan) -> None:
        """Begin to fetch a state beside the steps, or load it, or wait for it where too many have passed."""
        world, result, protocol = self.replica.world, self._result, self.protocol
        assert result is not None
        self._has_computed = True
        if plan.catch_up:
            self._fetches, self._beside_for = self._fetches + 1, result
            self._heal_until = world.now + world.scenario.timeout_s
            protocol.begin_to_catch_up(Version(result.max_step, result.max_commit_quorum_id))
            source = result.replica_ids[result.recover_src_replica_rank or 0]
            lost = self._is_lost(source, result)
            home = world.homes.get(result.recover_src_manager_address)
            is_there = home is not None and home.is_alive
            if not lost and protocol.may_wait_for_state and is_there and home is not None:
                self._beside = home.ranks[self.number]
                self._beside.asked_for_state(self, -self._fetches, result.max_step)
        elif self._beside is not None and self._beside.replica.replica_id not in result.replica_ids:
            self._beside = None  # a source that is no member is not watched
        if self._beside is None and self._fetched is None:
            protocol.stop_catching_up()
            self._fail(protocol.quorum_id, NOT_HEALED, group_broken=False)
            self._exchanged()
        elif protocol.loads:
            self.phase = HEAL
            if self._fetched is not None:
                self._load(self._fetched)
        else:
            self._exchanged()

    def _hear_fetched(self, number: int, source: Rank, state: Snapshot, step: int) -> None:
        """Take a state that has come beside the steps, if the source lived so long."""
        if number != self._fetches or self._beside is not source:
            return
        world, is_it = self.replica.world, self.protocol.heals_to(state[2], self._beside_for)
        if source.state == DEAD or not is_it or world.now > self._heal_until:
            self._fetch_failed(number)
        elif source.state == PAUSED or world.is_cut(self.replica.slot, source.replica.slot):
            if self.phase == HEAL:
                self.replica.stalled(self.number, self.protocol.quorum_id, for_long=True)
            world.after(world.scenario.keepalive_s / 2, self, self._hear_fetched, number, source, state, step)
        else:
            self._beside, self._fetched = None, state
            if self.phase == HEAL:
                self._load(state)

    def _fetch_failed(self, number: int) -> None:
        """Do without a state that does not come; if the step waits for it, it fails."""
        if number == self._fetches and self._beside is not None:
            self._beside = None
            if self.phase == HEAL:
                self.protocol.stop_catching_up()
                self._fail(self.protocol.quorum_id, NOT_HEALED, group_broken=False)
                self._exchanged()

    def _exchanged(self) -> None:
        if self.phase == READY or (self.phase == HEAL and self._has_computed):
            self._vote()
        elif self.fragments is None:
            self._compute()
        else:
            self._send_fragment(self.fragments)

    def _leave_state(self) -> None:
        """Offer the state of a step that was given up, or tell who waits that it does not come."""
        plan, result, self._plan = self._plan, self._result, None
        if plan is None or not plan.serve or result is None:
            return
        if self.replica.world.scenario.keeps_offers and self.protocol.still_has(result):
            self._serve()
        else:
            self._refused = result.max_step
            for rank, attempt, _ in self._waiters:
                self.replica.world.after(self.replica.world.latency(), rank, rank._heal_failed, attempt)
            self._waiters.clear()

    def _serve(self) -> None:
        self.replica.world.checker.serves(self)
        held = None if self.fragments is None else self.fragments.save()
        counters = self.protocol.counters()
        self.offer, self._refused = (self.protocol.step, self.parameters, counters, held), -1
        waiters, self._waiters = self._waiters, []
        for rank, attempt, step in waiters:
            self._send_state(rank, attempt, step)

    def _heal(self, is_again: bool = False) -> None:
        result = self._result
        assert result is not None
        world = self.replica.world
        home, attempt = world.homes.get(result.recover_src_manager_address), self._attempt
        if home is not None and world.are_refused([self.replica.slot, home.slot]):
            world.after(world.latency(), self, self._heal_failed, attempt)
            return
        if home is not None and world.is_cut(self.replica.slot, home.slot):
            self._source = home.ranks[self.number]
            self.replica.stalled(self.number, result.quorum_id, is_again)
            world.after(world.scenario.keepalive_s / 2, self, self._heal_again, attempt)
            return
        if home is None or not home.is_alive or home.core.checkpoint_metadata(self.number) is None:
            world.after(world.latency(), self, self._heal_failed, attempt)
            return
        source = self._source = home.ranks[self.number]
        source.asked_for_state(self, attempt, result.max_step)

    def _heal_again(self, attempt: int) -> None:
        if attempt == self._attempt and self.phase == HEAL and self._source is not None:
            if self.replica.world.now > self._heal_until:
                self._heal_failed(attempt)
            else:
                self._heal(is_again=True)

    def asked_for_state(self, rank: Rank, attempt: int, step: int) -> None:
        """Send the state of a step to a healing rank, or keep the request until that state is offered."""
        if step == self._refused:
            world = self.replica.world
            world.after(world.latency(), rank, rank._heal_failed, attempt)
        elif self.offer is None or self.offer[0] < step:
            self._waiters.append((rank, attempt, step))
        else:
            self._send_state(rank, attempt, step)

    def _send_state(self, rank: Rank, attempt: int, step: int) -> None:
        world = self.replica.world
        time = world.latency() * 3
        if attempt < 0:
            time += world.scenario.transfer_s * world.random()
        else:
            time += world.scenario.heal_s
        if world.random() < world.heal_break_rate:
            world.feel("heal_break")
            if attempt > 0 and world.scenario.patience_s:
                self._hung.append((rank, attempt))
                world.after(rank.replica.patience_s, rank, rank._heal_failed, attempt)
            else:
                world.after(time / 2, rank, rank._heal_broke, attempt)
        else:
            world.after(time, rank, rank.hear_state, attempt, self, self.offer, step)

    def hear_state(self, attempt: int, source: Rank, state: Snapshot, step: int, late: bool = False) -> None:
        """Take a peer's state that has arrived, if the peer lived so long."""
        if attempt < 0:
            self._hear_fetched(-attempt, source, state, step)
            return
        if attempt != self._attempt or self.phase != HEAL or self._source is not source:
            return
        world, result = self.replica.world, self._result
        assert result is not None
        is_it = self.protocol.heals_to(state[2], result)
        if source.state == DEAD or not is_it or world.now > self._heal_until:
            self._heal_failed(attempt)
        elif source.state == PAUSED or world.is_cut(self.replica.slot, source.replica.slot):
            self.replica.stalled(self.number, self.protocol.quorum_id, late)
            again = (attempt, source, state, step, True)
            world.after(world.scenario.keepalive_s / 2, self, self.hear_state, *again)
        else:
            self._source = None
            self._agree(state)

    def _heal_broke(self, attempt: int) -> None:
        """Lose the state: a part of it is the peer's by now, unless it comes beside the steps."""
        if attempt < 0:
            self._fetch_failed(-attempt)
        if attempt == self._attempt and self.phase == HEAL:
            self._tear_state()
            self._heal_failed(attempt)

    def _heal_failed(self, attempt: int) -> None:
        """Fail the step: without the state neither this rank nor a rank whose sums count it commits."""
        if attempt < 0:
            self._fetch_failed(-attempt)
        if attempt == self._attempt and self.phase == HEAL:
            self._source = None
            self.replica.world.tell(self.name, "cannot heal", f"in quorum {self.protocol.quorum_id}")
            self._agree(None)

    def _agree(self, state: Snapshot | None) -> None:
        """Vote on whether the state can be loaded, before the vote on the step: all ranks load, or none."""
        self._arrived = state
        if len(self.replica.ranks) == 1:
            self._hear_agreed(state is not None)
            return
        self.phase = AGREE
        vote = self.protocol.vote_on_state(state is not None)._replace(stop=self.stop_wanted)
        self.replica.say(self.number, self.replica.vote, self.number, vote)

    def _hear_agreed(self, has_fetched: bool) -> None:
        state, self._arrived, self.phase = self._arrived, None, HEAL
        self.replica.world.checker.loads(self, has_fetched and state is not None)
        if has_fetched and state is not None:
            self._load(state)
            return
        if state is not None and state[0] > 0:  # it has arrived in this rank's own tensors
            self._tear_state()
        reason = NOT_HEALED if state is None else NOT_ALL_HEALED
        self._fail(self.protocol.quorum_id, reason, group_broken=self.protocol.is_counted_on)
        self._exchanged()

    def _tear_state(self) -> None:
        """Have a part of the state another's."""
        self.parameters = TORN
        self.protocol.lose_state()
        self.replica.world.checker.disowned(self)

    def _load(self, state: Snapshot) -> None:
        """Load a peer's state; where that raises, the script ends the step, or gives it up."""
        world = self.replica.world
        if (amount := self._does("load_error")) is not None:
            self._trouble_attempt = self._attempt
            self._tear_state()
            if self._has_computed and amount < 0.5:
                self._exchanged()
            else:
                self.give_up()
            return
        self.parameters, held = self._parameters_of(state), state[3]
        counters = state[2]
        if self.fragments is not None and held is not None:
            self.fragments.load(held)
            self.parameters = self.fragments.digest()
        if self.protocol.catch_up is not None:
            self._retake_steps(counters)
        else:
            self.protocol.heal(counters)
        world.tell(self.name, "heals to step", self.protocol.step)
        world.checker.healed(self)
        self._exchanged()

    def _parameters_of(self, state: Snapshot) -> int:
        """Return the parameters of a peer's state, or those that the process has kept of it."""
        trainer, result = self.trainer, self._result
        kept = None if trainer is None else trainer.kept
        if kept is None or result is None or not self.protocol.takes(kept[0], result):
            return state[1]
        self.replica.world.felt["kept_state"] += 1
        return kept[1]

    def _keep_state(self, trainer: Trainer) -> None:
        """Keep the state for the next try, if it is certain which version that is."""
        if (held := self.protocol.held) is not None:
            trainer.kept = held, mix(self.parameters, 1) if self._is_stepping else self.parameters

    def _retake_steps(self, counters: dict[str, int]) -> None:
        world, protocol = self.replica.world, self.protocol
        try:
            steps = protocol.steps_to_take(counters)
        except ValueError as error:
            world.checker.violate("heal_is_clean", f"{self.name}: {error}")
        for averages in steps:
            assert isinstance(averages, int)
            self.parameters = mix(self.parameters, averages)
            world.felt["retaken_step"] += 1
        protocol.caught_up(counters)
        self._fetched = None

    # -- ends

    def die(self, why: str) -> None:
        """Die, by SIGKILL or because the script ends with an error."""
        if self.state == DEAD:
            return
        self.state = DEAD
        self.inbox.clear()
        world = self.replica.world
        world.tell(self.name, "dies", why)
        world.checker.died(self)
        for mesh in (self.group_mesh, self._configuring):
            if mesh is not None:
                mesh.leave(self)
        for rank, attempt in (*((rank, attempt) for rank, attempt, _ in self._waiters), *self._hung):
            world.after(world.latency(), rank, rank._heal_failed, attempt)
        self.replica.rank_died(self.number)
        if self.trainer is not None:
            self._keep_state(self.trainer)
            self.trainer.rank_ended(why)
