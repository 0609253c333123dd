"""A bounded part of the simulation: some seeds, every mutant, and the same history for the same seed."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.simulation import simulation
from tests.simulation.mutants import MUTANTS, Mutant, hunt
from tests.simulation.report import collecting_rarely, run_batch
from tests.simulation.scenario import FAULTS_MIN, KINDS, STEP_KINDS, draw
from tests.simulation.shrink import shrink
from tests.simulation.simulation import run

SEEDS = 400
EVENTS_MAX = 6_000  # of a mutant that gets stuck: none of these seeds takes the real cores so many
# With the cores and the simulator of their time.
ONCE_BROKE = (51, 104, 145, 1_460, 2_571, 2_791, 3_892, 26_066, 37_717, 39_977, 192_424, 520_573, 200_477)
# Where the simulator's own model of a fetch, of a verdict, or of a leave, was at fault.
ONCE_MISJUDGED = (200_146, 204_597, 64_098, 74_535)
# Where some of a group's processes do not hear each other.
ONCE_BROKE_SILENT = (842, 1_610, 3_658, 25_962, 30_999)


@pytest.fixture(autouse=True, scope="module")
def _collecting_rarely() -> Iterator[None]:
    """Spare the runs the collector, which looks at all of torch again and again."""
    with collecting_rarely():
        yield


@pytest.mark.timeout(900)  # 20 s of a processor, 145 s where others have it, too
@pytest.mark.agreement
@pytest.mark.one_quorum_per_step
@pytest.mark.monotonic
@pytest.mark.no_zombie
@pytest.mark.no_regress
@pytest.mark.heal_is_clean
@pytest.mark.progress
@pytest.mark.spares_wait
@pytest.mark.one_process_per_place
def test_no_seed_breaks_an_invariant_and_each_has_its_faults() -> None:
    tally = run_batch(range(SEEDS))
    assert tally.violations == []
    assert tally.fewest_faults >= FAULTS_MIN
    assert tally.commits > SEEDS
    assert set(tally.felt) >= {*KINDS, *STEP_KINDS}


@pytest.mark.parametrize("seed", [*ONCE_BROKE, *ONCE_MISJUDGED, *ONCE_BROKE_SILENT])
def test_seeds_that_once_broke_an_invariant_no_longer_do(seed: int) -> None:
    assert violation(seed) is None


@functools.cache
def violation(seed: int) -> str | None:
    """Return what the real cores break with this seed: several mutants have the same one."""
    return run(draw(seed)).violation


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, marks=getattr(pytest.mark, each.invariant), id=each.name) for each in MUTANTS],
)
def test_a_broken_core_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "EVENTS_MAX", EVENTS_MAX)
    assert violation(mutant.seed) is None, "it would catch the real core, too"
    assert (hunt(mutant, [mutant.seed]).violation or "").startswith(f"{mutant.invariant}: ")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_seed_is_one_history(seed: int) -> None:
    first, second = run(draw(seed), story=True), run(draw(seed), story=True)
    assert first.story
    assert first == second


def test_a_history_does_not_depend_on_the_process_it_is_made_in() -> None:
    """Neither on its hash seed nor on what ran in it before."""
    program = "import tests.simulation.simulation as s;"
    program += "from tests.simulation.scenario import draw; print(s.run(draw(11), story=True).story)"
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == f"{run(draw(11), story=True).story}\n"


def test_a_failure_is_made_small_and_still_fails() -> None:
    mutant = next(m for m in MUTANTS if m.name == "forgets reported ids")
    outcome = run(draw(mutant.seed), mutant.cores)
    small = shrink(draw(mutant.seed), outcome, mutant.cores)
    assert small.outcome.violation is not None
    assert small.outcome.violation.startswith(str(outcome.violation).partition(":")[0])
    assert len(small.only) < outcome.injected / 2
