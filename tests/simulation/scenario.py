"""The scenario that one seed stands for: the job, its settings and the kinds of faults that are switched on.

This is swarm testing: a run that has every kind of fault at once rarely gets deep into any of them, so each
seed draws a random half of the kinds, and rates of its own. Times are seconds of virtual time. They are
shorter than in a real job, in proportion: what matters is which of them are longer than others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, replace

FAULTS_MIN = 200
SHORT_S = 1.0

# Faults that happen to single messages, at a rate.
MESSAGE_KINDS = ("delay", "overtake", "heal_break")

# Faults that happen at a time, to a process, a connection or a place.
EVENT_KINDS = (
    "session_break",
    "session_twice",
    "peer_reset",
    "partition",
    "crash",
    "rank_crash",
    "lighthouse_crash",
    "pause",
    "rank_pause",
    "lighthouse_pause",
    "slow",
    "clock_jump",
    "report_error",
    "late_error",
    "give_up",
    "leave",
    "link",
    "foreign",
    "sick",
    "rank_session_break",
    "rank_replaced",
    "try_error",
    "trainer_crash",
    "spare_crash",
    "trainer_pause",
    "trainer_cut",
    "time_out",
)
RANK_KINDS = ("rank_session_break", "rank_replaced")  # to what is between the ranks of a replica group
SILENCE_KINDS = ("trainer_pause", "trainer_cut")  # where processes run their functions again

# What training scripts do at a place of their own, once a fault has told them to.
ORDER_KINDS = (
    "skip_commit",
    "vote_late",
    "report_early",
    "leave_alone",
    "shrink",
    "restore",
    "optimizer_error",
    "load_error",
)

# What is no fault, and is counted: committed steps, tries in the same process, places that spares have taken,
# heals to a state that the process has kept since its last try, processes without which others have gone on,
# groups that leave without a quorum, steps that are lost as somebody heals in them.
STEP_KINDS = (
    "bare_step",
    "long_step",
    "kept_step",
    "retaken_step",
    "started_again",
    "place_taken",
    "kept_state",
    "passed_over",
    "left_in_vain",
    "fragile",
)

# A message that a partition holds up: counted, not switched on.
HELD_UP = "held_up"

RESTARTING = (10, 23)  # the seeds, modulo 32, of jobs whose processes run their functions again

LYING = (14,)  # the seeds, modulo 32, of jobs in which some replica groups lie about their step

CATCHING_UP = (16, 18, 20, 21, 24)  # the seeds, modulo 32, of jobs in which replica groups catch up

# The seeds, modulo 41, in which operations take longer than their timeouts, a rank of a replica group starts
# late, or steps have a fixed number of participants, or need more of them than the lighthouse.
TIMING_OUT, STARTING_LATE, FIXED, DEMANDING = 15, 19, 21, 30

STOPPING = 6  # the seeds, modulo 7, in which who is asked to stop does not wait for a quorum for ever

SLOW_HEALS = 28  # the seeds, modulo 43, of jobs in which a heal takes longer than `join_timeout`

THREADS = 17  # the seeds, modulo 53, of jobs whose processes are on hosts with too few cores
FRAGILE = 21  # the seeds, modulo 47, of jobs in which each step is lost in which somebody heals

LONG_STEPS = (26, 29)  # the seeds, modulo 32, of jobs whose steps are longer than `join_timeout`

# A replica group that has just started says that it is at a step far ahead: counted, not switched on.
LIE = "lie"

TINY_S = 1e-9  # more than a difference of two times is off by
STRANGER = "stranger"  # the name of trainers of another job

KINDS = (*MESSAGE_KINDS, *EVENT_KINDS, *ORDER_KINDS, HELD_UP, LIE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run that is not an event in it.

    Attributes:
        replicas: replica groups of the job.
        ranks: ranks of each of them.
        min_replicas: of the lighthouse.
        kinds: the kinds of faults that are switched on.
        gap_s: mean time between two faults of EVENT_KINDS.
        latency_s: mean time that a message takes.
        delay_s: the longest that a delayed message is held up.
        compute_s: mean time of a forward and backward pass.
        keepalive_s: how long a dead connection stays unnoticed.
        dead_s: how long a rank may be silent before its group is lost.
        join_timeout_s: as in the lighthouse's settings. Where it is short, slow replicas are left behind.
        buckets: collectives in a step.
        is_even: whether every step has so many; otherwise each has up to that, by its number.
        saves: whether a replica that starts again begins with its own periodic checkpoint.
        init_sync, async_quorum: as in the Manager's constructor.
        probe_s: how long a replica group waits for others to answer a probe.
        timeout_s: of whatever waits for data over a link that is cut. Only where links are cut for longer
            than that, and not in all of these runs: everything else has to end without it.
        bad_link: two replica groups that cannot reach each other in the first part of the quiet phase.
        stopped: the place of a replica group of which a rank is stopped in the first part of the quiet phase.
        stall_s: how long a replica group waits for data over a link that is cut before it looks for the link.
        stands: whether quorums stand; otherwise every step asks for one.
        waits: whether replica groups wait for a lighthouse that is away, instead of going on.
        lease_s: how long members of a quorum that stands go on without a word from the lighthouse.
        sick: a replica group whose process group fails in the first part of the quiet phase whenever it is
            configured.
        is_named: whether replica groups give a job id, as they do where strangers come, of which one that is
            yet to begin could otherwise not tell. Without it states that began apart are of two jobs, so runs
            in which scripts load older ones have one.
        idle: how many sessions are open of which nobody ever asks for a quorum. With so many nobody has a
            majority until `join_timeout_s`, so only runs in which that is short have them.
        spares: how many replica groups wait for a place beside those of the job.
        has_liars: whether replica groups that start again may say that they are at a step far ahead, while
            others are there that can show how far the job is.
        starts_late: whether one rank of a replica group may start long after the others.
        is_fixed: whether `min_replica_size` groups take part in a step, and the others add zeros.
        min_replica_size: of the step protocol.
        thread_s: the longest until a thread of a rank goes on with what another has handed to it.
        stop_wait_s: how long a rank that was asked to stop waits for a quorum; math.inf: until there is one.
        fragments: how many fragments DiLoCo syncs in turn; 0: gradients are averaged in every step.
        inner_steps: the inner steps from one sync to the next, which together take `compute_s`.
        delay_steps: the inner steps between the begin of a sync and its end.
        keeps_local: whether local parameters are mixed with the global ones after a sync, and not replaced.
        steps_kept_max: how many steps a replica group that heals lets pass before others wait for it; 0: it
            does not catch up beside them.
        transfer_s: the longest that a state takes then.
        heal_s: how long a state takes otherwise, beside a few messages.
        patience_s: how long a replica group waits for a state, as it tells the lighthouse; 0: until it
            comes, and it tells nothing.
        keeps_offers: whether a state that was offered can be fetched after its source has gone on.
        is_fragile: whether members in whose step somebody heals lose it, and those that have yet to commit a
            step are slower.
        gives_up: whether one from which another heals gives it up.
        is_vacant: whether the first replica group does not come back in the quiet phase: a spare has to take
            its place.
        restarts: whether processes run their training functions again after errors that no step survives.
        restarts_max: how often, without a spare.
        rank_spares: how many processes wait for the place of a rank.
        waits_for_spares, spare_wait_s: whether ranks wait for a spare where none is there, and how long; else
            how long they wait for the lighthouse.
    """

    seed: int
    replicas: int
    ranks: int
    min_replicas: int
    kinds: tuple[str, ...]
    gap_s: float
    latency_s: float
    delay_rate: float
    overtake_rate: float
    heal_break_rate: float
    delay_s: float
    compute_s: float
    keepalive_s: float
    join_timeout_s: float
    buckets: int
    is_even: bool
    saves: bool
    init_sync: bool
    async_quorum: bool
    probe_s: float
    timeout_s: float
    bad_link: tuple[int, int] | None
    stopped: int | None
    stall_s: float
    stands: bool
    waits: bool
    sick: int | None
    is_named: bool
    idle: int
    lease_s: float
    dead_s: float
    spares: int = 0
    is_vacant: bool = False
    fragments: int = 0
    inner_steps: int = 1
    delay_steps: int = 0
    keeps_local: bool = False
    steps_kept_max: int = 0
    transfer_s: float = 0.0
    heal_s: float = 0.0
    patience_s: float = 0.0
    keeps_offers: bool = True
    is_fragile: bool = False
    gives_up: bool = False
    restarts: bool = False
    restarts_max: int = 0
    rank_spares: int = 0
    waits_for_spares: bool = False
    spare_wait_s: float = 0.0
    has_liars: bool = False
    starts_late: bool = False
    is_fixed: bool = False
    min_replica_size: int = 0
    stop_wait_s: float = math.inf
    thread_s: float = 0.0

    @property
    def brief_s(self) -> float:
        """How long a process waits for a store that answers a few questions."""
        return 2 * self.keepalive_s + 4 * self.delay_s

    @property
    def look_again_s(self) -> float:
        """After how long a process looks again that waits for others; much longer than a meeting takes."""
        return self.dead_s + self.brief_s

    @property
    def meet_s(self) -> float:
        """How long a rank that has begun a try waits for the others."""
        return 4 * self.keepalive_s + 10 * self.delay_s

    def collectives(self, step: int) -> int:
        """Return how many collectives this step has on all ranks."""
        return self.buckets if self.is_even else (self.seed + step * step) % (self.buckets + 1)

    def without(self, kinds: Collection[str]) -> Scenario:
        """Return the same job with these kinds of faults switched off."""
        return replace(self, kinds=tuple(kind for kind in self.kinds if kind not in kinds))


def draw(seed: int, replicas: int | None = None) -> Scenario:
    """Return the scenario of a seed; it has three to seven replicas unless told otherwise."""
    chance = random.Random(seed)
    flip = chance.random
    count = replicas or 3 + int(flip() * 5)
    ranks = 1 if flip() < 0.75 else 2 + int(flip() * 1.3)
    kinds = [kind for kind in MESSAGE_KINDS + EVENT_KINDS[:-10] + ORDER_KINDS if flip() < 0.5]
    if "delay" not in kinds and flip() < 0.7:
        kinds.append("delay")
    # Where no messages are held up, all of the same number of faults are events: they come faster, then.
    haste = 1.0 if "delay" in kinds else 0.5 if "overtake" in kinds else 0.2
    compute_s = 0.002 * 8 ** flip()
    keepalive_s = compute_s * 4 * 4 ** flip()
    has_links = "link" in kinds
    one = int(flip() * count)
    other = (one + 1 + int(flip() * (count - 1))) % count
    scenario = Scenario(
        seed=seed,
        replicas=count,
        ranks=ranks,
        min_replicas=count // 2 + 1 if flip() < 0.6 else 1 + int(flip() * 2),
        kinds=tuple(kinds if any(kind != "heal_break" for kind in kinds) else [*kinds, "delay"]),
        gap_s=compute_s * haste * 0.25 * 8 ** flip(),
        latency_s=0.0002 * 5 ** flip(),
        delay_rate=0.2 + 0.4 * flip(),
        overtake_rate=0.05 + 0.2 * flip(),
        heal_break_rate=0.3 * flip(),
        delay_s=compute_s * 4 * flip(),
        compute_s=compute_s,
        keepalive_s=keepalive_s,
        join_timeout_s=compute_s * (2 + 10 * flip()) if flip() < 0.25 else 3600.0,
        buckets=1 if flip() < 0.8 else 2,
        is_even=flip() < 0.8,
        saves=flip() < 0.3,
        init_sync=flip() < 0.8,
        async_quorum=flip() < 0.8,
        probe_s=keepalive_s * 0.5,
        timeout_s=keepalive_s * (1 + 2 * flip()) if has_links else math.inf,
        bad_link=(one, other) if has_links and flip() < 0.3 else None,
        stopped=None,
        stall_s=keepalive_s * (0.1 + flip()) if has_links and flip() < 0.8 else math.inf,
        stands=flip() < 0.6,
        waits=flip() < 0.2,
        sick=None,
        is_named=False,
        idle=int(flip() * 5),
        lease_s=keepalive_s * (0.5 + 3 * flip()),
        dead_s=0.0,
    )
    if scenario.join_timeout_s > SHORT_S:
        scenario = replace(scenario, idle=0)
    else:  # as it should be, it is longer than a step of a replica that nothing has slowed down
        messages_s = 10 * scenario.latency_s + 2 * scenario.buckets * scenario.delay_s
        scenario = replace(scenario, join_timeout_s=scenario.join_timeout_s + messages_s)
    scenario = _with_sick_and_foreign(scenario)
    scenario = replace(scenario, dead_s=keepalive_s * (0.5 + 2 * flip()))
    if ranks > 1:
        kinds = [*scenario.kinds, *(kind for kind in RANK_KINDS if flip() < 0.5)]
        scenario = replace(scenario, kinds=tuple(kinds))
    if scenario.bad_link is None and scenario.sick is None and flip() < 0.3:
        scenario = replace(scenario, stopped=one, dead_s=3600.0)
    scenario = _with_spares(scenario) if seed % 8 == 4 else scenario
    scenario = _with_syncs(scenario) if seed % 32 == 6 else scenario
    scenario = _with_catching_up(scenario) if seed % 32 in CATCHING_UP else scenario
    scenario = _with_restarts(scenario) if seed % 32 in RESTARTING else scenario
    scenario = _with_long_steps(scenario) if seed % 32 in LONG_STEPS else scenario
    scenario = replace(scenario, has_liars=seed % 32 in LYING, min_replica_size=scenario.min_replicas)
    scenario = _with_what_is_rare(scenario, seed % 41)
    is_search_enough = scenario.stall_s < math.inf and seed % 3 > 0
    return _slowed(replace(scenario, timeout_s=math.inf) if is_search_enough else scenario)


def _with_sick_and_foreign(scenario: Scenario) -> Scenario:
    """Return the job with members that are sick or foreign, which are drawn apart from the rest."""
    apart = random.Random(scenario.seed * 3 + 1).random
    if apart() < 0.25:
        scenario = replace(scenario, kinds=(*scenario.kinds, "sick"))
    if scenario.bad_link is None and apart() < 0.25:
        scenario = replace(scenario, sick=int(apart() * scenario.replicas))
    scenario = _with_few_kinds(scenario)
    if scenario.min_replicas > 1 and apart() < 0.4:  # a stranger is no quorum by itself
        scenario = replace(scenario, kinds=(*scenario.kinds, "foreign"))
    needs_name = scenario.saves or not {"restore", "foreign"}.isdisjoint(scenario.kinds)
    return replace(scenario, is_named=needs_name or apart() < 0.5)


def _with_what_is_rare(scenario: Scenario, place: int) -> Scenario:
    """Return the job with one more kind of fault, or another rule for who takes part in a step, or leaves."""
    scenario = _with_stops(scenario) if scenario.seed % 7 == STOPPING else scenario
    if place == TIMING_OUT and not scenario.fragments:  # an exception of such a script gives no sync up
        is_crowded = scenario.restarts or scenario.seed // 41 % 2 == 0
        return replace(scenario, kinds=(*scenario.kinds, "time_out")) if is_crowded else _in_haste(scenario)
    if place == STARTING_LATE and not scenario.restarts:
        return replace(scenario, ranks=max(scenario.ranks, 2), starts_late=True)
    if place == DEMANDING:
        few = scenario.without(["foreign"])  # which could be a quorum by itself
        return replace(few, min_replicas=1, min_replica_size=few.replicas // 2 + 1, is_named=True)
    scenario = _fragile(scenario) if scenario.seed % 47 == FRAGILE else scenario
    return replace(scenario, is_fixed=place == FIXED)


def _fragile(scenario: Scenario) -> Scenario:
    """Return the job with newcomers, of which none is so slow that the others go on without it."""
    kinds = tuple(dict.fromkeys((*scenario.kinds, "crash")))
    gap_s = max(scenario.gap_s, scenario.compute_s)
    scenario = replace(scenario, kinds=kinds, gap_s=gap_s, join_timeout_s=3600.0, idle=0, is_fragile=True)
    # Who often gives steps up is left out, and then no source beside the steps; no sync is given up.
    is_whole = scenario.steps_kept_max > 0 or scenario.fragments > 0
    return replace(scenario, gives_up=not is_whole and scenario.seed // 47 % 2 == 0)


def _in_haste(scenario: Scenario) -> Scenario:
    """Return a job in which requests for quorums are made again just as they are answered, and members come
    and go meanwhile.
    """
    kinds = ("delay", "crash", "leave", "time_out", *["restore"] * (scenario.seed // 82 % 2))
    few = replace(scenario, kinds=kinds, gap_s=0.2 * scenario.compute_s, bad_link=None)
    return replace(few, ranks=max(few.ranks, 2), is_named=few.is_named or "restore" in kinds)


def _with_few_kinds(scenario: Scenario) -> Scenario:
    """Return a job in which what is rare beside many kinds of faults comes about, for some seeds."""
    place, compute_s = scenario.seed % 128, scenario.compute_s
    if place == 127:  # quorums stand for long enough to be cut off whole
        kinds: tuple[str, ...] = ("partition", "crash", "rank_crash", "vote_late")
        return replace(scenario, kinds=kinds, gap_s=12 * compute_s, min_replicas=1, stands=True)
    if place == 63:  # the lighthouse dies while it hands out an id that is kept
        kinds = ("delay", "overtake", "lighthouse_crash")
        return replace(scenario, kinds=kinds, gap_s=4 * compute_s, stands=False)
    return scenario


def _with_long_steps(scenario: Scenario) -> Scenario:
    """Return the job with a `join_timeout` longer than messages take, and mostly shorter than a step."""
    part, delay_s = random.Random(scenario.seed * 3 + 6).random(), scenario.delay_s / 20
    messages_s = 0.001 + 4 * scenario.latency_s + 2 * scenario.buckets * delay_s
    # Who is alone as it wishes to shrink goes on from a checkpoint of an earlier run that nobody believes.
    few = scenario.without(["shrink"])
    return replace(few, delay_s=delay_s, join_timeout_s=messages_s + part * scenario.compute_s)


def _slowed(scenario: Scenario) -> Scenario:
    return _with_slow_threads(_with_slow_heals(scenario))


def _with_slow_threads(scenario: Scenario) -> Scenario:
    """Return the job with threads that go on as late as messages come, or as the end of a connection is
    noticed. A `join_timeout` is longer.
    """
    if scenario.seed % 53 != THREADS:
        return scenario
    longest_s = scenario.keepalive_s if scenario.seed // 53 % 2 else 20 * scenario.latency_s
    thread_s = longest_s * random.Random(scenario.seed * 3 + 7).random()
    return replace(scenario, thread_s=thread_s, join_timeout_s=scenario.join_timeout_s + 4 * thread_s)


def _with_slow_heals(scenario: Scenario) -> Scenario:
    """Return the job, in some of them with heals that take longer than `join_timeout`, or hang."""
    if scenario.seed % 43 != SLOW_HEALS:
        return scenario
    part, delay_s = random.Random(scenario.seed * 3 + 8).random(), scenario.delay_s / 4
    messages_s = 10 * scenario.latency_s + 2 * scenario.buckets * delay_s
    join_timeout_s = scenario.compute_s * (2 + 2 * part) + messages_s
    # One in which the first replica group waits for ever, and another one is stopped, may have too few.
    are_enough = scenario.min_replicas < scenario.replicas - 1
    return replace(
        scenario,
        kinds=tuple(dict.fromkeys((*scenario.kinds, "heal_break"))),
        delay_s=delay_s,
        heal_break_rate=0.5,
        stopped=scenario.stopped if are_enough else None,
        gap_s=4 * scenario.gap_s,
        join_timeout_s=join_timeout_s,
        heal_s=2 * join_timeout_s,
        patience_s=4 * join_timeout_s,
        timeout_s=scenario.timeout_s + 4 * join_timeout_s,
        # A fragile job loses each step in which somebody heals, and with it the offers that are not kept.
        keeps_offers=scenario.is_fragile or scenario.seed // 43 % 2 == 1,
    )


def _with_stops(scenario: Scenario) -> Scenario:
    part = random.Random(scenario.seed * 3 + 7).random()
    return replace(scenario, stop_wait_s=scenario.keepalive_s * (0.3 + 2 * part))


def _with_spares(scenario: Scenario) -> Scenario:
    is_whole = scenario.bad_link is None and scenario.sick is None and scenario.stopped is None
    is_vacant = is_whole and scenario.idle == 0 and random.Random(scenario.seed * 3 + 2).random() < 0.7
    # Members whose scripts do as they please end a quorum that stands without being asked to.
    kinds = [kind for kind in (*ORDER_KINDS, "give_up") if kind != "shrink"]
    return replace(scenario, spares=1 if is_vacant else 2, is_vacant=is_vacant, is_even=True).without(kinds)


def _with_catching_up(scenario: Scenario) -> Scenario:
    """Return the job with replica groups that heal beside the steps of the others."""
    chance = random.Random(scenario.seed * 3 + 4).random
    steps = 1 + int(chance() * 5)
    transfer_s = scenario.compute_s * 2 * steps * chance()
    return replace(scenario, async_quorum=True, steps_kept_max=steps, transfer_s=transfer_s)


def _with_restarts(scenario: Scenario) -> Scenario:
    """Return the job with processes that run their training functions again, and spares for them."""
    chance = random.Random(scenario.seed * 3 + 5).random
    kinds = [
        "rank_crash",
        "trainer_crash",
        *(kind for kind in ("spare_crash", "try_error") if chance() < 0.7),
    ]
    if chance() < 0.3:  # all others are few then, and meetings come to their ends
        kinds += [kind for kind in ("delay", "lighthouse_crash") if chance() < 0.7]
    else:
        others = {*kinds, "rank_replaced", "foreign"}
        kinds += [kind for kind in scenario.kinds if kind not in others]
    scenario = replace(
        scenario,
        ranks=2 + int(chance() * 2),
        kinds=tuple(kinds),
        gap_s=scenario.compute_s * (0.5 if "delay" in kinds else 0.2) * 8 ** chance(),
        bad_link=None,
        sick=None,
        restarts=True,
        restarts_max=int(chance() * 40),
        rank_spares=int(chance() * 3.5),
        waits_for_spares=chance() < 0.5,
        spare_wait_s=scenario.keepalive_s * (1 + 4 * chance()),
    )
    silences = [kind for kind in SILENCE_KINDS if chance() < 0.5]
    return replace(scenario, kinds=(*scenario.kinds, *silences))


def _with_syncs(scenario: Scenario) -> Scenario:
    """Return the job with DiLoCo, whose steps are syncs with inner steps before them."""
    chance = random.Random(scenario.seed * 3 + 3).random
    interval = 1 + int(chance() * 4)
    # An exception of such a script gives no sync up: that goes on with the next inner step.
    few = scenario.without(["restore", "give_up", "skip_commit"])
    return replace(
        few,
        kinds=few.kinds if any(kind != "heal_break" for kind in few.kinds) else (*few.kinds, "delay"),
        async_quorum=False,
        is_even=True,
        saves=False,
        fragments=1 + int(chance() * 3),
        inner_steps=interval,
        delay_steps=int(chance() * interval),
        keeps_local=chance() < 0.5,
    )
