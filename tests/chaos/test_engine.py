"""A run fails for whatever goes wrong without a fault, and a fault excuses no more than it has done.

The job's processes here train nothing: they write the events of a Manager that trains, and then misbehave.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import wait_for
from torchft_like.core.step import IN_VAIN
from torchft_like.testing.chaos import campaign
from torchft_like.testing.chaos import job as jobs
from torchft_like.testing.chaos.campaign import Engine, Run, features, hangs, make_report
from torchft_like.testing.chaos.job import ChaosJob
from torchft_like.testing.chaos.kinds import Injected, Injection, Outcome, Target, inject, may_end
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import Planned
from torchft_like.testing.cluster import LOOPBACK
from torchft_like.testing.journal import Journal, JournalReader
from torchft_like.testing.relay import Relay, at, cut

pytestmark = pytest.mark.integration
LIMIT_S = 40.0
PRETENDER = """
import faulthandler, json, os, signal, subprocess, sys, time

name, way = sys.argv[1:]
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
faulthandler.register(signal.SIGUSR2, chain=True)
def end(*_):
    if way.startswith("ends late"):
        print(way, flush=True)
        while not asked:
            time.sleep(0.01)
    os._exit(3 if way == "fails to leave" else 0)
signal.signal(signal.SIGTERM, end)
if way == "leaves a child":
    subprocess.Popen(["sleep", "600"])
events = open(os.environ["TORCHFT_EVENT_FILE"], "a", buffering=1)
def write(kind, step, **fields):
    record = dict(kind=kind, time=time.time(), replica_id=name + ":1", group_rank=0, step=step, quorum_id=7)
    events.write(json.dumps(record | fields) + "\\n")
write("quorum", 0, members=["r0:1", "r1:1"])
for step in range(1, 10**9):
    time.sleep(0.02)
    if way == "stalls" and step > 10:
        continue
    if way == "heals" and step % 4 == 0:
        write("heal", step)
    write("commit", step, committed=True, participants=2)
"""


def settings_of(folder: Path, way: str) -> JobSettings:
    """Two replica groups, all of whose processes behave in the same way."""
    script = folder / "pretender.py"
    script.write_text(PRETENDER)
    return JobSettings(replicas=2, command=(sys.executable, str(script), "r{index}", way))


def run(folder: Path, way: str) -> Run:
    """A short run without faults."""
    settings = settings_of(folder, way)
    offered = features(settings, network=False)
    return Engine(settings, folder / "run", offered, lambda _: None, seed=1).run([], length_s=0.5)


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChaosJob]:
    job = ChaosJob(settings_of(tmp_path, request.param), tmp_path, str(tmp_path))
    try:
        job.start()
        assert job.tend_until(lambda: job.is_whole(0.0), LIMIT_S)
        yield job
    finally:
        job.kill()


def test_a_job_that_trains_on_passes_without_faults(tmp_path: Path) -> None:
    report = make_report(run(tmp_path, "trains"), {})
    assert not any(report.problems.values()), report.to_text()


def test_a_job_that_stops_committing_hangs_though_no_fault_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_like.testing.chaos.campaign.WHOLE_S_MAX", 1.0)
    [hang] = hangs(run(tmp_path, "stalls"))
    assert "no step of all" in hang


def test_a_process_that_fails_when_it_is_asked_to_leave_has_crashed(tmp_path: Path) -> None:
    crashes = run(tmp_path, "fails to leave").crashes
    assert len(crashes) == 2
    assert "ended with 3, asked to leave" in crashes[0]


@pytest.mark.parametrize("job", ["leaves a child"], indirect=True)
def test_what_outlives_a_killed_replica_is_found(job: ChaosJob) -> None:
    victim = job.replicas[0]
    victim.signal(signal.SIGKILL)
    assert job.tend_until(lambda: job.replicas[0].start == 2, LIMIT_S)
    assert len(job.left_behind()) == 1
    assert job.crashes == []


@pytest.mark.parametrize("job", ["trains"], indirect=True)
def test_a_fault_excuses_no_end_after_the_next_one_began(job: ChaosJob) -> None:
    victim = job.replicas[0]
    may_end(victim)  # it had a reason to, but has not ended
    job.expect_no_end()
    os.kill(victim.ranks[0].pid, signal.SIGABRT)
    assert job.tend_until(lambda: job.replicas[0].start == 2, LIMIT_S)
    assert len(job.crashes) == 1


@pytest.mark.parametrize(("job", "late"), [(f"ends late: {IN_VAIN}", 0), ("ends late", 2)], indirect=["job"])
def test_a_rank_ends_late_only_where_it_has_waited_for_a_quorum_in_vain(
    job: ChaosJob, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "END_S_MAX", 0.0)
    assert job.tend_until(lambda: len(job.last) == 2, LIMIT_S)
    found = job.stop()
    assert len(found) == late
    assert all("did not end after SIGTERM" in text and "most recent call first" in text for text in found)
    assert not job.crashes


@pytest.mark.slow
def test_a_rank_alone_that_is_asked_to_leave_ends_in_time(tmp_path: Path) -> None:
    settings = JobSettings(replicas=1, min_replicas=2)
    job = ChaosJob(settings, tmp_path, str(tmp_path))
    try:
        job.start()
        (rank,) = job.ranks()
        wait_for(lambda: JournalReader(rank.journal.path).records("attempt"), LIMIT_S)
        assert job.stop() == []
        assert not job.crashes
        assert IN_VAIN in rank.output
    finally:
        job.kill()


@pytest.mark.parametrize("job", ["heals"], indirect=True)
def test_a_step_for_which_a_command_healed_is_no_batch_of_its_own(job: ChaosJob) -> None:
    assert job.tend_until(lambda: len(job.log.commits) > 40, LIMIT_S)
    assert all(commit.participating == (commit.step % 4 > 0) for commit in job.log.commits)


def test_an_attempt_that_failed_is_one_of_its_rank(tmp_path: Path) -> None:
    job = ChaosJob(JobSettings(replicas=2, ranks=2), tmp_path, str(tmp_path))
    journal, events = (JournalReader(tmp_path / name) for name in ("a.journal", "a.events"))
    Journal(str(journal.path)).write("failed", began=1.0, step=3)
    rank: Any = SimpleNamespace(name="r0", number=1, label="r0.1.1", journal=journal, event_file=events)
    job._read(rank)
    assert [note["group_rank"] for note in job.log.notes] == [1]


@pytest.mark.parametrize("kind", ["baby-kill", "baby-stop"])
def test_a_job_without_any_backend_to_hit_has_no_victim(tmp_path: Path, kind: str) -> None:
    planned = Planned(number=0, at_s=0, kind=kind, victim=0, duration_s=0, amount=0)
    target = Target(ChaosJob(JobSettings(replicas=2), tmp_path, str(tmp_path)))
    with inject(target, planned) as injected:
        assert injected == Injected((), {"backends": 0})


@pytest.mark.parametrize("job", ["trains"], indirect=True)
def test_descriptors_are_missing_until_somebody_has_missed_one(
    job: ChaosJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    is_lifted: list[bool] = []

    @contextmanager
    def injected(target: Target, planned: Planned) -> Iterator[Injected]:
        yield Injected()
        is_lifted.append(True)

    def judged(injection: Injection, *_: object) -> Outcome:
        asked.append(bool(is_lifted))
        return Outcome(injection, "felt" if len(asked) == 3 else "", None, None, 0.0)

    monkeypatch.setattr(campaign, "inject", injected)
    monkeypatch.setattr(campaign, "judge", judged)
    runner = Engine(job.settings, tmp_path, features(job.settings, network=False), lambda _: None, 0)
    planned = Planned(number=0, at_s=0, kind="fd-exhaustion", victim=0, duration_s=0.1, amount=0)
    runner._inject(Target(job), planned)
    assert asked == [False] * 3
    assert is_lifted


def test_an_answer_that_is_cut_has_come_up_to_the_byte() -> None:
    """The head of an answer may be in one piece with what follows: without it a peer only asks again."""
    with socket.create_server((LOOPBACK, 0)) as server:
        relay = Relay(server.getsockname(), lambda: at(20_000, cut))
        with socket.create_connection((LOOPBACK, relay.port)) as client, server.accept()[0] as serving:
            serving.sendall(b"x" * 30_000)
            received = b"".join(iter(lambda: client.recv(2**20), b""))
    assert len(received) == 20_000
