"""The schedule of faults, with their times and victims: drawn from a seed, before anything runs.

Kinds are dealt like cards: every kind once in a random order, then all of them again, so that a run of
n faults has each kind n / kinds times. Nothing here knows how a fault is injected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

JITTER = 0.2


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what is drawn for it, and what it needs.

    Attributes:
        says: what it does, in words.
        duration_s: the shortest and the longest time until it is lifted.
        is_lifted_when_felt: whether it also lasts until it was felt, which may take any time.
        amount: the smallest and the largest strength: seconds for a delay, a probability for loss.
        needs: features without which it is skipped: "network", "disk", "baby", "ranks", "worker",
            "third" (replica group).
    """

    says: str
    duration_s: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    needs: tuple[str, ...] = ()
    is_lifted_when_felt: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind("SIGKILL of every rank of a replica group, which is started again"),
        "kill-half": Kind("SIGKILL of half of the replica groups at once"),
        "kill-rank": Kind("SIGKILL of one rank of a replica group of several", needs=("ranks",)),
        "stop": Kind("SIGSTOP of a replica group, later SIGCONT", (2.0, 4.0)),
        "stop-rank": Kind(
            "SIGSTOP of one rank of a replica group of several, later SIGCONT", (1.5, 5.0), needs=("ranks",)
        ),
        "starve": Kind(
            "busy processes take the processor from every process of the job", (3.0, 10.0), (20.0, 20.0)
        ),
        "slow": Kind(
            "a replica group is starved: stopped again and again for a moment", (3.0, 5.0), (0.1, 0.3)
        ),
        "idle": Kind(
            "half of the replica groups are killed and come back, but do not join; another one is killed",
            (2.0, 3.0),
            needs=("third", "worker"),
            is_lifted_when_felt=True,
        ),
        "give-up": Kind("a script gives a step up in its backward pass", needs=("worker", "steps")),
        "sick": Kind(
            "a replica group is killed and comes back, and cannot be configured for a while",
            (3.0, 5.0),
            needs=("worker",),
            is_lifted_when_felt=True,
        ),
        "foreign": Kind(
            "a trainer of a wider model comes to the job's lighthouse",
            (0.5, 1.0),
            needs=("worker",),
            is_lifted_when_felt=True,
        ),
        "leave": Kind("a replica group leaves in good order, and is started again"),
        "leave-half": Kind("half of the replica groups leave at once, and come back at once"),
        "leave-in-join": Kind(
            "a replica group leaves and comes back, and another leaves about when it joins",
            (0.2, 1.5),
            needs=("third",),
        ),
        "lighthouse-stop": Kind("SIGSTOP of the lighthouse, later SIGCONT", (2.0, 5.0)),
        "lighthouse-kill": Kind("SIGKILL of the lighthouse, started again at its address", (0.2, 1.0)),
        "lighthouse-away": Kind("SIGKILL of the lighthouse, started again half a minute later", (30.0, 30.0)),
        "baby-kill": Kind("SIGKILL of the process that runs a Baby group's backend", needs=("baby",)),
        "baby-stop": Kind(
            "SIGSTOP of the process that runs a Baby group's backend, later SIGCONT",
            (2.0, 4.0),
            needs=("baby",),
        ),
        "truncate": Kind(
            "SIGKILL of a replica group; the state that it heals from is cut short", needs=("worker",)
        ),
        "bit-flip": Kind(
            "SIGKILL of a replica group; the state that it heals from has a wrong bit", needs=("worker",)
        ),
        "fd-exhaustion": Kind(
            "no more descriptors for a replica, while another one is killed",
            (0.3, 1.0),
            needs=("third",),
            is_lifted_when_felt=True,
        ),
        "disk-full": Kind("the disk for checkpoints is full", (1.0, 2.0), needs=("disk", "worker")),
        "blackhole": Kind("nothing reaches or leaves a host", (2.0, 4.0), needs=("network",)),
        "one-way": Kind("nothing leaves a host, which still hears", (2.0, 4.0), needs=("network",)),
        "partition": Kind(
            "half of the hosts are cut off from the lighthouse's half", (2.0, 4.0), needs=("network",)
        ),
        "link": Kind("two hosts cannot reach each other, but all others", (2.0, 4.0), needs=("network",)),
        "loss": Kind("packets from and to a host are lost", (3.0, 5.0), (0.03, 0.10), ("network",)),
        "delay": Kind("packets from and to a host are late", (3.0, 5.0), (0.01, 0.04), ("network",)),
    }
)


@dataclass(frozen=True)
class Planned:
    """One fault of a schedule.

    Attributes:
        number: the number of the fault, from 0.
        at_s: seconds after the beginning of the run.
        kind: a key of `KINDS`.
        victim: the index of a replica group; some kinds ignore it.
        duration_s: seconds until it is lifted.
        amount: the strength, as `Kind` describes it.
    """

    number: int
    at_s: float
    kind: str
    victim: int
    duration_s: float
    amount: float


def draw(seed: int, kinds: Sequence[str], length_s: float, interval_s: float, replicas: int) -> list[Planned]:
    """Draw the schedule of a run.

    Args:
        seed: the same seed and arguments give the same schedule.
        kinds: keys of `KINDS`.
        length_s: no fault is planned after this.
        interval_s: seconds between two faults, give or take a fifth; the first one comes after half of it.
        replicas: the number of replica groups.

    Raises:
        ValueError: a kind is unknown, or there is none; a time is not positive, or no fault fits into them;
            there is no replica group.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ValueError(f"unknown kinds of fault {unknown}, or none: choose from {', '.join(KINDS)}")
    if not (0 < length_s < math.inf and 0 < interval_s < math.inf and replicas >= 1):
        raise ValueError(
            f"length {length_s} s, interval {interval_s} s and {replicas} replicas must be above 0 and finite"
        )
    chance = random.Random(seed)  # noqa: S311 - for faults, not for secrets
    hand: list[str] = []
    plan: list[Planned] = []
    while (at_s := interval_s * (len(plan) + 0.5 + chance.uniform(-JITTER, JITTER))) < length_s:
        hand = hand or chance.sample(list(kinds), len(kinds))
        kind = hand.pop(0)
        planned = Planned(
            number=len(plan),
            at_s=at_s,
            kind=kind,
            victim=chance.randrange(replicas),
            duration_s=chance.uniform(*KINDS[kind].duration_s),
            amount=chance.uniform(*KINDS[kind].amount),
        )
        plan.append(planned)
    if not plan:
        raise ValueError(
            f"no fault fits: the first of every {interval_s:g} s comes after {length_s:g} s are over: "
            "make the run longer (--length), or the interval shorter (--interval)"
        )
    return plan
