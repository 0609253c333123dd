"""The lighthouse is told of links that do not work, over real sessions."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from lighthouse.admission import REPORTED_CHARACTERS_MAX
from lighthouse.events import read_events
from lighthouse.links import REPORTED_MAX
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import LighthouseProcess, ids_of, registered

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
