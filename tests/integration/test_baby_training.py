"""Training over Baby Gloo: the backend of each rank in a subprocess of its own."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import WAIT_LIMIT_S
from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group
from torchft_like.testing.processes import wait_ended

pytestmark = [pytest.mark.integration, *CHECKED]

BACKEND_PROCESS = "torchft-baby"


def backend_processes(group: Group) -> list[psutil.Process]:
    """Of one rank: the subprocess in use, and the spare."""
    family = psutil.Process(group.ranks[0].pid).children(recursive=True)
    return [process for process in family if process.name() == BACKEND_PROCESS]


def test_replicas_go_on_after_their_backend_processes_or_one_of_them_were_hit(tmp_path: Path) -> None:
    options = WorkerOptions(backend="baby-gloo", timeout_s=2.0)
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab", options=options)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            victims, since = backend_processes(b), time.time()
            assert victims
            for process in victims:
                process.send_signal(number)
            # Its peer may be the first to see it, and tell.
            cluster.wait_until(partial(b.failures, since), "a step of b fails")
            cluster.wait_for_quorum_of(a, b)
            assert wait_ended(victims, WAIT_LIMIT_S), victims
        b.kill()
        cluster.wait_for_quorum_of(a)
        again = cluster.start("b", options=options)
        cluster.wait_for_quorum_of(a, again)
        assert again.events("heal")
