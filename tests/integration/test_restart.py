"""A job of examples/train_ddp.py goes on after all of it was killed: replica groups and lighthouse."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.counted_example import text
from torchft_like import GlobalBatches
from torchft_like.testing.cluster import Cluster, Group

pytestmark = pytest.mark.integration

NAMES = ("replica-0", "replica-1", "replica-2")
BATCH_SIZE = 2
# So each committed step has the gradients of all, who add them in the same order: an undisturbed run has
# the same bits.
ALL = len(NAMES)
EVERY = 4  # steps between two checkpoints
BATCHES = GlobalBatches(len(text), ALL * BATCH_SIZE)
EXAMPLE = ["tests.integration.counted_example", "--workers=0", "--width=16", f"--batch-size={BATCH_SIZE}"]


class Job:
    """The job, whose replica groups and lighthouse live and die together."""

    def __init__(self, cluster: Cluster, steps: int) -> None:
        self.cluster, self.steps = cluster, steps
        self.saved = cluster.folder / "checkpoints"
        self.living: list[Group] = []

    def start(self, saved: Mapping[str, Path] | None = None) -> None:
        """Start all groups; `saved` says where some of them look for checkpoints instead."""
        if self.living:
            self.cluster.start_lighthouse()
            self.living = []
        for index, name in enumerate(NAMES):
            options = {
                "replica-id": index,
                "min-replicas": ALL,
                "steps": self.steps,
                "checkpoint-every": EVERY,
                "checkpoint-dir": (saved or {}).get(name, self.saved),
            }
            command = [*EXAMPLE, *(f"--{option}={value}" for option, value in options.items())]
            self.living.append(self.cluster.launch(name, command))

    def kill(self, step: int = 0, later_s: float = 0.0, order: Sequence[int] = range(ALL + 1)) -> None:
        """Kill all, in this order, so long after a step is committed, or after the start."""
        self.cluster.wait_until(lambda: not step or self.committed()[-1:] >= [step], f"step {step}")
        time.sleep(later_s)
        kills = [*(group.kill for group in self.living), self.cluster.lighthouse.kill]
        for number in order:
            kills[number]()
        assert max(self.committed(), default=0) < self.steps

    def complete(self) -> Mapping[int, Path]:
        """Return the complete checkpoints by their steps."""
        folders = [path.parent for path in self.saved.glob("*/.metadata")]
        return {int(folder.name.split("-")[1]): folder for folder in folders}

    def committed(self) -> list[int]:
        """Return the steps that any group has committed since the last start, in order."""
        return sorted(step for step, _ in self.places())

    def places(self) -> set[tuple[int, int]]:
        """Return each of these steps, with the quorum in which it was committed."""
        commits = [event for group in self.living for event in group.events("commit")]
        return {(event["step"], event["quorum_id"]) for event in commits if event["committed"]}

    def check(self, began: int) -> None:
        """Check that each step from `began` on was committed once, with each sample of its batch once."""
        assert self.committed() == list(range(began + 1, began + 1 + len(self.places())))
        taken: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for record in (record for group in self.living for record in group.ranks[0].records("took")):
            taken[record["step"] + 1, record["quorum_id"]] += record["samples"]
        for step, quorum_id in self.places():
            assert sorted(taken[step, quorum_id]) == sorted(BATCHES.of(step - 1)), (step, quorum_id)

    def finish(self) -> str:
        """Wait until the last step is committed; return the digest that all groups end with."""
        self.cluster.wait_for_end(*self.living)
        ranks = [group.ranks[0] for group in self.living]
        assert [rank.exit_code for rank in ranks] == [0] * ALL
        results = [json.loads(rank.output.splitlines()[-1]) for rank in ranks]
        assert {result["step"] for result in results} == {self.steps}
        (digest,) = {result["digest"] for result in results}
        return str(digest)


def undisturbed(folder: Path, steps: int) -> str:
    folder.mkdir()
    with Cluster(folder, min_replicas=ALL, limit_s=120) as cluster:
        job = Job(cluster, steps)
        job.start()
        return job.finish()


def newest(saved: Mapping[int, Path]) -> int:
    return max(saved, default=0)


def test_a_job_of_which_nothing_was_left_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """One group finds an older one, and one finds none; of two others one was not written to the end, and one
    cannot be read.
    """
    with Cluster(tmp_path, min_replicas=ALL) as cluster:
        job = Job(cluster, steps=1_000_000)
        job.start()
        cluster.wait_until(lambda: len(job.complete()) > 1, "two checkpoints are complete")
        job.kill(2 * EVERY)
        job.check(began=0)
        saved = job.complete()

        job.steps = newest(saved) + 4 * EVERY
        older, torn = tmp_path / "older", job.saved / f"step-{job.steps}-torn"
        shutil.copytree(saved[EVERY], older / saved[EVERY].name)
        shutil.copytree(saved[EVERY], torn)
        (torn / ".metadata").rename(torn / ".metadata.tmp")
        unreadable = job.saved / f"step-{job.steps}-unreadable"
        shutil.copytree(saved[EVERY], unreadable)
        os.truncate(unreadable / "__0_0.distcp", 1000)
        job.start({NAMES[0]: older, NAMES[1]: tmp_path / "none"})
        digest = job.finish()
        job.check(began=newest(saved))
        assert [bool(group.events("heal")) for group in job.living] == [True, True, False]
        assert f"{unreadable} cannot be read" in job.living[2].ranks[0].output
    assert digest == undisturbed(tmp_path / "undisturbed", job.steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_goes_on_after_each_of_twenty_deaths(tmp_path: Path) -> None:
    chance, repeated = random.Random(20), 0
    with Cluster(tmp_path, min_replicas=ALL, limit_s=120) as cluster:
        job = Job(cluster, steps=1_000_000)
        began = 0
        for _ in range(20):
            job.start()
            steps = chance.randint(0, 15)  # 0: it may have begun no step
            order = chance.sample(range(ALL + 1), ALL + 1)
            job.kill(steps and began + steps, chance.uniform(0, 5 if steps == 0 else 0.3), order)
            job.check(began)
            began = newest(job.complete())
            repeated += max(job.committed(), default=began) - began
        job.steps = began + 2 * EVERY
        job.start()
        digest = job.finish()
        job.check(began)
    assert repeated > 0
    assert digest == undisturbed(tmp_path / "undisturbed", job.steps)
