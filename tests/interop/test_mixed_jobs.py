"""A job may take its Managers from one project and its lighthouse from the other.

Real processes on both sides: replicas that train a small model in one package's environment, under
the other package's lighthouse daemon. All replicas of a job are of one package: what they say to each
other, when one heals, is not the same in both. Their process groups may be of the other one.
"""

from __future__ import annotations

import signal
import sysconfig
import time
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.systems import OURS, TORCHFT_NIGHTLY, System, start_lighthouse, start_worker

# The first test of a machine installs the peer, which takes longer than a test may.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

STEPS = 5
SECONDS_MAX = 120.0


def test_torchft_replicas_survive_a_kill_and_heal_a_newcomer_under_our_lighthouse(
    fleet: Fleet, peer: System
) -> None:
    _kill_one_and_heal_a_newcomer(_MixedJob(fleet, managers=peer, coordinator=OURS))


def test_our_replicas_survive_a_kill_and_heal_a_newcomer_under_torchft_s_lighthouse(
    fleet: Fleet, peer: System
) -> None:
    _kill_one_and_heal_a_newcomer(_MixedJob(fleet, managers=OURS, coordinator=peer))


@pytest.mark.parametrize("peer", [pytest.param(TORCHFT_NIGHTLY, id="nightly")], indirect=True)
def test_managers_of_the_nightly_drive_our_process_group_through_a_kill_and_a_heal(
    fleet: Fleet, peer: System
) -> None:
    ours = ("--groups=torchft_like", f"--beside={sysconfig.get_path('purelib')}")  # gRPC is there
    _kill_one_and_heal_a_newcomer(_MixedJob(fleet, replace(peer, worker_options=ours), coordinator=peer))


def _kill_one_and_heal_a_newcomer(job: _MixedJob) -> None:
    first, second, victim = (job.start(rank) for rank in range(3))
    job.await_joint_steps([first, second, victim])

    victim.signal(signal.SIGKILL)
    job.await_joint_steps([first, second])
    assert victim.exit_code == -signal.SIGKILL

    newcomer = job.start(3)
    job.await_joint_steps([first, second, newcomer])
    healed = _commits(newcomer)[0]["step"]
    assert healed > _commits(victim)[-1]["step"], "the newcomer took over the survivors' progress"

    digests = [_digests(replica) for replica in (first, second, newcomer)]
    common = set.intersection(*(set(of_replica) for of_replica in digests))
    assert len(common) >= STEPS
    assert all(len({of_replica[step] for of_replica in digests}) == 1 for step in common)


class _MixedJob:
    """Replicas of one package under the lighthouse of another."""

    def __init__(self, fleet: Fleet, managers: System, coordinator: System) -> None:
        self._fleet = fleet
        self._managers = managers
        # Whoever speaks torchft's wire is known by heartbeats alone: here 1 s without one is death.
        limits = ("--heartbeat_timeout_ms=1000", "--join_timeout_ms=10000")
        self._lighthouse = start_lighthouse(fleet, coordinator, min_replicas=2, extra=limits)

    def start(self, rank: int) -> FleetProcess:
        # The pause leaves the processors to a newcomer that starts, which takes seconds.
        options = ("--gradients=allreduce", "--digest", "--timeout=20", "--pause=0.2", f"--rank={rank}")
        address = f"--lighthouse={self._lighthouse.address}"
        return start_worker(self._fleet, self._managers, f"replica{rank}", address, *options)

    def await_joint_steps(self, replicas: list[FleetProcess]) -> None:
        """Until each of them has committed a few steps in which exactly they took part."""
        since = time.time()
        for replica in replicas:
            probe = partial(_has_joint_steps, replica, since, len(replicas))
            self._fleet.wait_for(probe, f"joint steps of {replica.name}", SECONDS_MAX)


def _has_joint_steps(replica: FleetProcess, since: float, participants: int) -> bool | None:
    commits = (r for r in _commits(replica) if r["time"] > since and r["participants"] == participants)
    return sum(1 for _ in commits) >= STEPS or None


def _commits(replica: FleetProcess) -> list[Record]:
    return [record for record in replica.records if record["event"] == "step" and record["committed"]]


def _digests(replica: FleetProcess) -> dict[int, str]:
    return {record["step"]: record["digest"] for record in _commits(replica)}
