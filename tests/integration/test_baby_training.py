"""Training over Baby Gloo: the backend of each rank in a subprocess of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, *CHECKED]

BACKEND_PROCESS = "torchft-baby"


def backend_processes(group: Group) -> list[psutil.Process]:
    """Of one rank: the subprocess in use, and the spare."""
    family = psutil.Process(group.ranks[0].pid).children(recursive=True)
    return [process for process in family if process.name() == BACKEND_PROCESS]


def test_survivors_commit_after_a_replica_is_killed_and_it_heals(tmp_path: Path) -> None:
    options = WorkerOptions(backend="baby-gloo")
    with Cluster(tmp_path) as cluster:
        a, b, c = cluster.start_all("abc", options=options)
        c.kill()
        cluster.wait_for_quorum_of(a, b)
        again = cluster.start("c", options=options)
        cluster.wait_for_quorum_of(a, b, again)
        assert again.events("heal")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_replica_goes_on_after_its_backend_processes_were_hit(
    tmp_path: Path, number: signal.Signals
) -> None:
    options = WorkerOptions(backend="baby-gloo", timeout_s=2.0)
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab", options=options)
        victims = backend_processes(b)
        assert victims
        for process in victims:
            process.send_signal(number)
        cluster.wait_for_event(b, "error")
        cluster.wait_for_quorum_of(a, b)
        assert b.failures()
        assert not any(process.is_running() for process in victims)
