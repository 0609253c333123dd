"""Groups of two to four ranks with real peers: sums, deaths, aborts, changes of membership.

Each test is there for all four backends: over NCCL with all ranks on one GPU (`host_of_its_own`), and over
Gloo without one, so that the tests themselves are tried out wherever the others run: some of them in `make
slow`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu import group_job
from tests.gpu.group_job import POLL_S, each_backend, job
from tests.waiting import wait_for
from tools.gpu.figures import figure
from torchft_like.testing.ranks import Rank, Ranks

COUNT = 1 << 18
NOTICES_S = 3.0  # for survivors that notice by themselves
CHANGES_S_MAX = 70.0
MB_MAX = 64  # that thirty reconfigurations may leave
SETTLED_S_MAX = 60.0


def assert_sums(ranks: Ranks, group: str = "group") -> None:
    expected = sum(range(len(ranks) + 1))
    assert ranks.ask(group_job.summed, group) == [expected] * len(ranks)


@each_backend
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_collective_gives_what_it_must(backend: str, count: int) -> None:
    with job(backend, count) as ranks:
        ranks.meet()
        for dtype, elements in ((torch.float32, 1), (torch.bfloat16, 1000), (torch.float32, COUNT)):
            assert ranks.ask(group_job.exchange, dtype, elements) == [[]] * count


@each_backend
def test_every_collective_of_quantized_numbers_gives_all_ranks_the_same(backend: str) -> None:
    with job(backend, 2) as ranks:
        ranks.meet()
        (error, found), (_, other) = ranks.ask(group_job.average_quantized, COUNT)
        assert found == other
        assert 0 < error < 0.2  # of fp8: a tenth, and a bit of that for the sum


@each_backend
@pytest.mark.parametrize(
    ("count", "number"),
    [
        pytest.param(2, signal.SIGKILL, id="one-of-2-killed"),
        pytest.param(4, signal.SIGKILL, id="one-of-4-killed", marks=pytest.mark.slow),
        pytest.param(3, signal.SIGSTOP, id="one-of-3-stopped", marks=pytest.mark.slow),
    ],
)
def test_survivors_end_their_all_reduce_and_go_on_without_the_lost_rank(
    backend: str, count: int, number: signal.Signals, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with job(backend, count) as ranks:
        members = ranks.meet()
        assert_sums(members)
        *survivors, victim = members
        rounds = [tmp_path / f"rounds-{rank}" for rank in range(count)]
        for number_of, rank in enumerate(members):
            rank.tell(group_job.reduce_until_lost, number_of, COUNT, rounds[number_of], told)
        wait_for(lambda: all(path.exists() and path.stat().st_size > 3 for path in rounds))
        begin = time.monotonic()
        victim.signal(number)
        noticed = notice(survivors)
        assert number == signal.SIGKILL or noticed == 0, "nobody can tell a stopped rank from a slow one"
        told.touch()
        told_at = time.monotonic()
        ends = [rank.answer() for rank in survivors]
        slowest = max(end for _, end in ends)
        since = begin if noticed == len(survivors) else told_at
        what = f"{backend}: {count - 1} survivors of {signal.Signals(number).name}"
        figure(f"{what}: noticed it by themselves", noticed)
        figure(f"{what}: all had ended", slowest - since, "s")
        assert_sums(ranks.meet(*range(count - 1)))


def notice(survivors: Sequence[Rank]) -> int:
    """How many have an answer within a while, though nobody has told them."""
    deadline = time.monotonic() + NOTICES_S
    while time.monotonic() < deadline and not all(rank.has_answer() for rank in survivors):
        time.sleep(POLL_S)
    return sum(rank.has_answer() for rank in survivors)


@each_backend
@pytest.mark.parametrize(
    "place",
    [
        "wait",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("synchronize", "queue", "configure")),
    ],
)
def test_an_abort_ends_what_waits_for_a_peer(backend: str, place: str) -> None:
    with job(backend, 2) as ranks:
        assert_sums(ranks.meet())
        error, seconds = ranks[0].ask(group_job.abort_what_blocks, 0, place, ranks.prefix())
        assert error in ("ProcessGroupAbortedError", "ProcessGroupError")
        figure(f"{backend}: abort of a blocked {place}", seconds, "s", bar=0.2 if place == "wait" else None)
        assert_sums(ranks.meet())


@each_backend
def test_the_abort_of_one_group_leaves_another_of_the_same_ranks_alone(backend: str) -> None:
    with job(backend, 2) as ranks:
        ranks.meet()
        both = ranks.meet(group="other")
        assert_sums(both, "other")
        for _ in range(3):
            ranks[0].ask(group_job.abort_what_blocks, 0, "wait", ranks.prefix())
            assert_sums(both, "other")
            assert_sums(ranks.meet())


@each_backend
def test_membership_changes_leave_nothing_behind(backend: str) -> None:
    changes: list[tuple[int, ...]] = [(0, 1), (0,), (2, 0, 1), (1, 2)]
    rounds = 30 if backend.endswith("nccl") else 3
    with job(backend, 3) as ranks:
        begin = time.monotonic()
        for number in range(1, rounds + 1):
            for members in changes:
                assert_sums(ranks.meet(*members))
            if number == 2:
                ranks.meet()
                before = ranks.ask(group_job.footprint)
            if number > 2 and time.monotonic() - begin > CHANGES_S_MAX:
                break
        figure(f"{backend}: rounds of 2, 1, 3, 2 members", number)
        figure(f"{backend}: a change of members with a sum", (time.monotonic() - begin) / number / 4, "s")
        ranks.meet()
        allowed: dict[str, float] = {
            "threads": 4,
            "descriptors": 4,
            "shared memory": 4,
            "MB of the device": MB_MAX,
        }
        deadline = time.monotonic() + SETTLED_S_MAX
        while beyond := _growth_beyond(allowed, before, ranks.ask(group_job.footprint)):
            assert time.monotonic() < deadline, beyond
            time.sleep(0.1)  # backends are taken down beside what follows


def _growth_beyond(
    allowed: dict[str, float], before: list[dict[str, float]], now: list[dict[str, float]]
) -> list[dict[str, float]]:
    growths = [
        {what: later[what] - earlier[what] for what in later}
        for earlier, later in zip(before, now, strict=True)
    ]
    return [growth for growth in growths if any(growth[what] > most for what, most in allowed.items())]


@each_backend
def test_twenty_groups_are_made_and_aborted(backend: str) -> None:
    with job(backend, 2) as ranks:
        for _ in range(20 if backend.endswith("nccl") else 3):
            assert_sums(ranks.meet())
            ranks[0].ask(group_job.abort_what_blocks, 0, "wait", ranks.prefix())


@each_backend
def test_graphs_are_captured_beside_collectives_under_way(backend: str) -> None:
    with job(backend, 2) as ranks:
        ranks.meet()
        counts = ranks.ask(group_job.capture_in_step, 20)
        assert counts == [20, 20]


@each_backend
def test_a_gang_and_a_coordinator_work_over_the_group(backend: str) -> None:
    with job(backend, 3) as ranks:
        ranks.meet()
        ranks.ask(group_job.make_cpu_group)
        ranks.meet(group="other")
        assert ranks.ask(group_job.talk) == [[6, 6.0, [1.0, 2.0, 3.0]]] * 3


@pytest.mark.parametrize("backend", ["baby-gloo", pytest.param("baby-nccl", marks=pytest.mark.gpu)])
def test_the_server_that_forks_never_opens_the_device(backend: str) -> None:
    """A spare may: it makes its CUDA context before it is needed, on the device of the group."""
    with job(backend, 2) as ranks:
        assert_sums(ranks.meet())
        for found in ranks.ask(group_job.opens_no_device):
            assert found["server"]
            assert found["spare"] or backend == "baby-nccl"
