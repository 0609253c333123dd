"""What must hold in every history: the invariants of docs/architecture.md, checked event by event.

The checker is told what the processes did and what reached them, in the order in which it happened. It
knows nothing of quorum rules, cores or faults, so it cannot share their mistakes. The first violation
ends the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lighthouse.core.membership import QuorumNumber
from tests.simulation.scenario import STRANGER, TINY_S

if TYPE_CHECKING:
    from tests.simulation.mesh import Part
    from tests.simulation.rank import Rank
    from tests.simulation.world import World

Ids = tuple[str, ...]
TOGETHER = "all:together"  # in the place of a process: a commit in a quorum of all replica groups
Attempt = tuple[str, int, int, Ids]  # at a try: the launch, the number of the try, a rank, and all processes


class RunOverError(Exception):
    """The run is over: no more can be learned from it."""


class Checker:
    """The history so far, as far as the invariants need it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violation: str | None = None
        self.is_over = False
        self.commits = 0
        # The replica ids that have a session, as the lighthouse sees it, and since when they ask for nothing.
        self._connected: dict[str, float] = {}
        self._given = 0  # the highest quorum id that this lighthouse has given out
        self._knows_of_others = False  # whether it has heard of a higher one
        self.waiting: set[str] = set()  # spares that have a session and no place
        # The last quorum, if it is of most of the connected replicas, all of which are still there.
        self._stronghold: frozenset[str] = frozenset()
        self._newest = 0  # quorum id of the stronghold
        # By quorum that stands, and that no member is known to have left: when one of others was formed.
        self._standing: dict[tuple[int, Ids], float] = {}
        self._previous: Ids = ()  # the last quorum of this life of the lighthouse
        self._number = QuorumNumber(0, 0)  # of that
        self._free: set[str] = set()  # its members that have asked for another one, or given it up
        self._given_up: set[str] = set()  # those that have given it up without asking
        self._told_at = math.inf  # when they were told to
        self._promised: set[tuple[str, int]] = set()  # replicas, each with a quorum that it has given up
        self._seen: dict[str, tuple[int, Ids]] = {}  # by process: the last quorum that it saw
        self._ids: dict[int, Ids] = {}  # by quorum id: its members
        # The state after a step, in a quorum.
        self._states: dict[tuple[int, int, Ids, int], tuple[int, str]] = {}
        self._order: dict[tuple[int, Ids], int] = {}  # quorums in the order in which they were formed
        # By replica group and rank: its newest step, and the quorum of that.
        self._committed: dict[str, dict[int, tuple[int, int]]] = {}
        self._steps: dict[int, list[tuple[int, Ids]]] = {}  # by step: the quorums that committed it
        self._verdicts: dict[tuple[str, int, int], bool] = {}  # by replica group, quorum and step
        # By replica group, quorum and round: whether its ranks load a state.
        self._loads: dict[tuple[str, int, int], bool] = {}
        self._lives: dict[tuple[str, int], bytes] = {}  # by replica group and rank: the process that is it
        # By replica group: the quorum and the step that it committed before it left, if so.
        self._left_at: dict[str, tuple[int, int] | None] = {}
        self._trained: dict[str, int] = {}  # by process: the inner steps since its last sync
        # By process, of those that live: its last try, as the name of the launch, the number of the try, its
        # rank, and the processes of all ranks; and those that are in a try.
        self._attempts: dict[str, Attempt] = {}
        self._tries: set[str] = set()
        self._known: dict[str, set[str]] = {}  # by process: those with which it has begun tries
        self._whole: dict[str, Ids] = {}  # by process: all those in its try, once they have come to it
        self._unheard: set[str] = (
            set()
        )  # starts of replica groups in which a process answered nothing for long
        self._orphans: dict[str, str] = {}  # processes without which their group has gone on: what they owe
        self._told_of: dict[str, tuple[str, int]] = {}  # by spare: the place of which it was told last
        # By process: how many commits it owes in the quiet phase; math.inf: it owes its leave.
        self._awaited: dict[str, float] = {}
        self._spared: tuple[str, ...] = ()  # two replica groups, of which one owes no commits

    def violate(self, invariant: str, text: str) -> None:
        """Record that the run has failed, and end it."""
        if self.violation is None:
            self.violation = f"{invariant}: {text}"
            self._world.tell("VIOLATION", self.violation)
        self.is_over = True
        raise RunOverError

    # -- the lighthouse, as every observer can see it

    def lighthouse_started(self) -> None:
        """Forget all sessions, as a new lighthouse knows no replica. Forget the quorums, too, where no
        process lives that was in one, and no checkpoint is loaded: nobody can tell it of them.
        """
        homes = [self._world.homes[f"http://{process.partition('/')[0]}"] for process in self._seen]
        if not self._world.scenario.saves and not any(home.is_alive for home in homes):
            self._ids.clear()
        self._connected.clear()
        self._given, self._knows_of_others = 0, False
        self.waiting.clear()
        self._told_of.clear()
        self._stronghold = frozenset()
        self._standing.clear()
        self._previous = ()
        self._free, self._given_up, self._told_at = set(), set(), math.inf

    @property
    def standing(self) -> list[int]:
        """The places of the members of the last quorum, if it stands."""
        stands = any(
            ids == self._previous and since == math.inf for (_, ids), since in self._standing.items()
        )
        return [self._world.homes[f"http://{replica_id}"].slot for replica_id in self._previous if stands]

    def lighthouse_died(self) -> None:
        """Forget all sessions: no replica has one with a dead lighthouse."""
        self.lighthouse_started()

    def connected(self, replica_id: str, last_id: int = 0, *, is_spare: bool = False) -> None:
        """Note that a replica group has a session, and has said in which quorum it was last."""
        self._knows_of_others |= last_id > self._given
        if is_spare and replica_id not in self._connected:
            self.waiting.add(replica_id)
            return
        self.waiting.discard(replica_id)
        self._connected[replica_id] = self._world.now
        if 2 * len(self._stronghold) <= len(self._connected):
            self._stronghold = frozenset()

    def disconnected(self, replica_id: str) -> None:
        """Note that a replica group has no session any more."""
        self.waiting.discard(replica_id)
        self._connected.pop(replica_id, None)
        if replica_id in self._stronghold:
            self._stronghold = frozenset()

    def asked(self, replica_id: str, commit_quorum_id: int) -> None:
        """Note that a replica group has asked for a quorum: it commits nothing more in the one before."""
        self._knows_of_others |= commit_quorum_id > self._given
        self._free.add(replica_id)

    def told_to_give_up(self, quorum_id: int) -> None:
        """Note that members of the last quorum were told to give it up."""
        if quorum_id == self._number.quorum_id:
            self._told_at = min(self._told_at, self._world.now)

    def gave_up(self, replica_id: str, number: QuorumNumber) -> None:
        """Note that a member says that it commits nothing more in a quorum: nor does any other in that."""
        if number.quorum_id == self._newest:
            self._stronghold = frozenset()
        if number == self._number:
            self._free.add(replica_id)
            self._given_up.add(replica_id)
            self._promised.add((replica_id, number.quorum_id))

    def announced(self, number: QuorumNumber, ids: Ids, stands: bool, shrinks: bool) -> None:
        """Check a quorum that was formed: it must share a member with any older one that could still commit.

        Also, the replicas that are left out must not be so many that they could form a quorum themselves,
        unless they are new, and were not to be let in. Members of the last quorum count until they have given
        it up, or said nothing for `join_timeout`.
        """
        quorum_id = number.quorum_id
        if len(ids) < self._world.scenario.min_replicas:
            self.violate("one_quorum_per_step", f"quorum {quorum_id} of {' '.join(ids)} is too small")
        if strangers := [i for i in ids if i.startswith(STRANGER)]:
            self.violate("heal_is_clean", f"quorum {quorum_id} has the state of {' '.join(strangers)} in it")
        self._order.setdefault((quorum_id, ids), len(self._order))
        for spare in sorted(self.waiting.intersection(ids)):
            if len(self._connected) >= self._world.scenario.replicas:
                others = " ".join(sorted(self._connected))
                self.violate("spares_wait", f"{spare} is in quorum {quorum_id}, and {others} are there")
            self.connected(spare)
        if quorum_id > self._given and not self._knows_of_others:  # the clock may have been set back
            self._ids[quorum_id] = ids
        self._given = max(self._given, quorum_id)
        stronghold = self._stronghold
        if stronghold and stronghold.isdisjoint(ids):
            self.violate(
                "one_quorum_per_step",
                f"quorum {quorum_id} of {' '.join(ids)} shares no member with quorum {self._newest} of "
                f"{' '.join(sorted(stronghold))}, who are all there and most of the job",
            )
        members = {*ids, *self._previous}
        now, patience = self._world.now, int(self._world.scenario.join_timeout_s * 1000) / 1000
        has_waited = now >= self._told_at + patience
        bound = set(ids) if has_waited else members - (self._given_up - set(ids))
        count = len([i for i, t in self._connected.items() if i in bound or now + TINY_S < t + patience])
        missing = {i for i in self._previous if i in self._connected or not shrinks} - set(ids)
        willing = {*ids, *(self._free & self._connected.keys())}  # some of them may be left out as sick
        is_agreed = missing & self._connected.keys() <= self._free or 2 * len(willing) > count
        is_half = 2 * len(ids) == count and (has_waited or is_agreed)
        if 2 * len(ids) <= count and missing and not is_half:
            self.violate(
                "one_quorum_per_step",
                f"quorum {quorum_id} of {' '.join(ids)} is not most of the {count} that are "
                f"there, and lacks members of the one before it: {' '.join(self._previous)}",
            )
        self._connected.update({i: now for i in members if i in self._connected})
        self._previous, self._number = ids, number
        self._free, self._given_up, self._told_at = self._free - set(ids), set(), math.inf
        self._standing = {
            number: min(since, now)
            for number, since in self._standing.items()
            if since <= now or not set(number[1]) & set(ids)
        }
        if stands:
            self._standing[quorum_id, ids] = math.inf
        # An older one cannot commit any more, as it shares a member with this one.
        is_most = 2 * len(ids) > len(self._connected) and all(i in self._connected for i in ids)
        self._stronghold, self._newest = frozenset(ids if is_most else ()), quorum_id

    # -- processes

    def agreed(self, process: str, quorum_id: int, ids: Ids) -> None:
        """Check the quorum that a process hears it is in."""
        before = self._seen.get(process)
        if before is not None and quorum_id < before[0]:
            self.violate("monotonic", f"{process} saw quorum {before[0]}, and then quorum {quorum_id}")
        if before is not None and quorum_id == before[0] and ids != before[1]:
            self.violate("monotonic", f"{process} saw quorum {quorum_id} with two sets of members")
        self._seen[process] = quorum_id, ids
        if self._ids.setdefault(quorum_id, ids) != ids:
            self.violate(
                "monotonic",
                f"quorum {quorum_id} is {' '.join(ids)} for {process}, and was "
                f"{' '.join(self._ids[quorum_id])}",
            )

    def summed(self, quorum_id: int, parts: Sequence[Part]) -> None:
        """Check the contributions that a collective has added up; zeros are not among them."""
        first = None
        for part in parts:
            if part is None:
                continue
            who, quorum, step, parameters, _ = part
            if quorum != quorum_id:
                self.violate("no_zombie", f"{who} adds a tensor of quorum {quorum} in quorum {quorum_id}")
            if first is None:
                first = part
            elif step != first[2] or parameters != first[3]:
                self.violate(
                    "heal_is_clean",
                    f"in quorum {quorum_id}, {who} (step {step}) and {first[0]} (step {first[2]}) add "
                    "gradients of different parameters",
                )

    def refused_for_nothing(self, process: str, quorum_id: int) -> None:
        """Report a step that was given up although nothing went wrong for this process in its quorum."""
        self.violate(
            "no_zombie", f"{process} does not commit in quorum {quorum_id}, where nothing went wrong for it"
        )

    def serves(self, rank: Rank) -> None:
        """Check a process that offers its state."""
        if rank.parameters < 0:
            self.violate("heal_is_clean", f"{rank.name} offers a state of which a part is another's")

    def loads(self, rank: Rank, is_loaded: bool) -> None:
        """Check that all ranks of a group load a peer's state, or none: it may take collectives."""
        group = rank.replica.core
        heal = group.replica_id, group.last_quorum_id, group.last_quorum_round
        if self._loads.setdefault(heal, is_loaded) != is_loaded:
            self.violate(
                "heal_is_clean",
                f"{rank.name} and another rank of its group heal, and one alone loads",
            )

    def healed(self, rank: Rank) -> None:
        """Check a process that took over a peer's state."""
        protocol = rank.protocol
        replica_id = rank.replica.replica_id
        known = self._version(replica_id, len(rank.replica.ranks))
        if known is not None and protocol.step < known[0]:
            self.violate("no_regress", f"{rank.name} was at step {known[0]} and healed to {protocol.step}")
        version = protocol.step, protocol.commit_quorum_id
        for (step, quorum_id, _, number), (parameters, name) in self._states.items():
            if (step, quorum_id, number) == (*version, rank.number) and parameters != rank.parameters:
                self.violate("heal_is_clean", f"{rank.name} heals to step {step}, and differs from {name}")
        self._record(rank, self._order[self._seen[rank.name]])

    def disowned(self, rank: Rank) -> None:
        """Note a process that has lost, by its script's doing, the state that it had committed."""
        replica_id = rank.replica.replica_id
        self._committed.get(replica_id, {}).pop(rank.number, None)
        # It may commit these steps again, in the same quorum if that is its own alone.
        self._states = {key: state for key, state in self._states.items() if replica_id not in key[2]}
        self._verdicts = {key: verdict for key, verdict in self._verdicts.items() if key[0] != replica_id}

    def _version(self, replica_id: str, ranks: int) -> tuple[int, int] | None:
        """Return the newest step of a replica group; None where its ranks have none, or different ones."""
        versions = self._committed.get(replica_id, {})
        is_whole = len(versions) == ranks and len(set(versions.values())) == 1
        return versions[0] if is_whole else None

    def _record(self, rank: Rank, order: int) -> None:
        self._committed.setdefault(rank.replica.replica_id, {})[rank.number] = rank.protocol.step, order

    def committed(self, rank: Rank, ids: Ids, base: int | None, before: int, gradients: int) -> None:
        """Check a committed step; `base` is the state from which so many gradients were made."""
        self.commits += 1
        protocol = rank.protocol
        step, quorum_id = protocol.step, protocol.quorum_id
        if rank.parameters < 0 or before < 0:
            self.violate("heal_is_clean", f"{rank.name} commits with a state of which a part is another's")
        if base != before and rank.has_collectives:
            what = "gradients of other parameters than its own" if base is not None else "no sum of gradients"
            self.violate("heal_is_clean", f"{rank.name} commits step {step} with {what}")
        if gradients != protocol.num_participants and rank.has_collectives and not rank.is_anew:
            what = f"divides a sum of {gradients} gradients by {protocol.num_participants}"
            self.violate("no_zombie", f"{rank.name} commits step {step} in quorum {quorum_id} and {what}")
        place = rank.replica.replica_id, rank.number
        if self._lives.setdefault(place, rank.process) != rank.process:
            self.violate("suspicion", f"another process commits as {rank.name}")
        key = step, quorum_id, ids, rank.number
        state = self._states.setdefault(key, (rank.parameters, rank.name))
        if state[0] != rank.parameters:
            self.violate(
                "agreement",
                f"{rank.name} and {state[1]} commit step {step} in quorum {quorum_id}, and differ after it",
            )
        self._check_step(rank, step, quorum_id, ids)
        is_told = (rank.replica.replica_id, quorum_id, step) in self._verdicts  # another rank heard it before
        if (rank.replica.replica_id, quorum_id) in self._promised and not is_told:
            self.violate(
                "one_quorum_per_step",
                f"{rank.name} commits step {step} in quorum {quorum_id}, given up before",
            )
        replaced_at = self._standing.get((quorum_id, ids), math.inf)
        if self._world.now > replaced_at > rank.resumed_at and not is_told:
            self.violate(
                "one_quorum_per_step",
                f"{rank.name} commits step {step} in quorum {quorum_id}, after the lighthouse has formed one "
                "without any of its members",
            )
        if self._awaited:
            if self._has_to_be_there() <= set(ids):
                self._pay(TOGETHER)
            self._pay(rank.name)

    def _has_to_be_there(self) -> set[str]:
        """Return the replica groups of the job, without spares that wait for a place."""
        present = [replica for replica in self._world.slots if replica is not None]
        return {r.replica_id for r in present if not r.is_spare or r.core.last_quorum_id}

    def _check_step(self, rank: Rank, step: int, quorum_id: int, ids: Ids) -> None:
        quorums = self._steps.setdefault(step, [])
        order = self._order[quorum_id, ids]
        if (quorum_id, ids) not in quorums:
            for member in ids:
                known = self._version(member, self._world.scenario.ranks)
                if known is not None and known[0] >= step and known[1] < order:
                    self.violate(
                        "no_regress",
                        f"{rank.name} commits step {step} in quorum {quorum_id}, but its member {member} had "
                        f"committed step {known[0]} in an older quorum",
                    )
            self._check_overlap(step, quorum_id, ids, quorums)
            quorums.append((quorum_id, ids))
        self._record(rank, order)

    def _check_overlap(self, step: int, quorum_id: int, ids: Ids, quorums: list[tuple[int, Ids]]) -> None:
        """Check that any two quorums share a replica group, or a start of it, where `min_replica_size` is
        above one half of all, spares included.
        """
        if 2 * self._world.scenario.min_replica_size <= len(self._world.slots):
            return
        slots = {i.partition(":")[0] for i in ids}
        for other, members in quorums:
            if slots.isdisjoint(i.partition(":")[0] for i in members):
                self.violate(
                    "one_quorum_per_step",
                    f"step {step} is committed by quorums {other} and {quorum_id}, which share no member",
                )

    def trained(self, process: str) -> None:
        """Note an inner step."""
        self._trained[process] = self._trained.get(process, 0) + 1

    def sends(self, rank: Rank, fragment: int) -> None:
        """Check a process that sends a fragment: when, and from which parameters it has trained."""
        scenario, fragments = self._world.scenario, rank.fragments
        self._check_inner_steps(rank.name, "sends", scenario.inner_steps - scenario.delay_steps)
        assert fragments is not None
        if rank.parameters >= 0 and fragments.local[fragment][0] != fragments.global_[fragment]:
            self.violate(
                "heal_is_clean", f"{rank.name} has trained from other parameters than the global ones"
            )

    def synced(self, rank: Rank, fragment: int, committed: bool, before: int) -> None:
        """Check a process after a sync: when it ended, and what the next inner steps begin with."""
        scenario, fragments = self._world.scenario, rank.fragments
        self._check_inner_steps(rank.name, "receives", scenario.inner_steps)
        self._trained[rank.name] = 0
        if before < 0:
            return
        assert fragments is not None
        origin, inner_steps = fragments.local[fragment]
        if not committed and rank.parameters != before:
            self.violate("no_trace", f"{rank.name} has other global parameters after a sync that failed")
        if origin != fragments.global_[fragment] or (inner_steps and not committed):
            self.violate("no_trace", f"{rank.name} goes on with local parameters that the others never saw")
        if bool(inner_steps) != scenario.keeps_local and committed:
            self.violate("no_trace", f"{rank.name} mixes local and global parameters by another alpha")

    def _check_inner_steps(self, process: str, verb: str, expected: int) -> None:
        done = self._trained.get(process, 0)
        if done != expected:
            self.violate(
                "on_schedule", f"{process} {verb} a fragment after {done} inner steps, not {expected}"
            )

    def decided(self, rank: Rank, step: int, committed: bool) -> None:
        """Check that a process learns the same verdict on its step as the other ranks of its group."""
        replica, protocol = rank.replica, rank.protocol
        if len(replica.ranks) == 1:
            return
        if self._verdicts.setdefault((replica.replica_id, protocol.quorum_id, step), committed) != committed:
            self.violate(
                "agreement", f"{rank.name} decides otherwise than another rank of its group at {step}"
            )

    def released_too_late(self, process: str, promised: int, ask_at: int) -> None:
        """Report a process that is told to ask at a step that it has begun, though it was asked to hold."""
        self.violate(
            "no_zombie", f"{process} is told to ask at attempt {ask_at}, and has begun all before {promised}"
        )

    def asked_elsewhere(self, process: str, step: int, named: int) -> None:
        """Report a process that asks at another step than that which it was told, though nothing failed."""
        self.violate("no_zombie", f"{process} asks at attempt {step}, and was told to ask at {named}")

    def committed_without(self, replica_id: str, silent: Collection[int]) -> None:
        """Report a step that a replica group commits while ranks are suspected."""
        self.violate("suspicion", f"{replica_id} commits a step while {sorted(silent)} are silent")

    def ended_for_silence(self, process: str, silent_s: float) -> None:
        """Check that one that ends its group for another's silence has listened for the dead time."""
        if silent_s < 0.99 * self._world.scenario.dead_s:
            self.violate("suspicion", f"{process} ends its group after {silent_s:.3f} s of silence")

    def outlasted(self, process: str) -> None:
        """Report a process that was silent for longer than the dead time, and whose group goes on."""
        self.violate("suspicion", f"the group of {process} waits for it after the dead time")

    def left(self, rank: Rank, committed: bool) -> None:
        """Check that a process leaves after the same verdict as the other ranks of its group."""
        verdict = (rank.protocol.quorum_id, rank.protocol.step) if committed else None
        if self._left_at.setdefault(rank.replica.replica_id, verdict) != verdict:
            self.violate(
                "leave_together",
                f"{rank.name} leaves after {verdict}, another rank of its group after "
                f"{self._left_at[rank.replica.replica_id]} (quorum, committed step)",
            )

    def left_behind(self, rank: Rank) -> None:
        """Check that a process which has begun another step than the one after which its group leaves had
        no part in that verdict.
        """
        if (group := rank.replica.replica_id) in self._left_at:
            self.violate(
                "leave_together", f"{rank.name} goes on, its group leaves after {self._left_at[group]}"
            )

    def died(self, rank: Rank) -> None:
        """Note that a process is gone; one that comes back as a spare owes nothing more."""
        owed = self._awaited.pop(rank.name, None)
        if owed == math.inf and not rank.is_leaving:
            self.violate("leave_together", f"{rank.name} ends, and does not leave with its group")
        if owed is not None and (rank.replica.is_spare or owed == math.inf) and self._is_paid():
            self.is_over = True
            self._world.stop()

    # -- meetings between two tries

    def spare_is_told(self, spare: str, place: tuple[str, int]) -> None:
        """Check the place of which a spare is told."""
        for other, its in self._told_of.items():
            if spare == other or place == its:
                self.violate("one_process_per_place", f"{spare} is told of {place}, and {other} of {its}")
        self._told_of[spare] = place

    def spare_is_free(self, spare: str) -> None:
        """Note that the lighthouse hears that a spare has declined its place, or taken it, or is gone."""
        self._told_of.pop(spare, None)

    def begins_try(self, launch: str, attempt: int, number: int, process: str, members: Ids) -> None:
        """Check who begins a try with whom: live processes know the same ones, and each place has one."""
        if "" in members:
            self.violate("one_process_per_place", f"{process} begins try {attempt} without a rank: {members}")
        if members[number] != process:
            self.violate("one_process_per_place", f"{process} is rank {number} beside {members[number]}")
        self._known.setdefault(process, set()).update(members)
        before = self._attempts.get(process)
        if before is not None and (attempt <= before[1] or before[0] != launch):
            self.violate(
                "one_process_per_place", f"{process} begins try {attempt} of {launch} after {before}"
            )
        self._attempts[process] = this = launch, attempt, number, members
        self._tries.add(process)
        for other, its in self._attempts.items():
            its_launch, its_attempt, its_number, its_members = its
            if its_launch != launch or other == process or not self._can_be(members, its_members):
                continue
            if launch in self._unheard and not self._may_both_be_whole(process, this, other, its):
                continue
            if its_attempt == attempt and its_members != members:
                text = f"{process} begins try {attempt} with {members}, {other} with {its_members}"
                self.violate("one_process_per_place", text)
            if its_number == number and other in self._tries:
                self.violate("one_process_per_place", f"{process} and {other} are both rank {number}")

    def is_unheard(self, launch: str) -> None:
        """Note that a process of this start of a replica group answered nothing for the dead time.

        From then on some may go on from a meeting that others begin anew. Their try never is whole.
        """
        self._unheard.add(launch)

    def try_begins(self, launch: str, members: Ids, group: str) -> None:
        """Check that a replica group does not go on twice, now that all ranks have come to a try."""
        for process in members:
            self._whole[process] = members
            self._orphans.pop(process, None)
        for process, (its_launch, *_) in self._attempts.items():
            if its_launch != launch or process in members:
                continue
            if not any(self._know_each_other(process, member) for member in members):
                continue
            others = self._whole.get(process, ())
            if others and all(self._whole.get(other) == others for other in others):
                self.violate(
                    "one_process_per_place", f"{others} and {members} are both all ranks of {launch}"
                )
            self._orphans[process] = owed = f"{group}:{process}"
            if self._awaited:
                self._awaited[owed] = 1

    @property
    def orphans(self) -> list[str]:
        """What processes owe without which their group has gone on: their end."""
        return list(self._orphans.values())

    def _can_be(self, *tries: Ids) -> bool:
        """Return whether all processes of these tries live; otherwise the try never is whole."""
        return all(self._world.stores[process].is_open for members in tries for process in members)

    def _may_both_be_whole(self, one: str, this: Attempt, other: str, its: Attempt) -> bool:
        """Return whether all ranks of both tries may still come to them, by what they have begun."""
        return self._know_each_other(one, other) and all(
            known is None or known[1] < attempt or (known[3] == members and member in self._tries)
            for _, attempt, _, members in (this, its)
            for member in members
            for known in (self._attempts.get(member),)
        )

    def _know_each_other(self, one: str, other: str) -> bool:
        """Return whether a process lives that both have known: else neither can learn of the other."""
        return any(self._world.stores[each].is_open for each in self._known[one] & self._known[other])

    def comes_to_try(self, process: str, attempt: int, members: Ids) -> None:
        """Check that a process comes to the try that it has begun."""
        if self._attempts[process][1::2] != (attempt, members):
            self.violate("one_process_per_place", f"{process} comes to try {attempt} of {members}")

    def ends_try(self, process: str) -> None:
        """Note that a process has ended its try."""
        self._tries.discard(process)
        self._whole.pop(process, None)

    def process_ended(self, process: str) -> None:
        """Note that a process has ended."""
        self._attempts.pop(process, None)
        owed = self._awaited.pop(self._orphans.pop(process, ""), None)
        if owed is not None and self._is_paid():
            self.is_over = True
            self._world.stop()

    # -- the quiet phase

    def expect(self, processes: Sequence[str], commits: int, spared: Collection[str] = ()) -> None:
        """Expect so many commits of each of these processes, and one of all together; the run is over when
        all have made them.

        Args:
            spared: the letters of two replica groups, of which only one has to, and none together with all.
        """
        self._awaited = dict.fromkeys(processes, commits)
        if not spared:
            self._awaited[TOGETHER] = 1
        self._spared = tuple(spared)
        self.is_over = False

    def expect_leave(self, processes: Sequence[str]) -> None:
        """Expect that these processes leave, each with all ranks of its group."""
        self._awaited, self._spared, self.is_over = dict.fromkeys(processes, math.inf), (), False

    def expect_also(self, processes: Sequence[str], commits: int) -> None:
        """Expect commits of these processes, too, which have started in the quiet phase; 0: no longer."""
        for process in processes:
            if commits:
                self._awaited[process] = commits
            else:
                self._awaited.pop(process, None)

    def _pay(self, process: str) -> None:
        owed = self._awaited.get(process)
        if owed is None:
            return
        if owed > 1:
            self._awaited[process] = owed - 1
            return
        self._awaited.pop(process)
        if self._is_paid():
            self.is_over = True
            self._world.stop()

    def _is_paid(self) -> bool:
        debtors = {process.partition(":")[0] for process in self._awaited}
        return not debtors or (len(debtors) == 1 and debtors <= set(self._spared))

    def give_up(self) -> None:
        """Report the processes that owe commits when the time of the quiet phase is over."""
        if self.is_over or self._is_paid():  # the last debtor may have left
            return
        waiting = sorted(self._awaited)
        with contextlib.suppress(RunOverError):
            self.violate(
                "progress", f"{' '.join(waiting)} did not commit, or leave, after the faults had stopped"
            )
