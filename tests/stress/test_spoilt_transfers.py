"""A job in which one replica heals over a link that loses or changes bits, bytes or the rest of a state; a
thousand times with `make stress`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.stress.spoilt_job import RECEIVER, SOURCE
from torchft_like.testing.cluster import Group
from torchft_like.testing.journal import Record

pytestmark = [pytest.mark.integration, *CHECKED]

TRANSFERS = int(os.environ.get("STRESS_TRANSFERS", "40"))
WARM = 10  # transfers after which a process has what it keeps
MEMORY_BYTES_MAX = 64 << 20
LIMIT_S = 500.0


@pytest.mark.timeout(600)
def test_each_is_refused_with_a_typed_error_in_bounded_memory_and_the_job_goes_on(tmp_path: Path) -> None:
    trigger = tmp_path / "spoil"
    trigger.touch()
    with Cluster(tmp_path) as cluster:
        source = start(cluster, SOURCE, trigger)
        cluster.wait_for_quorum_of(source)
        receiver = start(cluster, RECEIVER, trigger)
        cluster.wait_until(lambda: len(refused(receiver)) >= WARM, "heals fail")
        since, step = time.time(), source.step
        before = [memory_of(group) for group in (source, receiver)]
        most = list(before)

        def have_failed() -> bool:
            most[:] = map(max, most, map(memory_of, (source, receiver)))
            return len(refused(receiver)) >= TRANSFERS + WARM and source.step >= step + TRANSFERS

        cluster.wait_until(have_failed, f"{TRANSFERS} more heals fail, and steps pass", limit_s=LIMIT_S)
        assert all(record["is_typed"] for record in refused(receiver))
        assert len(receiver.ranks[0].records("healed")) < TRANSFERS / 4, "the rest changes what nobody reads"
        assert max(now - then for now, then in zip(most, before, strict=True)) < MEMORY_BYTES_MAX
        assert not source.failures(since), "the source lost no step"
        print(Counter(str(record["how"]) for record in refused(receiver)))

        trigger.unlink()
        cluster.wait_for_quorum_of(source, receiver)


def start(cluster: Cluster, name: str, trigger: Path) -> Group:
    command = ["tests.stress.spoilt_job", name, str(cluster.index_of(name)), str(trigger)]
    return cluster.launch(name, command)


def refused(group: Group) -> list[Record]:
    return group.ranks[0].records("refused")


def memory_of(group: Group) -> int:
    return int(psutil.Process(group.ranks[0].pid).memory_info().rss)
