"""Two hosts cannot reach each other, and both reach everybody else: a job of real processes on real links."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import PATIENT_MS
from torchft_like.testing.chaos.job import ChaosJob
from torchft_like.testing.chaos.network import Network, Rules, why_unavailable
from torchft_like.testing.chaos.orders import JobSettings, Training
from torchft_like.testing.cluster import LIGHTHOUSE
from torchft_like.testing.invariants import violations
from torchft_like.testing.journal import Record
from torchft_like.testing.log import name_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable())),
]
LIMIT_S = 90.0
# No operation shall time out before the test does; nobody may give up for want of a quorum.
TRAINING = Training(timeout_s=600.0, quorum_timeout_s=6.0, width=512)  # more gradients than a packet takes
SETTINGS = JobSettings(replicas=4, training=TRAINING, min_replicas=2)
ENDS = {"r0", "r1"}
LINK = frozenset({("r0", "r1"), ("r1", "r0")})
RULES = {"cut": Rules(cut=LINK), "refused": Rules(refused=LINK), "narrow": Rules(narrow=LINK)}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network((LIGHTHOUSE, *SETTINGS.names), tmp_path, seed=1) as network:
        yield network


@pytest.fixture
def job(tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChaosJob]:
    """Nobody is lost for a late answer of a busy machine: the link alone decides who is left out."""
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", str(PATIENT_MS))
    job = ChaosJob(SETTINGS, tmp_path, str(tmp_path), network)
    job._options.append(f"--keepalive_timeout_ms={PATIENT_MS}")
    try:
        yield job
    finally:
        job.kill()


def wait(job: ChaosJob, done: Callable[[], object], what: str) -> None:
    if job.tend_until(done, LIMIT_S):
        return
    job.print_stacks()
    time.sleep(1)
    logs = "\n".join(rank.tail() for rank in job.ranks())
    raise AssertionError(f"not within {LIMIT_S:g} s: {what}\n{logs}\n{job.lighthouse.tail()}")


def left_out(job: ChaosJob, source: str) -> list[Record]:
    return [e for e in job.log.events if e["kind"] == "left_out" and e["source"] == source]


def waited_longer_than_for_a_quorum(job: ChaosJob) -> bool:
    """The three others have committed together all the time in which a replica would have given up."""
    if not left_out(job, "lighthouse"):
        return False
    since = float(left_out(job, "lighthouse")[0]["time"])
    together = [
        c for c in job.last.values() if len(c.members) == 3 and len(ENDS & set(map(name_of, c.members))) == 1
    ]
    return sum(c.time > since + TRAINING.quorum_timeout_s + 1 for c in together) == 3


@pytest.mark.parametrize("how", RULES)
def test_one_of_two_who_cannot_reach_each_other_is_left_out_until_they_can(
    how: str, job: ChaosJob, network: Network
) -> None:
    job.start()
    wait(job, lambda: job.is_whole(0.0), "all commit together")
    network.apply(RULES[how])
    wait(job, lambda: waited_longer_than_for_a_quorum(job), "three go on, and nobody gives up")
    assert network.counts()[how] > 0
    gave_up = [e for e in job.log.events if e["kind"] == "abort" and "cannot reach" in e["reason"]]
    assert {name_of(e["replica_id"]) for e in gave_up} <= ENDS
    assert gave_up or how == "refused", "one who waited has looked for the link"

    mended = time.time()
    network.apply(Rules())
    wait(job, lambda: job.is_whole(mended), "all commit together again")
    assert job.stop() == []
    job.log.sort()
    assert job.crashes == []
    assert violations(job.log.history()) == []
    event = left_out(job, "lighthouse")[0]
    assert {name_of(i) for i in event["links"][0].split(" - ")} == ENDS
    [victim] = event["members"]
    assert [e["members"] for e in left_out(job, "manager")] == [[victim]]
    assert [
        e for e in job.log.events if e["kind"] == "heal" and e["replica_id"] == victim and e["time"] > mended
    ]
