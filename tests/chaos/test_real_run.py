"""Faults into a real job: what it writes holds every invariant, every fault is felt, nothing is left."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from torchft_like.testing.chaos.campaign import Engine, Run, features, make_report, usable
from torchft_like.testing.chaos.network import why_unavailable
from torchft_like.testing.chaos.orders import JobSettings, Training
from torchft_like.testing.chaos.schedule import draw

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


def assert_survives(
    folder: Path, kinds: list[str], *, interval_s: float, settings: JobSettings, network: bool
) -> Run:
    """One fault of each kind into a job; fails with the report unless everything holds."""
    offered = features(settings, network=network)
    kinds, skipped = usable(kinds, offered)
    length_s = interval_s * len(kinds)
    plan = draw(1, kinds, length_s, interval_s, settings.replicas)
    run = Engine(settings, folder / "chaos", offered, lambda _: None, seed=1).run(plan, length_s)
    report = make_report(run, {}, skipped=skipped)
    assert report.passed, report.to_text()
    assert [outcome.injection.kind for outcome in run.outcomes] == [planned.kind for planned in plan]
    return run


def test_a_job_survives_a_fault_of_each_of_several_kinds(tmp_path: Path) -> None:
    kinds = ["stop", "lighthouse-kill", "truncate", "disk-full"]
    assert_survives(tmp_path, kinds, interval_s=1.5, settings=JobSettings(replicas=3), network=False)


def test_a_job_with_diloco_survives_faults_of_several_kinds(tmp_path: Path) -> None:
    settings = JobSettings(replicas=3, training=Training(algorithm="diloco", pause_s=0.02))
    run = assert_survives(
        tmp_path, ["kill", "stop", "truncate"], interval_s=1.5, settings=settings, network=False
    )
    commits = run.log.commits
    # Who commits a step and dies before the others could leaves it to them, in their next quorum.
    places = {(commit.step, commit.quorum_id) for commit in commits}
    assert len({(commit.step, commit.quorum_id, commit.digest) for commit in commits}) == len(places)
    assert len({commit.digest for commit in commits}) >= len({commit.step for commit in commits})


@pytest.mark.slow
@pytest.mark.one_process_per_place
def test_spares_take_the_places_of_ranks_that_are_killed_and_no_other_process_ends(tmp_path: Path) -> None:
    settings = JobSettings(replicas=2, ranks=3, spares=2, training=Training(restarts=True))
    kinds = ["kill-rank"] * 5 + ["lighthouse-kill"]
    run = assert_survives(tmp_path, kinds, interval_s=4, settings=settings, network=False)
    assert [note["code"] for note in run.log.notes if note["kind"] == "ended"] == [-signal.SIGKILL] * 5
    tries = [note for note in run.log.notes if note["kind"] == "try"]
    assert sum("has taken the place" in note["reason"] for note in tries) == 5


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable()))
def test_a_job_survives_every_fault_of_the_network(tmp_path: Path) -> None:
    kinds = ["blackhole", "one-way", "partition", "link", "loss", "delay"]
    assert_survives(tmp_path, kinds, interval_s=6, settings=JobSettings(replicas=4), network=True)


@pytest.mark.slow
def test_the_users_own_command_is_checked_by_its_events(tmp_path: Path) -> None:
    command = (sys.executable, str(EXAMPLE), "--steps", "100000", "--replica-id", "{index}")
    settings = JobSettings(replicas=3, command=command, naming="replica-{index}")
    run = assert_survives(tmp_path, ["kill", "stop"], interval_s=15, settings=settings, network=False)
    assert {commit.digest for commit in run.log.commits} == {""}
