"""What a trainer says when it cannot start: one clear error, with the culprit's name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions

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
