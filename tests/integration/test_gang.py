"""Gangs of real processes with fixed members: over torch's default group, and when one is killed."""

from __future__ import annotations

import sys

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.integration import gang_job
from torchft_like.testing.processes import Processes
from torchft_like.testing.ranks import Ranks, running

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_gang_over_the_default_group_does_everything(backend: str | None, store: TCPStore) -> None:
    with running(4) as ranks:
        assert ranks.ask(gang_job.start_default_gang, store.port, 4, backend) == [4] * 4
        assert ranks.ask(gang_job.start_again) == ["InvalidOperationError"] * 4
        assert ranks.ask(gang_job.use_everything) == [
            {
                "tp": 11 if rank < 2 else 1100,
                "dp": 101 if rank % 2 == 0 else 1010,
                "turned": [3, 2, 1, 0],
                "object": 2 + rank % 2,
                "rows": [[rank, 1.5, rank]] * 2,
            }
            for rank in range(4)
        ]
        assert ranks.ask(gang_job.train_over_a_part) == [[1.0, 1.0], [2.0, 2.0]] * 2
        assert ranks.ask(gang_job.close) == [False] * 4


@pytest.mark.slow
def test_fsdp_takes_the_group_of_a_part(store: TCPStore) -> None:
    with running(2) as ranks:
        ranks.ask(gang_job.start_default_gang, store.port, 2, None)
        assert ranks.ask(gang_job.shard_over_a_part) == [[0.5, 0.5]] * 2


def test_the_example_trains_the_network_that_is_in_one_piece(store: TCPStore) -> None:
    with running(4) as ranks:
        output = "".join(ranks.ask(gang_job.run_example, store.port, 4))
    assert "process 2: tensor parallel with [2, 3], data parallel with [0, 2]" in output
    assert "largest difference" in output


@pytest.mark.slow
def test_the_example_starts_its_processes_itself(processes: Processes) -> None:
    example = processes.start(sys.executable, "examples/parallel_gangs.py")
    assert example.wait(110) == 0
    assert "largest difference" in example.output


def test_a_member_killed_inside_each_kind_of_call_is_a_gang_error_on_the_others(store: TCPStore) -> None:
    with running(2) as survivors:
        for number, call in enumerate(gang_job.CALLS):
            with running(1) as victim:
                ranks = Ranks([*survivors, *victim])
                ranks.ask(gang_job.configure, f"127.0.0.1:{store.port}/{number}", 3)
                for rank in (0, 2):  # 1 does not come, so these wait
                    ranks[rank].tell(gang_job.call, rank, call)
                ranks[2].wait_blocked()
                ranks[2].kill()
                ranks[1].tell(gang_job.call, 1, call)
                assert survivors.answers() == [("GangError", True)] * 2, call


@pytest.mark.parametrize("call", ["all_reduce", "create_gang"])
def test_a_dead_member_of_a_group_of_torchs_own_is_a_gang_error(call: str, store: TCPStore) -> None:
    with running(2) as ranks:
        ranks.ask(gang_job.start_default_gang, store.port, 2, "gloo")
        ranks[0].tell(gang_job.call, 0, call)
        ranks[1].kill()
        assert ranks[0].answer() == ("GangError", True)
