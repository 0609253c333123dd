"""A Manager drives a group of torch's own, over Gloo: kills, a newcomer that heals, a stopped member.

What waits for a member that is gone may last until the group's timeout, which is short here.
"""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from torchft_like.errors import ConfigError
from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.gloo import adopted

from .cluster import CHECKED, Cluster
from .options import WorkerOptions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), *CHECKED]
needs_torchs = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has it from 2.14 on")
TIMEOUT_S = 5.0
LIMIT_S = 120.0


@needs_torchs
def test_survivors_commit_after_a_kill_and_the_next_one_heals(tmp_path: Path, store: TCPStore) -> None:
    options = WorkerOptions(backend="native-gloo", store_port=store.port, timeout_s=TIMEOUT_S)
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        a, b, c, d = cluster.start_all("abcd", options=options)
        for victim, survivors in ((c, (a, b, d)), (a, (b, d))):
            victim.kill()
            cluster.wait_for_quorum_of(*survivors)
        again = cluster.start("c", options=options)
        cluster.wait_for_quorum_of(b, d, again)
        assert again.events("heal")


@needs_torchs
@pytest.mark.parametrize(("act", "reduce"), [("kill", "ddp"), ("kill", "manager"), ("stop", "ddp")])
def test_survivors_commit_after_a_fault_in_a_collective(
    tmp_path: Path, store: TCPStore, act: str, reduce: str
) -> None:
    """One that stops holds the others up until the timeout, and goes on with them when it can."""
    with Cluster(tmp_path, limit_s=LIMIT_S, is_patient=act == "kill") as cluster:
        fault = cluster.plan(act, "backward")
        options = WorkerOptions(
            backend="native-gloo", store_port=store.port, timeout_s=TIMEOUT_S, reduce=reduce, faults=(fault,)
        )
        groups = cluster.start_all("abc", options=options)
        cluster.pull_trigger()
        struck, _ = cluster.wait_for_fault(*groups)
        survivors = [group for group in groups if group is not struck]
        cluster.wait_for_quorum_of(*survivors)
        assert all(group.failures() for group in survivors)
        if act == "stop":
            struck.signal(signal.SIGCONT)
            cluster.wait_for_quorum_of(*groups)


def test_a_group_that_nobody_can_configure_is_refused_with_what_to_pass() -> None:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))  # type: ignore[attr-defined]
    plain: Any = dist.ProcessGroup(0, 1)  # type: ignore[call-arg] # the stub lacks it
    kind = dist.ProcessGroup.BackendType.GLOO
    plain._set_default_backend(kind)
    plain._register_backend(torch.device("cpu"), kind, gloo)
    with pytest.raises(ConfigError, match="enable_reconfigure=True"):
        adopted(plain)
    ours = ProcessGroupDummy(0, 1)
    assert adopted(ours) is ours
