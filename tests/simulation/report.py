"""Runs many seeds in some processes, and prints the results."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Member, QuorumFormed
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from tests.simulation.cores import Cores
from tests.simulation.mutants import MUTANTS, SEEDS_MAX, Catch, hunt
from tests.simulation.replica import JoinMessage
from tests.simulation.scenario import HELD_UP, MESSAGE_KINDS, STEP_KINDS, draw
from tests.simulation.shrink import shrink, words
from tests.simulation.simulation import run
from torchft_like.core.assignment import assign

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH = 250
GARBAGE_MAX = 50_000  # the objects of a run become garbage all at once
FAILURES_SHOWN = 3


@dataclass
class Tally:
    """The sums over a number of seeds."""

    seeds: int = 0
    cpu_s: float = 0.0
    commits: int = 0
    fewest_faults: int = 1_000_000
    felt: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally's seeds."""
        self.seeds += other.seeds
        self.cpu_s += other.cpu_s
        self.commits += other.commits
        self.fewest_faults = min(self.fewest_faults, other.fewest_faults)
        self.felt.update(other.felt)
        self.violations += other.violations


def run_batch(seeds: Sequence[int]) -> Tally:
    """Run seeds one after the other in this process."""
    tally = Tally(len(seeds))
    began = time.process_time()
    with collecting_rarely():
        for seed in seeds:
            outcome = run(draw(seed))
            tally.commits += outcome.commits
            tally.fewest_faults = min(tally.fewest_faults, outcome.faults)
            tally.felt.update(outcome.felt)
            if outcome.violation is not None:
                tally.violations.append((seed, outcome.violation))
    tally.cpu_s = time.process_time() - began
    return tally


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the collector look at what is made from now on only, and at much of it at once."""
    gc.freeze()
    collected_often = gc.get_threshold()
    gc.set_threshold(GARBAGE_MAX)
    try:
        yield
    finally:
        gc.set_threshold(*collected_often)
        gc.unfreeze()


def many(seeds: range, jobs: int) -> int:
    """Run all seeds; return 1 if one failed."""
    began = time.monotonic()
    total = Tally()
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    for tally in _map(run_batch, batches, jobs):
        total.add(tally)
    wall_s = time.monotonic() - began
    _print_tally(total, wall_s, jobs)
    for seed, violation in total.violations[:FAILURES_SHOWN]:
        print(f"\nseed {seed}: {violation}")
        replay(seed, None, whole=False)
    return 1 if total.violations else 0


def _print_tally(total: Tally, wall_s: float, jobs: int) -> None:
    seeds = max(1, total.seeds)
    messages = sum(total.felt[kind] for kind in (*MESSAGE_KINDS, HELD_UP))
    faults = sum(total.felt.values()) - sum(total.felt[kind] for kind in STEP_KINDS)
    print(
        f"{total.seeds} schedules in {wall_s:.1f} s with {jobs} processes: "
        f"{total.seeds / wall_s:.0f} per second ({total.cpu_s / seeds * 1000:.2f} ms of CPU each)"
    )
    print(
        f"faults felt: {faults / seeds:.0f} per schedule, at least {total.fewest_faults} in each "
        f"({(faults - messages) / seeds:.0f} events, {messages / seeds:.0f} single messages); "
        f"{total.commits / seeds:.0f} commits per schedule"
    )
    print("  " + ", ".join(f"{kind} {count / seeds:.1f}" for kind, count in total.felt.most_common()))
    print(f"violations: {len(total.violations)}")


def replay(seed: int, mutant: str | None, *, whole: bool) -> int:
    """Print the story of one seed; a failure is made small first, unless the whole story is asked for."""
    cores = Cores() if mutant is None else _mutant(mutant)
    scenario = draw(seed)
    outcome = run(scenario, cores, story=True)
    print(scenario)
    if outcome.violation is None or whole:
        print("\n".join(words(outcome.story or [], None if whole else 40)))
        print(outcome.violation or f"no violation; {outcome.faults} faults, {outcome.commits} commits")
        return 1 if outcome.violation else 0
    small = shrink(scenario, outcome, cores)
    print(f"made small: {len(small.only)} of {outcome.injected} faults are left, without {small.without}")
    print("\n".join(words(small.outcome.story or [])))
    print(small.outcome.violation)
    argument = "" if mutant is None else f" --mutant {mutant!r}"
    print(f"replay: python -m tests.simulation --seed {seed}{argument}   (all of it: --all)")
    return 1


def _mutant(name: str) -> Cores:
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant.cores
    raise SystemExit(f"no mutant {name!r}; there are: {', '.join(m.name for m in MUTANTS)}")


def mutants(seeds: range, jobs: int) -> int:
    """Hunt every mutant in the first of these seeds, and in its own one; return 1 if one got away."""
    numbers = seeds[:SEEDS_MAX]
    catches = list(_map(partial(_hunt, numbers), range(len(MUTANTS)), jobs))
    print(f"{'mutant':32} {'seeds':>6}  caught as")
    for catch, mutant in sorted(
        zip(catches, MUTANTS, strict=True), key=lambda pair: pair[0].seeds or SEEDS_MAX + 1
    ):
        count = "-" if catch.seeds is None else "own" if catch.seeds > len(numbers) else str(catch.seeds)
        print(f"{mutant.name:32} {count:>6}  {(catch.violation or 'NOT CAUGHT')[:80]}")
    caught = sum(catch.seeds is not None for catch in catches)
    print(f"{caught} of {len(catches)} caught")
    return 1 if caught < len(catches) else 0


def _hunt(seeds: range, number: int) -> Catch:
    return hunt(MUTANTS[number], [*seeds, MUTANTS[number].seed])


def _map(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(work, items)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(work, items)


def size(replicas: int) -> int:
    """Print the CPU time of the event that forms a quorum of so many, and of the one after half of them
    died.
    """
    core = QuorumCore(LighthouseConfig(min_replicas=replicas // 4, replicas_max=max(replicas, 1)), 1_000)
    ids = [f"replica-{n:06}:{n:032x}" for n in range(replicas)]
    members = [
        Member(i, message=JoinMessage(i, f"http://h{n}:1", f"h{n}:2", 0, 0, 0)) for n, i in enumerate(ids)
    ]
    for number, member in enumerate(members):
        core.register(number, member.replica_id, QuorumNumber(0, 0), (), 0.0)
    for text, left in (("everybody", members), ("half, after the others died", members[: replicas // 2])):
        for number in range(len(left), replicas):
            core.lost(number, "gone", 1.0)
        for number, member in enumerate(left[:-1]):
            core.join(number, member, 2.0)
        began = time.process_time()
        decisions = core.join(len(left) - 1, left[-1], 2.0)
        spent_ms = (time.process_time() - began) * 1000
        formed = decisions[-1]
        if not isinstance(formed, QuorumFormed):
            raise TypeError(f"no quorum of {len(left)}: {core.describe(2.0)}")
        quorum = formed.quorum
        print(f"quorum of {len(quorum.participants)} ({text}): {spent_ms:.1f} ms of CPU")
    began = time.process_time()
    participants = [cast(Any, member.message) for member in quorum.participants]
    assign(quorum.quorum_id, participants, left[0].replica_id, 0, init_sync=True)
    print(f"a rank's part in it: {(time.process_time() - began) * 1000:.1f} ms of CPU")
    return 0
