"""Make a failure small: leave faults out as long as it still fails, and tell what is left in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.cores import Cores
from tests.simulation.scenario import MESSAGE_KINDS, Scenario
from tests.simulation.simulation import Outcome, run

TAIL = 40
RUNS_MAX = 300


@dataclass(frozen=True)
class Small:
    """A failure with as few faults as could be found.

    Attributes:
        only: the numbers of the faults of EVENT_KINDS that are left.
        without: the kinds of MESSAGE_KINDS that are not needed.
    """

    outcome: Outcome
    only: tuple[int, ...]
    without: tuple[str, ...]


def shrink(scenario: Scenario, outcome: Outcome, cores: Cores) -> Small:
    """Drop kinds of message faults, then ever smaller pieces of the list of other faults."""
    injections = outcome.injected
    invariant = _invariant(outcome)
    runs = 0

    def fails(only: tuple[int, ...], without: tuple[str, ...]) -> bool:
        nonlocal runs
        runs += 1
        again = run(scenario.without(without), cores, only=frozenset(only), injections=injections)
        return runs < RUNS_MAX and _invariant(again) == invariant

    only = tuple(range(injections))
    if not fails(only, ()):
        return Small(run(scenario, cores, story=True), only, ())
    needed = _drop(
        tuple(k for k in MESSAGE_KINDS if k in scenario.kinds),
        lambda kept: fails(only, tuple(k for k in MESSAGE_KINDS if k not in kept)),
    )
    dropped = tuple(k for k in MESSAGE_KINDS if k not in needed)
    only = _drop(only, lambda kept: fails(kept, dropped))
    last = run(scenario.without(dropped), cores, only=frozenset(only), injections=injections, story=True)
    return Small(last, only, dropped)


def _drop(items: tuple[Any, ...], fails: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
    """Return the smallest part of `items` found that still fails: halves are left out, quarters, and so
    on.
    """
    size = max(1, len(items) // 2)
    while items:
        start = 0
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if fails(kept):
                items = kept
            else:
                start += size
        if size == 1:
            break
        size = max(1, size // 2)
    return items


def words(story: list[tuple[Any, ...]], tail: int | None = TAIL) -> list[str]:
    """Return the end of a history, one line each: the time, the process, the event."""
    lines = story if tail is None else story[-tail:]
    return [f"{line[0]:9.4f}  " + " ".join(str(word) for word in line[1:]) for line in lines]


def _invariant(outcome: Outcome) -> str | None:
    return outcome.violation.partition(":")[0] if outcome.violation else None
