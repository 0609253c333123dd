"""A job may take its Managers from one project and its lighthouse from the other.

Real processes on both sides: replicas that train a small model in one package's environment, under the other
package's lighthouse daemon. All replicas of a job are of one package: what they say to each other, when one
heals, is not the same in both. Their process groups may be of the other one.
"""

from __future__ import annotations

import signal
import sysconfig
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.systems import OURS, TORCHFT, TORCHFT_NIGHTLY, System, start_lighthouse, start_worker
from tests.integration.cluster import REST, Cluster
from tests.integration.options import WorkerOptions

# The first test of a machine installs the peer, which takes longer than a test may.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

STEPS = 5
SECONDS_MAX = 120.0

# Whoever speaks torchft's wire is known by heartbeats alone: here 1 s without one is death.
LIMITS = ("--heartbeat_timeout_ms=1000", "--join_timeout_ms=10000")
WITH_OUR_GROUPS = ("--groups=torchft_like", f"--beside={sysconfig.get_path('purelib')}")  # gRPC is there
THEIRS = [
    pytest.param(TORCHFT, (), id="torchft"),
    pytest.param(TORCHFT_NIGHTLY, WITH_OUR_GROUPS, id="nightly over our groups", marks=REST),
]


@pytest.mark.parametrize(("peer", "options"), THEIRS, indirect=["peer"])
def test_torchft_replicas_heal_under_ours(fleet: Fleet, peer: System, options: tuple[str, ...]) -> None:
    job = Job(fleet, replace(peer, worker_options=options))
    survivor, victim = (job.start(rank) for rank in range(2))
    job.await_joint_steps([survivor, victim])

    victim.signal(signal.SIGKILL)
    job.await_joint_steps([survivor])
    assert victim.exit_code == -signal.SIGKILL

    newcomer = job.start(2)
    job.await_joint_steps([survivor, newcomer])
    healed = commits_of(newcomer)[0]["step"]
    assert healed > commits_of(victim)[-1]["step"], "the newcomer took over the survivor's progress"

    one, other = ({r["step"]: r["digest"] for r in commits_of(replica)} for replica in (survivor, newcomer))
    common = one.keys() & other.keys()
    assert len(common) >= STEPS
    assert all(one[step] == other[step] for step in common)


class Job:
    """Replicas of torchft under our lighthouse."""

    def __init__(self, fleet: Fleet, managers: System) -> None:
        self._fleet = fleet
        self._managers = managers
        self._lighthouse = start_lighthouse(fleet, OURS, min_replicas=1, extra=LIMITS)

    def start(self, rank: int) -> FleetProcess:
        # The pause leaves the processors to a newcomer that starts, which takes seconds.
        options = ("--gradients=allreduce", "--digest", "--timeout=20", "--pause=0.2", f"--rank={rank}")
        address = f"--lighthouse={self._lighthouse.address}"
        return start_worker(self._fleet, self._managers, f"replica{rank}", address, *options)

    def await_joint_steps(self, replicas: list[FleetProcess]) -> None:
        """Wait until each of them has committed a few steps in which exactly they took part."""
        since = time.time()
        for replica in replicas:
            probe = partial(has_joint_steps, replica, since, len(replicas))
            self._fleet.wait_for(probe, f"joint steps of {replica.name}", SECONDS_MAX)


def has_joint_steps(replica: FleetProcess, since: float, participants: int) -> bool | None:
    commits = (r for r in commits_of(replica) if r["time"] > since and r["participants"] == participants)
    return sum(1 for _ in commits) >= STEPS or None


def commits_of(replica: FleetProcess) -> list[Record]:
    return [record for record in replica.records if record["event"] == "step" and record["committed"]]


class UnderTheirLighthouse(Cluster):
    """Replicas of ours under torchft's lighthouse."""

    def __init__(self, folder: Path, fleet: Fleet, peer: System) -> None:
        super().__init__(folder, limit_s=SECONDS_MAX)
        self._fleet = fleet
        self._peer = peer

    def start_lighthouse(self) -> None:
        """Start the peer's daemon, of which this cluster knows the address alone."""
        self.lighthouse_address = start_lighthouse(
            self._fleet, self._peer, min_replicas=2, extra=LIMITS
        ).address


def test_our_replicas_heal_under_torchfts_lighthouse(tmp_path: Path, fleet: Fleet, peer: System) -> None:
    options = WorkerOptions(timeout_s=20.0)
    with UnderTheirLighthouse(tmp_path, fleet, peer) as cluster:
        first, second, victim = cluster.start_all("abc", options=options)
        victim.kill()
        cluster.wait_for_quorum_of(first, second)
        newcomer = cluster.start("d", options=options)
        cluster.wait_for_quorum_of(first, second, newcomer)
        assert newcomer.events("heal"), "the newcomer took over the survivors' progress"
