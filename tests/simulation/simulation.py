"""One run: a job is born, suffers, is left alone, and must then get on.

First come arbitrary faults, until enough of them were felt. Then comes the quiet phase: partitions end,
stopped processes go on, dead ones are started again, and every process has to commit steps within a bounded
time. In some runs one link stays cut at first, one replica group sick, or one rank stopped: then all
processes have to but those of one of its two ends, or of that group, and once it is mended, cured or goes on
those, too. No other timeout of any operation is simulated than that of waiting for data over a link that is
cut, so nothing may depend on one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lighthouse.core.decisions import NO_STATE
from tests.simulation.cores import Cores
from tests.simulation.faults import Faults
from tests.simulation.lighthouse import SimLighthouse
from tests.simulation.rank import Rank
from tests.simulation.replica import Replica, name_of
from tests.simulation.restarting import Launch, Trainer
from tests.simulation.scenario import Scenario
from tests.simulation.world import DEAD, RUNNING, Process, World

QUIET_COMMITS = 2
EVENTS_MAX = 100_000
MEETS = "meets"  # in the place of a number: a replica group between two tries, which is to begin another one


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        violation: the invariant and what broke it; None for a good run.
        felt: the number of faults by kind.
        injected: how many faults of EVENT_KINDS there were, felt or not.
    """

    scenario: Scenario
    violation: str | None
    faults: int
    felt: dict[str, int]
    injected: int
    events: int
    commits: int
    virtual_s: float
    story: list[tuple[Any, ...]] | None


class Simulation:
    """A job and its faults.

    Args:
        only: numbers of the faults that happen, for a failure that is made smaller.
        injections: end the faults after so many, instead of after `FAULTS_MIN` that were felt.
    """

    def __init__(
        self,
        scenario: Scenario,
        cores: Cores,
        *,
        only: Collection[int] | None = None,
        injections: int | None = None,
        story: bool = False,
    ) -> None:
        self.world = world = World(scenario, cores, story=story)
        world.launcher = self
        self._incarnations = [0] * len(world.slots)
        self._is_quiet = False
        self._sick: int | None = None  # the place of a replica group that stays sick
        self._launches: list[Launch | None] = [None] * len(world.slots)
        self._spares: list[Trainer] = []  # all there were
        world.lighthouse = SimLighthouse(world)
        for _ in range(scenario.rank_spares):
            self.spare_over()
        for slot in range(len(world.slots)):
            world.after(scenario.compute_s * world.random(), world.nobody, self._start, slot)
        self._faults = Faults(self, only, injections)
        world.after(scenario.compute_s * 4, world.nobody, self._faults.next)

    def run(self) -> Outcome:
        """Run the job from its start to the verdict."""
        world, scenario = self.world, self.world.scenario
        world.run(math.inf, EVENTS_MAX)
        if world.checker.violation is None:
            self._rest()
            self._expect_commits()
        if scenario.bad_link is not None:
            self._try_with(scenario.bad_link)
        if world.checker.violation is None and scenario.sick is not None:
            self._cure()
            self._expect_commits()
        if scenario.stopped is not None and world.checker.violation is None:
            self._faults.stop()
            world.checker.expect(self._alive(), QUIET_COMMITS)
            self._expect_commits()
        # A rank that has loaded another state asks for a quorum while the others of its group go on.
        is_whole = (
            scenario.stop_wait_s < math.inf and not scenario.restarts and "restore" not in scenario.kinds
        )
        if is_whole and world.checker.violation is None:
            self._leave_without_a_quorum()
        return Outcome(
            scenario,
            world.checker.violation,
            world.faults,
            {kind: count for kind, count in world.felt.items() if count},
            self._faults.count,
            world.events,
            world.checker.commits,
            world.now,
            world.story,
        )

    def _leave_without_a_quorum(self) -> None:
        """Check that all ranks leave soon, each with its group, where one is asked to and no lighthouse comes
        back.
        """
        world, scenario = self.world, self.world.scenario
        world.is_ending = True
        world.run(world.now + 3 * scenario.compute_s * world.random(), EVENTS_MAX)
        world.tell("THE LIGHTHOUSE", "is gone for good, and a rank of each group is asked to stop")
        world.lighthouse.crash()
        ranks = [r for replica in self._present() for r in replica.ranks if r.state != DEAD]
        world.run(world.now + scenario.lease_s + scenario.keepalive_s + 20 * scenario.compute_s, EVENTS_MAX)
        world.checker.expect_leave([rank.name for rank in ranks if rank.state != DEAD])
        for replica in self._present():
            replica.ranks[replica.slot % len(replica.ranks)].ask_to_stop()
            for rank in replica.ranks:
                rank.orders.clear()
        soon_s = 40 * scenario.compute_s + 20 * scenario.latency_s
        world.run(world.now + scenario.stop_wait_s + soon_s, EVENTS_MAX)
        world.checker.give_up()

    def _expect_commits(self) -> None:
        self.world.run(self.world.now + self._patience_s(), EVENTS_MAX)
        if not self._is_sick_and_ahead() and not self._are_of_two_jobs():
            self.world.checker.give_up()

    def _is_sick_and_ahead(self) -> bool:
        """Return whether the replica group that stays sick alone has the newest state that is believed, of
        all that have a place: no other gets on.
        """
        quorum = self.world.lighthouse.quorum
        members = () if quorum is None else quorum.participants
        others = {
            m.replica_id for m in members if m.commit_quorum_id == NO_STATE
        } | self.world.checker.waiting
        present = [r for r in self._present() if r.replica_id not in others]
        versions = {r.slot: {rank.version for rank in r.ranks} for r in present}
        whole = {slot: min(some) for slot, some in versions.items() if len(some) == 1}
        return [slot for slot, version in whole.items() if version == max(whole.values())] == [self._sick]

    def _are_of_two_jobs(self) -> bool:
        """Return whether the states began apart, as a lighthouse that has forgotten the first job allows
        where none has a name, and neither job has enough replica groups for a quorum: they have to wait.
        """
        scenario = self.world.scenario
        able = [r for r in self._present() if all(rank.state == RUNNING for rank in r.ranks)]
        began = Counter(first for r in able if (first := max(rank.first_quorum_id for rank in r.ranks)))
        return not scenario.is_named and len(began) > 1 and max(began.values()) < scenario.min_replica_size

    def _try_with(self, link: tuple[int, int]) -> None:
        """Check that all processes commit in spite of the link, after a restart of the lighthouse, too, and
        then with it.
        """
        world = self.world
        if world.checker.violation is None and "lighthouse_crash" in world.scenario.kinds:
            world.lighthouse.crash()
            self.restart_lighthouse(world.scenario.keepalive_s)
            world.checker.expect(self._alive(), QUIET_COMMITS, [name_of(slot) for slot in link])
            self._expect_commits()
        if world.checker.violation is None:
            self._mend(link)
            self._expect_commits()

    def _patience_s(self) -> float:
        """Return ample time for noticing, reconnecting, a grace, a restart, and some steps one after the
        other.
        """
        scenario = self.world.scenario
        patience = 20 * scenario.keepalive_s + 200 * scenario.compute_s + 20 * scenario.delay_s + 2
        return patience if scenario.bad_link is None else patience + 10 * scenario.timeout_s

    def _rest(self) -> None:
        world = self.world
        world.tell("FAULTS", "end", f"after {world.faults} that were felt")
        self._is_quiet = True
        world.calm()
        self._faults.stop()
        spared: Collection[str] = (
            () if world.scenario.bad_link is None else self._cut(world.scenario.bad_link)
        )
        if (sick := world.scenario.sick) is not None:
            world.tell("FAULTS", "end, but for", name_of(sick), "which is sick")
            self._sick, spared = sick, [name_of(sick)]
            if (replica := world.slots[sick]) is not None:
                self._sicken(replica)
        if world.scenario.is_vacant and (first := world.slots[0]) is not None:
            first.die("SIGKILL")
        for slot, replica in enumerate(world.slots):
            if replica is None:
                self._start(slot)
        if world.lighthouse.state == DEAD:
            world.lighthouse.start()
        if world.scenario.stopped is not None:
            spared = [self._stop(world.scenario.stopped)]
        world.checker.expect(self._alive(), QUIET_COMMITS, spared)

    def _cut(self, link: tuple[int, int]) -> list[str]:
        """Cut a link until further notice; return the names of the replica groups at its ends."""
        world = self.world
        world.blocked[link] = world.blocked[link[1], link[0]] = world.now
        if world.refuses:
            world.refused.add(link)
        names = [name_of(slot) for slot in link]
        world.tell("FAULTS", "end, but for the link between", *names)
        return names

    def _sicken(self, replica: Replica) -> None:
        for rank in replica.ranks:
            rank.sick_until = math.inf
            if rank.group_mesh is not None:
                rank.group_mesh.reset()

    def _cure(self) -> None:
        self._sick = None
        for replica in self._present():
            for rank in replica.ranks:
                rank.sick_until = 0.0
        self.world.tell("THE SICK", "are well again")
        self.world.checker.expect(self._alive(), QUIET_COMMITS)

    def _stop(self, slot: int) -> str:
        """Stop the last rank of a replica group until further notice; return the group's name."""
        replica = self.world.slots[slot]
        # One that leaves is no member any more: only the timeout of a transfer from it would end that.
        if replica is not None and replica.ranks[-1].state == RUNNING and not replica.ranks[-1].stop_wanted:
            self.world.tell("FAULTS", "end, but for a stopped process:", replica.ranks[-1].name)
            self._faults.pause(replica.ranks[-1])
        return name_of(slot)

    def _mend(self, link: tuple[int, int]) -> None:
        self.world.tell("THE LINK", "works again")
        self.world.unblock([link, (link[1], link[0])])
        self.world.checker.expect(self._alive(), QUIET_COMMITS)

    # -- the processes

    def _present(self) -> list[Replica]:
        return [replica for replica in self.world.slots if replica is not None]

    def _alive(self) -> list[str]:
        ranks = [rank for replica in self._present() for rank in replica.ranks if self._has_to_commit(rank)]
        meeting = [
            slot for slot, launch in enumerate(self._launches) if launch and not self.world.slots[slot]
        ]
        names = [rank.name for rank in ranks] + [f"{name_of(slot)}:{MEETS}" for slot in meeting]
        return names + self.world.checker.orphans

    def _has_to_commit(self, rank: Rank) -> bool:
        """Return whether a process is alive and no spare, or one for which there is a place."""
        replica = rank.replica
        has_place = replica.core.last_quorum_id > 0 or self.world.scenario.is_vacant
        return rank.state != DEAD and (has_place or not replica.is_spare)

    def processes(self) -> Iterator[Process]:
        """Yield every process that is not known to be dead, the stopped ranks of dead groups included."""
        yield self.world.lighthouse
        for home in self.world.homes.values():
            yield from home.ranks
        yield from self.trainers()

    def trainers(self) -> list[Trainer]:
        """Return the processes that run their functions again, and the spares."""
        ranks = [trainer for launch in self._launches if launch for trainer in launch.audience]
        return [trainer for trainer in dict.fromkeys((*ranks, *self._spares)) if trainer.state != DEAD]

    def died(self, replica: Replica) -> None:
        """Start the group of a dead ManagerServer again, as a launcher does."""
        world = self.world
        if world.slots[replica.slot] is not replica:
            return
        world.slots[replica.slot] = None
        if self._launches[replica.slot] is not None:
            if self._is_quiet:
                world.checker.expect_also([f"{name_of(replica.slot)}:{MEETS}"], 1)
            return
        delay = world.scenario.compute_s * (1 + 12 * world.random())
        world.after(delay, world.nobody, self._start, replica.slot)

    def _start(self, slot: int) -> None:
        world = self.world
        is_left_empty = world.is_ending or (self._is_quiet and world.scenario.is_vacant and slot == 0)
        if world.slots[slot] is not None or self._launches[slot] is not None or is_left_empty:
            return
        self._incarnations[slot] += 1
        if world.scenario.restarts:
            self._launches[slot] = Launch(world, slot, self._incarnations[slot])
            return
        replica = world.slots[slot] = Replica(world, slot, self._incarnations[slot])
        if slot == self._sick:
            self._sicken(replica)
        if self._is_quiet:
            names = [rank.name for rank in replica.ranks if self._has_to_commit(rank)]
            world.checker.expect_also(names, QUIET_COMMITS)

    def begin_try(self, launch: Launch, trainers: Sequence[Trainer]) -> None:
        """Begin a try of a replica group, for which these processes have met."""
        world, slot = self.world, launch.slot
        self._incarnations[slot] += 1
        replica = world.slots[slot] = Replica(world, slot, self._incarnations[slot])
        for trainer, rank in zip(trainers, replica.ranks, strict=True):
            trainer.rank, rank.trainer = rank, trainer
            rank.state, rank.paused_at = trainer.state, trainer.paused_at
        if self._is_quiet:
            world.checker.expect_also([rank.name for rank in replica.ranks], QUIET_COMMITS)
            world.checker.expect_also([f"{name_of(slot)}:{MEETS}"], 0)

    def launch_over(self, launch: Launch) -> None:
        """Start the group anew when all of its processes have ended, as a launcher does."""
        world = self.world
        if self._launches[launch.slot] is not launch:
            return
        self._launches[launch.slot] = None
        delay = world.scenario.compute_s * (1 + 12 * world.random())
        world.after(delay, world.nobody, self._start, launch.slot)

    def spare_over(self) -> None:
        """Start another spare, as a launcher does."""
        world = self.world
        world.after(world.scenario.compute_s * (1 + 8 * world.random()), world.nobody, self._start_spare)

    def _start_spare(self) -> None:
        spare = Trainer(self.world, None, -1)
        self._spares.append(spare)
        self.world.tell(spare.name, "is a spare")
        spare.offer()

    def restart_lighthouse(self, delay: float) -> None:
        """Start the lighthouse again after a while."""
        self.world.after(delay, self.world.nobody, self._start_lighthouse)

    def _start_lighthouse(self) -> None:
        if self.world.lighthouse.state == DEAD:
            self.world.lighthouse.start()


def run(scenario: Scenario, cores: Cores | None = None, **options: Any) -> Outcome:
    """Run a scenario once, with the real cores unless others are given."""
    return Simulation(scenario, cores or Cores(), **options).run()
