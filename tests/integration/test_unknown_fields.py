"""What the lighthouse does with fields of a member that it does not know: a newer peer's, for instance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.net import make_channel
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import LIMIT_S, SessionClient
from torchft_like.testing.lighthouse import LighthouseProcess

pytestmark = pytest.mark.integration

# Fields 500 to 503 of nobody: a number, a text, a message with a text in it, and 8 bytes.
UNKNOWN = (
    b"\xa0\x1f\x96\x01\xaa\x1f\x05later\xb2\x1f\x07\x0a\x05inner\xb9\x1f\x01\x02\x03\x04\x05\x06\x07\x08"
)
GROUP = b"\xa3\x1f\xa4\x1f"  # field 500, empty


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with LighthouseProcess("--min_replicas=2") as daemon:
        yield daemon.address


def with_fields(fields: bytes, **known: Any) -> bytes:
    return pb.QuorumMember(**known).SerializeToString() + fields


def call(address: str, member: bytes) -> bytes:
    """torchft's Quorum, in bytes."""
    request = pb.LighthouseQuorumRequest(requester=pb.QuorumMember.FromString(member)).SerializeToString()
    with make_channel(parse_address(address)) as channel:
        answer: bytes = channel.unary_unary(wire.QUORUM, None, None)(request, timeout=LIMIT_S)
    return answer


def test_they_reach_the_other_members_as_they_came(lighthouse: str) -> None:
    handles = ["h0", "", "h2"]
    joined = with_fields(UNKNOWN, replica_id="newer", step=5, world_size=3, reconfigure_handles=handles)
    with SessionClient(lighthouse, "a") as session:
        session.registered()
        session.join(step=5)
        answered = pb.LighthouseQuorumResponse.FromString(call(lighthouse, joined)).quorum
        told = session.quorum()
    for quorum in (answered, told):
        ours, newer = quorum.participants
        assert (ours.replica_id, newer.replica_id) == ("a", "newer")
        assert newer.SerializeToString() == joined


def test_they_come_back_from_a_session_too(lighthouse: str) -> None:
    with SessionClient(lighthouse, "a") as older, SessionClient(lighthouse, "b") as newer:
        joined = with_fields(UNKNOWN, replica_id="b")
        newer.send(join=pb.QuorumMember.FromString(joined))
        older.join()
        older.registered()
        assert older.quorum().participants[1].SerializeToString() == joined


def test_a_message_of_an_unknown_kind_disturbs_no_session(lighthouse: str) -> None:
    with SessionClient(lighthouse, "a") as other, SessionClient(lighthouse, "b") as newer:
        newer.registered()
        newer.say(pb.SessionRequest.FromString(UNKNOWN))
        newer.join()
        other.join()
        assert len(newer.quorum().participants) == 2


def test_they_count_for_the_size_of_a_member(lighthouse: str) -> None:
    text = 40_000 * b"x"
    member = with_fields(b"\xaa\x1f\xc0\xb8\x02" + text, replica_id="large")
    with pytest.raises(grpc.RpcError, match="is too large") as refused:
        call(lighthouse, member)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_group_among_them_is_refused(lighthouse: str) -> None:
    with pytest.raises(grpc.RpcError, match="protobuf group") as refused:
        call(lighthouse, with_fields(GROUP, replica_id="nested"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
