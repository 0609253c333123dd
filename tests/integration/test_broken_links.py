"""The lighthouse is told of links that do not work, over real sessions."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest

from lighthouse.core.left_out import REPORTED_CHARACTERS_MAX, REPORTED_MAX
from lighthouse.events import read_events
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import LIMIT_S, ids_of, registered
from tests.managers import manager_alone
from torchft_like import LighthouseServer, QuorumTimeoutError
from torchft_like.testing.cluster import LighthouseProcess

pytestmark = pytest.mark.integration


def cannot_reach(*replica_ids: str) -> pb.BrokenLinks:
    return pb.BrokenLinks(unreachable_replica_ids=replica_ids)


def test_one_end_of_a_broken_link_is_left_out_and_told_until_the_link_works(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with LighthouseProcess("--min_replicas=2", event_file=path) as daemon:
        with registered(daemon.address, "a", "b", "c") as (a, b, c):
            a.send(broken_links=cannot_reach("b"))
            for client in (a, b, c):
                client.join()
            first = a.quorum()
            assert c.quorum() == first
            assert ids_of(first) == ["a", "c"]
            assert b.left_out() == pb.LeftOut(
                quorum_id=first.quorum_id, replica_id="b", unreachable_replica_ids=["a"]
            )

            a.send(broken_links=cannot_reach())
            a.join()
            c.join()
            assert ids_of(b.quorum()) == ["a", "b", "c"]
        assert daemon.stop() == 0
    [event] = [record for record in read_events(path) if record["kind"] == "left_out"]
    assert (event["members"], event["links"]) == (["b"], ["a - b"])


def test_a_manager_that_is_left_out_gives_up_only_when_it_is_asked_to_stop(
    lighthouse: LighthouseServer,
) -> None:
    told, errors = threading.Event(), list[str]()

    def wait() -> None:
        try:
            manager.wait_quorum()
        except QuorumTimeoutError as error:
            errors.append(str(error))

    with (
        registered(lighthouse.address(), "a", "b") as (a, b),
        manager_alone("z", lighthouse.address(), quorum_timeout=0.1) as manager,
    ):
        manager.events.subscribe(lambda event: told.set() if event.kind == "left_out" else None)
        a.send(broken_links=cannot_reach(manager.replica_id()))
        a.join()
        b.join()
        manager.start_quorum()
        assert told.wait(LIMIT_S)
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        manager.request_stop()
        waiting.join(LIMIT_S)
    assert len(errors) == 1
    assert "it and a do not reach each other" in errors[0]


@pytest.mark.parametrize(
    ("unreachable", "complaint"),
    [
        (["b"] * (REPORTED_MAX + 1), "more than 64 entries"),
        (["b" * 4096] * (REPORTED_CHARACTERS_MAX // 4096 + 1), "longer than 16384 characters"),
        (["b" * 5000], "replica_id is longer than 4096 characters"),
        (["b\n"], "cannot be printed"),
    ],
)
def test_a_report_without_measure_ends_its_session(unreachable: list[str], complaint: str) -> None:
    with LighthouseProcess("--min_replicas=2") as daemon, registered(daemon.address, "a") as (a,):
        a.send(broken_links=cannot_reach(*unreachable))
        code, text = a.end()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in text
