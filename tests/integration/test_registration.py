"""Our backends under `dist.init_process_group` and all that follows from it, with real processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.ports import free_ports
from torchft_like.testing.cluster import Cluster
from torchft_like.testing.ranks import LIMIT_S, Ranks, running

from . import torch_job as job

pytestmark = pytest.mark.integration

WORLD = 3
FELT_S = 0.3  # what still blocks after this time was really blocked by the fault
BACKENDS = ["torchft-gloo", "torchft-baby-gloo"]
_prefixes = itertools.count()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with running(WORLD) as ranks:
        yield ranks


def agents(store: TCPStore) -> dict[str, str]:
    """The environment of ranks whose store somebody else serves, as torchrun's agent does."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def fresh(store: TCPStore) -> str:
    return f"127.0.0.1:{store.port}/owner/{next(_prefixes)}"


def wheres(tmp_path: Path) -> dict[str, Mapping[str, str]]:
    (port,) = free_ports()
    return {
        "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "env with a name": {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        "tcp": {"init_method": f"tcp://127.0.0.1:{port}"},
        "file": {"init_method": f"file://{tmp_path / 'store'}"},
    }


@pytest.mark.parametrize("kind", ["env", "env with a name", "tcp", "file"])
def test_torch_makes_the_group_from_any_kind_of_store(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    backend = "torchft-gloo"
    assert ranks.ask(job.init, backend, WORLD, wheres(tmp_path)[kind]) == [backend] * WORLD
    assert ranks.ask(job.summed) == [6.0] * WORLD
    assert ranks.ask(job.objects)[0] == [{"rank": rank} for rank in range(WORLD)]
    assert ranks.ask(job.sub_group, None, [0, 2]) == [
        (backend, [0, 2], 0, 4.0),
        True,
        (backend, [0, 2], 1, 4.0),
    ]
    assert ranks.ask(job.by_name_and_mesh) == [(3.0, 2.0)] * WORLD


def test_a_group_may_have_another_backend_than_its_parent(ranks: Ranks, store: TCPStore) -> None:
    ranks.ask(job.init, "gloo", WORLD, agents(store))
    ours = ranks.ask(job.sub_group, "cpu:torchft-gloo", [0, 1])
    assert ours[:2] == [("cpu:torchft-gloo", [0, 1], rank, 3.0) for rank in (0, 1)]
    ranks.ask(job.destroy)
    ranks.ask(job.init, "cpu:torchft-gloo", WORLD, agents(store))
    torchs = ranks.ask(job.sub_group, "gloo", [0, 1])
    assert torchs[:2] == [("gloo", [0, 1], rank, 3.0) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("backend", "kind"), [("torchft-gloo", "agent"), ("torchft-gloo", "file"), ("torchft-baby-gloo", "agent")]
)
def test_what_is_destroyed_leaves_nothing_and_can_be_made_again(
    ranks: Ranks, store: TCPStore, tmp_path: Path, backend: str, kind: str
) -> None:
    held: list[Any] = []
    for turn in range(4):
        where = agents(store) if kind == "agent" else {"init_method": f"file://{tmp_path / str(turn)}"}
        ranks.ask(job.init, backend, WORLD, where)
        ranks.ask(job.sub_group, None, [1, 2])
        assert ranks.ask(job.summed) == [6.0] * WORLD
        ranks.ask(job.destroy)
        held.append(settled(ranks, held[0] if held else None))
    assert held[1:] == held[:1] * 3


def settled(ranks: Ranks, wanted: Any) -> Any:
    """What the ranks hold once the threads that clean up have ended."""
    deadline = time.monotonic() + LIMIT_S
    last, now = None, ranks.ask(job.held)
    while now not in (last, wanted) and time.monotonic() < deadline:
        time.sleep(0.05)
        last, now = now, ranks.ask(job.held)
    return now


@pytest.mark.parametrize("kind", ["agent", "file"])
def test_an_init_in_vain_ends_in_time(ranks: Ranks, store: TCPStore, tmp_path: Path, kind: str) -> None:
    where = agents(store) if kind == "agent" else {"init_method": f"file://{tmp_path / 'store'}"}
    errors = ranks.ask(job.init_in_vain, "torchft-gloo", WORLD + 1, where, 0.5)
    for rank, error in enumerate(errors):
        assert error.startswith(f"ProcessGroupNotConfiguredError: configuring rank {rank} of 4"), error
    assert ranks.ask(job.init, "torchft-gloo", WORLD, where) == ["torchft-gloo"] * WORLD
    assert ranks.ask(job.summed) == [6.0] * WORLD


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_group_survives_a_killed_rank(ranks: Ranks, store: TCPStore, backend: str) -> None:
    ranks.ask(job.init, backend, WORLD, agents(store))
    ranks.ask(job.make_ddp)
    assert ranks.ask(job.gradient, 1.0) == [[2.0, 2.0]] * WORLD
    ranks[2].kill()
    survivors, address = Ranks(ranks[:2]), fresh(store)
    assert all(isinstance(found, str) for found in survivors.ask(job.gradient, 1.0)), "the death was felt"
    assert survivors.ask(job.configure, address, 2) == [(0, 2, [0, 1]), (1, 2, [0, 1])]
    assert survivors.ask(job.summed) == [3.0, 3.0]
    assert survivors.ask(job.gradient, 4.0) == [[6.0, 6.0]] * 2
    survivors.ask(job.destroy)


@pytest.mark.parametrize("ending", job.ENDINGS)
def test_what_waits_for_the_default_group_ends_with_it(ranks: Ranks, store: TCPStore, ending: str) -> None:
    ranks.ask(job.init, "torchft-gloo", WORLD, agents(store))
    first, second, _ = ranks  # the third never calls
    Ranks([first, second]).ask(job.reduce_in_background)
    time.sleep(FELT_S)
    assert Ranks([first]).ask(job.end_and_join, ending) == ["ProcessGroupAbortedError"]
    assert Ranks([second]).ask(job.end_and_join, ending)[0].removeprefix("was not blocked: ") in (
        "ProcessGroupAbortedError",
        "PeerLostError",  # the first one has ended its group before
    )
    if ending == "the owner aborts":
        ranks.ask(job.configure, fresh(store), WORLD)
        assert ranks.ask(job.summed) == [6.0] * WORLD


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has it from 2.14 on")
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_functions_reconfigure_the_default_group(ranks: Ranks, store: TCPStore, backend: str) -> None:
    begun = ranks.ask(job.init_to_reconfigure, backend, store.port, WORLD)
    assert [seat for _, *seat in begun] == [[rank, WORLD] for rank in range(WORLD)]
    handles = [handle for handle, *_ in begun]
    assert ranks.ask(job.reconfigure, 1, handles) == [(i, WORLD, list(range(WORLD))) for i in range(WORLD)]
    assert ranks.ask(job.summed) == [6.0] * WORLD

    ranks[1].kill()
    survivors = Ranks([ranks[2], ranks[0]])
    assert survivors.ask(job.reconfigure, 2, [handles[2], handles[0]]) == [(0, 2, [0, 1]), (1, 2, [0, 1])]
    assert survivors.ask(job.summed) == [3.0, 3.0]

    with running(1) as newcomers:
        (joined,) = newcomers
        handles[1], *seat = joined.ask(job.init_to_reconfigure, 1, backend, store.port, WORLD)
        assert seat == [1, WORLD]
        everybody = Ranks([ranks[0], joined, ranks[2]])
        assert everybody.ask(job.reconfigure, 3, handles)[1] == (1, WORLD, [0, 1, 2])
        assert everybody.ask(job.summed) == [6.0] * WORLD
        everybody.ask(job.destroy)


SCRIPT = """
import os, torch, torch.distributed as dist, torchft_like
dist.init_process_group("torchft-gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print("sum", float(tensor), dist.get_backend())
dist.barrier()
"""


def test_a_script_that_is_started_as_by_torchrun_need_not_destroy_our_backend(tmp_path: Path) -> None:
    """torchrun itself starts examples/train_hsdp.py in test_examples."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Cluster(tmp_path) as cluster:
        job = cluster.launch("job", [str(script)], size=2)
        cluster.wait_for_end(job)
        for rank in job.ranks:
            assert rank.exit_code == 0, rank.output
            assert rank.output == "sum 2.0 torchft-gloo\n"
