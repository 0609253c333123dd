"""Replicas join in the middle of training and take over a peer's state."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from lighthouse.events import Event
from tests.integration.cluster import CHECKED, Cluster, also_slow
from tests.integration.options import WorkerOptions
from tests.managers import PATIENCE_S, each_in_a_thread, lighthouse_here, manager_alone
from tests.stores import serve_store
from torchft_like.digest import state_digest

pytestmark = [pytest.mark.integration, *CHECKED]


@pytest.mark.parametrize(
    ("size", "use_async_quorum"), [(1, False), (2, True), also_slow(1, True), also_slow(2, False)]
)
def test_joiners_heal_in_the_middle_of_training(tmp_path: Path, size: int, use_async_quorum: bool) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(use_async_quorum=use_async_quorum, ballast_mb=4)
        a, b = cluster.start_all("ab", size=size, options=options)
        c = cluster.start("c", size=size, options=options)
        cluster.wait_for_quorum_of(a, b, c)
        for rank in c.ranks:
            heal = rank.events("heal")[-1]
            assert heal["source"] in (a.replica_id, b.replica_id)
            assert heal["bytes"] > 4 * 1024 * 1024


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_joiner_heals_from_another_peer_when_its_source_fails_midway(tmp_path: Path, act: str) -> None:
    with Cluster(tmp_path, is_patient=act == "kill") as cluster:
        options = WorkerOptions(ballast_mb=32, faults=(cluster.plan(act, "heal"),))
        a, b = cluster.start_all("ab", options=options)
        cluster.pull_trigger()
        c = cluster.start("c", options=WorkerOptions(ballast_mb=32))
        source, since = cluster.wait_for_fault(a, b)
        survivor = b if source is a else a
        cluster.wait_for_quorum_of(survivor, c)
        assert c.failures(since), "c was told that its source is gone"
        # With the checksums of the source the other peer sends the rest of that state, or else its own.
        assert c.events("heal")[-1]["source"] in (source.replica_id, survivor.replica_id)

        if act == "stop":
            source.signal(signal.SIGCONT)
            cluster.wait_for_quorum_of(a, b, c)


@pytest.mark.parametrize("size", [also_slow(1), 2])
def test_the_others_commit_while_a_joiner_catches_up(tmp_path: Path, size: int) -> None:
    with Cluster(tmp_path) as cluster:
        hang = WorkerOptions(ballast_mb=8, faults=("hang@heal",), steps_kept_max=100)
        a = cluster.start("a", size=size, options=hang)
        cluster.wait_for_quorum_of(a)
        c = cluster.start("c", size=size, options=WorkerOptions(ballast_mb=8, steps_kept_max=100))
        cluster.wait_for_fault(a)
        cluster.wait_until(lambda: all(len(rank.events("kept")) > 3 for rank in c.ranks), "steps pass")
        assert not c.events("heal"), "the state is still on its way"
        a.signal(signal.SIGUSR1)
        cluster.wait_for_quorum_of(a, c)
        assert not a.failures(), "a lost no step"


@pytest.mark.parametrize("dies", ["source", "joiner"])
def test_a_death_while_a_joiner_catches_up_keeps_nobody_from_training(tmp_path: Path, dies: str) -> None:
    with Cluster(tmp_path) as cluster:
        hang = WorkerOptions(ballast_mb=32, faults=(cluster.plan("hang", "heal"),), steps_kept_max=100)
        a, b = cluster.start_all("ab", options=hang)
        cluster.pull_trigger()
        joiner = WorkerOptions(ballast_mb=32, steps_kept_max=100)
        c = cluster.start("c", options=joiner)
        source, _ = cluster.wait_for_fault(a, b)
        if dies == "source":
            source.kill()
            cluster.wait_for_quorum_of(b if source is a else a, c)
        else:
            c.kill()
            source.signal(signal.SIGUSR1)
            c = cluster.start("c", options=joiner)
            cluster.wait_for_quorum_of(a, b, c)
        assert c.events("kept")


@pytest.mark.slow
def test_a_joiner_heals_in_steps_that_are_longer_than_the_timeout(tmp_path: Path) -> None:
    """No timeout counts the time in which the training script computes: only the waits for each other."""
    with Cluster(tmp_path, limit_s=100.0) as cluster:
        options = WorkerOptions(ballast_mb=4, pause_s=5.0, timeout_s=3.0)
        a = cluster.start("a", options=options)
        cluster.wait_for_quorum_of(a, steps=1)
        b = cluster.start("b", options=options)
        cluster.wait_for_quorum_of(a, b, steps=2)
        assert b.ranks[0].events("heal")


def test_a_heal_that_takes_longer_than_join_timeout_is_waited_for(tmp_path: Path) -> None:
    join_timeout_s = 0.5
    with Cluster(tmp_path, join_timeout_ms=round(1000 * join_timeout_s)) as cluster:
        hang = WorkerOptions(ballast_mb=4, faults=(cluster.plan("hang", "heal"),))
        a = cluster.start("a", options=hang)
        cluster.wait_for_quorum_of(a)
        cluster.pull_trigger()
        b = cluster.start("b", options=WorkerOptions(ballast_mb=4))
        cluster.wait_for_fault(a)
        time.sleep(4 * join_timeout_s)
        a.signal(signal.SIGUSR1)
        cluster.wait_for_quorum_of(a, b)
        news = [e["kind"] for e in b.ranks[0].events() if e["kind"] in ("abort", "error", "heal")]
        assert news[0] == "heal", "b was not left behind meanwhile"


@pytest.mark.progress
@pytest.mark.parametrize("gives_up", [False, True])
def test_a_newcomer_heals_in_a_lost_step_to_whose_end_it_comes_after_its_source(gives_up: bool) -> None:
    """Otherwise a job whose steps are lost while somebody heals stands still beside one that is slower."""
    has_begun, have_met = threading.Event(), threading.Event()

    def train(name: str) -> tuple[str, int]:
        model, is_newcomer = nn.Linear(2, 2), name == "a"
        is_over, lost, together = threading.Event(), 0, 0

        def note(event: Event) -> None:
            if event.kind == "abort":
                is_over.set()

        if is_newcomer:
            assert has_begun.wait(PATIENCE_S)
        with manager_alone(name, lighthouse.address(), model) as manager:
            manager.events.subscribe(note)
            while together < 2:
                assert lost < 5, "it stands still"
                is_over.clear()
                manager.start_quorum()
                manager.wait_quorum()
                if (heals := bool(manager.healing_ranks())) and is_newcomer:
                    have_met.set()
                    assert is_over.wait(PATIENCE_S), "its source asks for the next quorum"
                elif heals:
                    assert have_met.wait(PATIENCE_S)
                    manager.report_error(ValueError("somebody heals"))
                if heals and gives_up and not is_newcomer:
                    lost += 1
                    continue
                manager.allreduce(gradient := torch.ones(2)).wait()
                if not manager.should_commit():
                    lost += 1
                    continue
                model.bias.data += gradient
                together += manager.num_participants() == 2
                if manager.current_step() == 3:
                    has_begun.set()
        return state_digest(model.state_dict()), lost

    with lighthouse_here(min_replicas=1) as lighthouse:
        newcomer, source = each_in_a_thread("ab", train)
    assert newcomer == source
    assert source[1] == 1, "a step"


@pytest.mark.progress
@pytest.mark.at_rest
@pytest.mark.parametrize("name_of_spoiler", ["a", "b"])
def test_a_rank_that_gives_up_a_step_in_which_somebody_heals_leaves_nobody_in_a_state_function(
    name_of_spoiler: str,
) -> None:
    """The function may use collectives of the group, whose other rank comes to the end of the step."""
    stores, collective, has_begun = {n: serve_store() for n in "ab"}, threading.Barrier(2), threading.Event()

    def train(name: str, rank: int) -> str:
        model = nn.Linear(2, 2)

        def state_dict() -> dict[str, torch.Tensor]:
            if name == name_of_spoiler:
                collective.wait(PATIENCE_S)
            return model.state_dict()

        place = {"rank": rank, "world_size": 2, "store_addr": "127.0.0.1", "store_port": stores[name].port}
        functions = {"state_dict": state_dict, "load_state_dict": model.load_state_dict}
        is_spoiler, together = (name, rank) == (name_of_spoiler, 0), 0
        assert name == "a" or has_begun.wait(PATIENCE_S)
        with manager_alone(name, lighthouse.address(), **place, **functions) as manager:
            while together < 2:
                manager.start_quorum()
                manager.wait_quorum()
                if manager.healing_ranks() and is_spoiler:
                    is_spoiler = False
                    continue
                manager.allreduce(gradient := torch.ones(2)).wait()
                if manager.should_commit():
                    model.bias.data += gradient
                    together += manager.num_participants() == 2
                if manager.current_step() == 3:
                    has_begun.set()
        return state_digest(model.state_dict())

    with lighthouse_here(min_replicas=1) as lighthouse, ThreadPoolExecutor(4) as threads:
        digests = list(threads.map(train, "aabb", (0, 1, 0, 1)))
    assert digests[:2] == digests[2:]
