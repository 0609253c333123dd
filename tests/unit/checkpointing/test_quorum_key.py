"""A state is given to the members of the quorum in which it is offered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lighthouse.address import LOOPBACK, Address
from tests.unit.checkpointing.clients import request
from tests.unit.checkpointing.conftest import LIMIT, Make
from torchft_like.checkpointing.http_transport import CheckpointServer, ServerLimits
from torchft_like.checkpointing.state_stream import Snapshot
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import CheckpointError


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    server = CheckpointServer(Address(LOOPBACK, 0), ServerLimits())
    yield server
    server.close(wait=True)


def status(server: CheckpointServer, key: str, what: str = "header?wait_ms=0") -> int:
    with request(server.port, f"/checkpoint/5/{what}", key=key) as client:
        return int(client.recv(1000).split()[1])


@pytest.mark.parametrize("what", ["header?wait_ms=0", "sums", "payload?from=0&to=9"])
def test_who_shows_no_key_or_that_of_another_quorum_is_refused(server: CheckpointServer, what: str) -> None:
    server.key = "before"
    server.offer(4, Snapshot({"w": torch.zeros(64)}).fill())
    server.withdraw()
    server.key = "now"
    assert [status(server, key, what) for key in ("", "other", "nowadays", "before")] == [403, 403, 403, 403]
    server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
    assert [status(server, key, what) for key in ("", "other", "nowadays", "before")] == [403, 403, 403, 403]
    assert status(server, "now", what) == 200


def test_a_refusal_tells_strangers_nothing(server: CheckpointServer) -> None:
    server.key = "now"
    server.refuse(5, "the state has 7 secrets")
    assert [status(server, key) for key in ("", "now")] == [403, 424]


def test_an_offer_that_is_kept_goes_on_for_those_of_the_quorum_in_which_it_was_made(
    server: CheckpointServer,
) -> None:
    """As where a replica catches up: its fetch lasts for several quorums."""
    server.key = "first"
    server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
    for later in ("second", "third"):
        server.key = later
        assert [status(server, key) for key in ("first", later)] == [200, 202]
    server.withdraw()
    assert [status(server, key) for key in ("first", "second", "third")] == [403, 403, 202]


def test_who_waits_with_the_key_of_a_quorum_gets_no_state_of_the_next_one(server: CheckpointServer) -> None:
    server.key = "first"
    with (
        request(server.port, "/checkpoint/5/header?wait_ms=1000", key="first") as early,
        request(server.port, "/checkpoint/5/header?wait_ms=4000", key="first"),
    ):
        server.key = "second"
        server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
        assert early.recv(1000).split()[1] in (b"202", b"403")  # it may have come late
    assert status(server, "second") == 200


def test_a_transport_shows_its_key_to_the_source(transports: Make) -> None:
    source, receiver = transports(), transports()
    source.use_key("now")
    source.send_checkpoint([1], 5, {"w": torch.ones(4)}, LIMIT)
    sources = [Source(0, source.metadata())]
    state = receiver.recv_checkpoint_from(sources, 5, LIMIT, Destination(key="now"))
    assert torch.equal(state["w"], torch.ones(4))
    with pytest.raises(CheckpointError, match="it answered 403 this is for members of the quorum"):
        receiver.recv_checkpoint_from(sources, 5, LIMIT, Destination(key="before"))
