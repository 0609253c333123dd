"""Who cannot take part is told so with the culprit's name, ends, and costs the others nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, *CHECKED]


@pytest.fixture
def silent_address() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def assert_connect_error(cluster: Cluster, address: str) -> None:
    """A trainer ends within its `connect_timeout` with an error that names the address."""
    cluster.lighthouse_address = f"http://{address}"
    a = cluster.start("a", options=WorkerOptions(connect_timeout_s=1.0))
    cluster.wait_for_end(a)
    assert a.ranks[0].exit_code == 1
    error = a.ranks[0].last_error
    assert "ConnectError" in error
    assert address in error
    assert "check" in error


def test_a_trainer_without_a_lighthouse_ends_with_an_error_that_names_the_address(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.lighthouse.kill()
        assert_connect_error(cluster, cluster.lighthouse_address.removeprefix("http://"))


def test_a_trainer_whose_lighthouse_is_silent_names_its_address(tmp_path: Path, silent_address: str) -> None:
    with Cluster(tmp_path) as cluster:
        assert_connect_error(cluster, silent_address)


WIDER = WorkerOptions(width=32)
DIFFERENCE = "net.0.weight is float32 [32, 8] in the newcomer and float32 [16, 8] in the job"


def assert_refused(cluster: Cluster, foreign: Group, text: str) -> None:
    """The replica group ends with an error that says why it is foreign, and the lighthouse says it, too."""
    cluster.wait_for_end(foreign)
    for rank in foreign.ranks:
        assert rank.exit_code == 1
        assert "ForeignMemberError" in rank.last_error
        assert text in rank.last_error
    refusals = cluster.lighthouse_events.records("refused")
    assert refusals
    for refusal in refusals:  # one who is slow to end may have registered again
        assert str(refusal["member"]).startswith(f"{foreign.name}:")
        assert text in str(refusal["reason"])


@pytest.mark.parametrize("size", [1, 2])
def test_a_wider_newcomer_at_the_first_step_is_refused_and_the_others_begin(
    tmp_path: Path, size: int
) -> None:
    with Cluster(tmp_path, min_replicas=2) as cluster:
        a, c, b = (
            cluster.start(name, size=size, options=options)
            for name, options in (("a", None), ("c", WIDER), ("b", None))
        )
        assert_refused(cluster, c, DIFFERENCE)
        cluster.wait_for_quorum_of(a, b)
        assert not a.failures() + b.failures()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param(WIDER, DIFFERENCE, id="wider"),
        pytest.param(WorkerOptions(job_id="blue"), "its job id is 'blue'", id="of another name"),
        pytest.param(WorkerOptions(protocol=99), "torchft_like speaks protocol 99", id="of another version"),
        pytest.param(WorkerOptions(began=5000), "its state began in quorum 5000", id="ahead"),
    ],
)
def test_a_foreign_newcomer_to_a_job_that_runs_costs_it_no_step(
    tmp_path: Path, options: WorkerOptions, text: str
) -> None:
    with Cluster(tmp_path, min_replicas=2) as cluster:
        members = cluster.start_all("ab", options=WorkerOptions(pause_s=0.01, job_id="red"))
        quorum_id = members[0].last_commit.quorum_id
        assert_refused(cluster, cluster.start("c", options=options), text)
        cluster.wait_for_quorum_of(*members)
        for member in members:
            assert member.last_commit.quorum_id == quorum_id
            assert not member.failures()
            assert not member.events("abort")
