"""A bounded part of the simulation: some seeds, every mutant, and the same history for the same seed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.simulation.mutants import MUTANTS, Mutant, hunt
from tests.simulation.report import run_batch
from tests.simulation.scenario import FAULTS_MIN, KINDS, draw
from tests.simulation.shrink import shrink
from tests.simulation.simulation import run

SEEDS = 1000

# Seeds in which a real core failed once, and why.
REGRESSIONS = {
    0: "ranks of one group at different steps passed for up to date",
    5: "an error before the quorum: the others waited in configure",
    48: "a report from before the clock was set back took over from a running quorum",
    315: "a late quorum left a member behind, and nobody told it",
    443: "a healing replica waited for the state of a source that had gone on",
    2149: "two lives of a lighthouse whose clock was set back gave the same quorum id",
    2979: "an id that only a saved state remembered was given again",
}


def test_no_seed_breaks_an_invariant_and_each_has_its_faults() -> None:
    tally = run_batch(range(SEEDS))
    assert tally.violations == []
    assert tally.fewest_faults >= FAULTS_MIN
    assert tally.commits > SEEDS
    assert set(tally.felt) >= set(KINDS)


@pytest.mark.parametrize("seed", REGRESSIONS, ids=str)
def test_a_seed_that_failed_once_does_not_fail_again(seed: int) -> None:
    assert run(draw(seed)).violation is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_core_is_caught(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.caught_by).violation is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_seed_is_one_history(seed: int) -> None:
    first, second = run(draw(seed), story=True), run(draw(seed), story=True)
    assert first.story
    assert first == second


def test_a_history_does_not_depend_on_the_process_it_is_made_in() -> None:
    """Neither on its hash seed nor on what ran in it before."""
    program = "from tests.simulation import *; import tests.simulation.simulation as s;"
    program += "from tests.simulation.scenario import draw; print(s.run(draw(11), story=True).story)"
    stories = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert stories[0] == stories[1] == f"{run(draw(11), story=True).story}\n"


def test_a_failure_is_made_small_and_still_fails() -> None:
    mutant = next(m for m in MUTANTS if m.name == "compares steps only")
    seed = mutant.caught_by[0]
    outcome = run(draw(seed), mutant.cores)
    small = shrink(draw(seed), outcome, mutant.cores)
    assert small.outcome.violation is not None
    assert small.outcome.violation.startswith(str(outcome.violation).partition(":")[0])
    assert len(small.only) < outcome.injected / 2
