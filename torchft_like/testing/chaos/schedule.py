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
FAULTS_MAX = 100_000


@dataclass(frozen=True)
class Kind:
    """What is drawn for a kind of fault, and what it needs; docs/testing.md says what each does.

    Attributes:
        duration_s: the shortest and the longest time until it is lifted.
        amount: the smallest and the largest strength: seconds for a delay, a probability for loss.
        needs: features without which it is skipped: "network", "disk", "baby", "ranks", "worker",
            "third" (replica group), "steps".
        is_lifted_when_felt: whether it also lasts until it was felt, which may take any time.
    """

    duration_s: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    needs: tuple[str, ...] = ()
    is_lifted_when_felt: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind(),
        "kill-half": Kind(),
        "kill-rank": Kind(needs=("ranks",)),
        "stop": Kind((2.0, 4.0)),
        "stop-rank": Kind((1.5, 5.0), needs=("ranks",)),
        "starve": Kind((3.0, 10.0), (20.0, 20.0)),  # busy processes for each core
        "slow": Kind((3.0, 5.0), (0.1, 0.3)),
        "idle": Kind((2.0, 3.0), needs=("third", "worker"), is_lifted_when_felt=True),
        "give-up": Kind(needs=("worker", "steps")),
        "sick": Kind((3.0, 5.0), needs=("worker",), is_lifted_when_felt=True),
        "foreign": Kind((0.5, 1.0), needs=("worker",), is_lifted_when_felt=True),
        "leave": Kind(),
        "leave-half": Kind(),
        "leave-in-join": Kind((0.2, 1.5), needs=("third",)),
        "lighthouse-stop": Kind((2.0, 5.0)),
        "lighthouse-kill": Kind((0.2, 1.0)),
        "lighthouse-away": Kind((30.0, 30.0)),
        "baby-kill": Kind(needs=("baby",)),
        "baby-stop": Kind((2.0, 4.0), needs=("baby",)),
        "truncate": Kind(needs=("worker",)),
        "bit-flip": Kind(needs=("worker",)),
        "fd-exhaustion": Kind((0.3, 1.0), needs=("third",), is_lifted_when_felt=True),
        "disk-full": Kind((1.0, 2.0), needs=("disk", "worker")),
        "blackhole": Kind((2.0, 4.0), needs=("network",)),
        "one-way": Kind((2.0, 4.0), needs=("network",)),
        "partition": Kind((2.0, 4.0), needs=("network",)),
        "link": Kind((2.0, 4.0), needs=("network",)),
        "loss": Kind((3.0, 5.0), (0.03, 0.10), ("network",)),
        "delay": Kind((3.0, 5.0), (0.01, 0.04), ("network",)),
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
        ValueError: a kind is unknown, or there is none; a time is not positive, or no fault fits into them,
            or more than FAULTS_MAX do; there is no replica group.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ValueError(f"unknown kinds of fault {unknown}, or none: choose from {', '.join(KINDS)}")
    if not (0 < length_s < math.inf and 0 < interval_s < math.inf and replicas >= 1):
        raise ValueError(
            f"length {length_s} s, interval {interval_s} s and {replicas} replicas must be above 0 and finite"
        )
    if length_s > interval_s * FAULTS_MAX:
        raise ValueError(
            f"a fault every {interval_s:g} s for {length_s:g} s would be more than {FAULTS_MAX}: make the "
            "run shorter (--length), or the interval longer (--interval)"
        )
    chance = random.Random(seed)  # noqa: S311 - for faults, not for secrets
    hand: list[str] = []
    plan: list[Planned] = []
    while (at_s := interval_s * (len(plan) + 0.5 + chance.uniform(-JITTER, JITTER))) < length_s:
        hand = hand or chance.sample(list(kinds), len(kinds))
        kind = hand.pop(0)
        victim = chance.randrange(replicas)
        duration_s, amount = chance.uniform(*KINDS[kind].duration_s), chance.uniform(*KINDS[kind].amount)
        plan.append(Planned(len(plan), at_s, kind, victim, duration_s, amount))
    if not plan:
        raise ValueError(
            f"no fault fits: the first of every {interval_s:g} s comes after {length_s:g} s are over: "
            "make the run longer (--length), or the interval shorter (--interval)"
        )
    return plan
