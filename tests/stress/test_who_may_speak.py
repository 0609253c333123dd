"""Who claims to be somebody else, at the lighthouse and at a ManagerServer: the one who is there stays.

And the other direction: a server that talks nonsense to a client of ours.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest

from lighthouse import admission, server, session, wire
from lighthouse.address import Address, parse_address
from lighthouse.net import ServerLimits, make_aio_server, make_channel
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import LIMIT_S, SessionClient, UnaryClient, registered
from tests.stress.beside import RankClient
from tests.waiting import wait_for
from torchft_like import LighthouseServer
from torchft_like.core.conversation import KEPT_MAX
from torchft_like.core.replica_group import GroupLostNotice
from torchft_like.errors import ConnectError
from torchft_like.manager.client import ManagerClient
from torchft_like.manager_server.server import QUEUE_MAX, ManagerServer, _SessionLine
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.testing.cluster import LighthouseProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    with LighthouseProcess("--min_replicas=1", "--join_timeout_ms=60000") as daemon:
        yield daemon.address


# -- at the lighthouse


def register(replica_id: str, address: str, last_quorum_id: int = 0) -> pb.SessionRequest:
    return pb.SessionRequest(
        register=pb.Register(replica_id=replica_id, address=address, last_quorum_id=last_quorum_id)
    )


class At(SessionClient):
    """A replica group that says where it serves."""

    def __init__(self, lighthouse: str, replica_id: str, address: str) -> None:
        self._at = address
        super().__init__(lighthouse, replica_id)

    def send(self, **request: object) -> None:
        if isinstance(first := request.get("register"), pb.Register):
            first.address = self._at
        super().send(**request)


def test_who_claims_the_name_of_a_live_replica_is_refused_and_it_stays(lighthouse: str) -> None:
    with At(lighthouse, "named", "http://10.0.0.1:1") as named:
        named.registered()
        named.join()
        before = named.quorum().quorum_id
        with At(lighthouse, "named", "http://10.0.0.2:1") as claimant:
            code, text = claimant.end()
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert "'named' has a session, and is at 'http://10.0.0.1:1'" in text
        with (
            UnaryClient(lighthouse) as caller,
            pytest.raises(grpc.RpcError, match="joins through its session"),
        ):
            caller.join("named", step=99).result()
        named.join()
        assert named.quorum().quorum_id == before


def test_a_replica_that_comes_back_takes_its_own_place_at_once(lighthouse: str) -> None:
    with At(lighthouse, "back", "http://10.0.0.1:1") as older:
        older.registered()
        with At(lighthouse, "back", "http://10.0.0.1:1") as newer:
            newer.registered()
            code, text = older.end()
            assert code == grpc.StatusCode.ABORTED
            assert "newer session" in text
            assert not newer.has_message()


def test_calls_of_one_replica_that_pile_up_are_answered() -> None:
    with LighthouseProcess("--min_replicas=2") as daemon, UnaryClient(daemon.address) as caller:
        calls = [caller.join("piles") for _ in range(server._CALLS_PER_REPLICA_MAX + 2)]
        for _ in range(2):
            first = next(call for call in grpc_done(calls))
            calls.remove(first)
            with pytest.raises(grpc.RpcError, match="newer calls of this replica"):
                first.result()
        with registered(daemon.address, "other") as (other,):
            other.join()
            quorums = [call.result().quorum for call in calls]
            assert quorums == [other.quorum()] * len(quorums)


def grpc_done(calls: list[Any]) -> Iterator[Any]:
    """Calls as they are over."""
    while True:
        yield from (call for call in calls if call.done())


@pytest.mark.parametrize("name", ["last_quorum_id", "last_quorum_round"])
def test_the_highest_number_that_is_let_in_shuts_nobody_out(name: str) -> None:
    """One broken client must not use up all numbers: what the others are given then is let in again."""
    with LighthouseProcess("--min_replicas=2") as daemon, UnaryClient(daemon.address) as caller:
        highest = admission.AHEAD_MS_MAX + time.time_ns() // 1_000_000
        poison = pb.Register(replica_id="broken", **{name: highest})  # type: ignore[arg-type]
        caller.session(pb.SessionRequest(register=poison), pb.SessionRequest(leave=pb.Leave()))
        with registered(daemon.address, "a", "b") as (a, b):
            a.join()
            b.join()
            quorum = a.quorum()
            assert max(quorum.quorum_id, quorum.round) > highest
        last = quorum.quorum_id, quorum.round, ["a", "b"]
        with SessionClient(daemon.address, "a", last) as a:
            a.registered()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"step": 2**63 - 1}, "step 9223372036854775807 is beyond"),
        ({"step": -1}, "step -1 is below 0"),
        ({"commit_quorum_id": 2**63 - 1}, "commit_quorum_id"),
        ({"data": "x" * 30_000}, "is too large"),
    ],
)
def test_a_senseless_join_is_in_no_quorum(lighthouse: str, fields: dict[str, Any], complaint: str) -> None:
    with registered(lighthouse, "sane") as (sane,):
        with registered(lighthouse, "senseless") as (senseless,):
            senseless.join(**fields)
            code, text = senseless.end()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in text
        sane.join()
        assert [member.replica_id for member in sane.quorum().participants] == ["sane"]


def test_a_session_that_does_not_say_whose_it_is_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REGISTER_S", 0.1)
    embedded = LighthouseServer(min_replicas=1)
    try:
        with make_channel(parse_address(embedded.address())) as channel:
            never: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            with pytest.raises(grpc.RpcError, match="did not begin with a register"):
                list(channel.stream_stream(wire.SESSION, None, None)(iter(never.get, b""), timeout=LIMIT_S))
            never.put(b"")
    finally:
        embedded.shutdown()


# -- at a ManagerServer


class Group:
    """A ManagerServer of two ranks, and its first rank."""

    def __init__(self, lighthouse: str, name: str) -> None:
        self.server = ManagerServer(
            name, f"http://{lighthouse}", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2
        )
        self.channel = make_channel(parse_address(self.server.address()))
        self.rank = RankClient(self.channel, 0)
        assert self.rank.answer().registered.replica_id == name

    def close(self) -> None:
        self.rank.hang_up()
        self.channel.close()
        self.server.close()


@pytest.fixture
def group(lighthouse: str) -> Iterator[Group]:
    found = Group(lighthouse, "group")
    yield found
    found.close()


def test_who_claims_a_rank_that_is_there_is_refused_and_the_group_lives(group: Group) -> None:
    claimant = RankClient(group.channel, 0)
    with pytest.raises(grpc.RpcError, match="rank 0 of group is here already"):
        claimant.answer()
    caller = ManagerClient(group.server.address())
    limit = timedelta(seconds=LIMIT_S)
    for call in (
        lambda: caller._quorum(0, 1, "", False, limit),
        lambda: caller.should_commit(0, 1, False, limit),
    ):
        with pytest.raises(ConnectError, match="here already"):
            call()
    caller.close()
    other = RankClient(group.channel, 1)
    assert other.answer().WhichOneof("response") == "registered"
    for rank in (group.rank, other):
        rank.say(vote=pb.ShouldCommitRequest(step=3, should_commit=True))
    assert [rank.answer().vote.should_commit for rank in (group.rank, other)] == [True, True]
    other.hang_up()


def test_a_call_that_is_given_up_does_not_withdraw_the_newer_one(lighthouse: str) -> None:
    alone = ManagerServer("alone", f"http://{lighthouse}", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2)
    with make_channel(parse_address(alone.address())) as channel:
        quorum = channel.unary_unary(
            wire.MANAGER_QUORUM,
            request_serializer=pb.ManagerQuorumRequest.SerializeToString,
            response_deserializer=pb.ManagerQuorumResponse.FromString,
        )
        older = quorum.future(pb.ManagerQuorumRequest(group_rank=0, step=1), timeout=LIMIT_S)
        wait_for(lambda: 0 in alone.group._joins)
        first = alone._ranks[0]
        newer = quorum.future(pb.ManagerQuorumRequest(group_rank=0, step=1), timeout=LIMIT_S)
        wait_for(lambda: alone._ranks[0] is not first)
        assert older.cancel()  # type: ignore[no-untyped-call]
        second = quorum.future(pb.ManagerQuorumRequest(group_rank=1, step=1), timeout=LIMIT_S)
        assert newer.result().replica_ids == second.result().replica_ids == ["alone"]
    alone.close()


def test_bytes_that_are_no_message_end_the_session_of_a_rank_and_are_felt_by_the_other(group: Group) -> None:
    other = RankClient(group.channel, 1)
    assert other.answer().WhichOneof("response") == "registered"
    other.say_bytes(b"\xff\xff\xff")
    assert "rank 1 of replica group group is gone" in group.rank.answer().group_lost.reason


class Unread:
    """A session whose reader reads nothing."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.ends: list[session.Refusal] = []

    def send(self, message: bytes) -> None:
        self.waiting.append(message)

    def end(self, why: session.Refusal) -> None:
        self.ends.append(why)


def test_a_rank_that_reads_nothing_is_given_up_after_a_bounded_number_of_messages() -> None:
    line, unread = _SessionLine(b"1", ""), Unread()
    line.connect(unread, pb.RankSessionResponse())  # type: ignore[arg-type]
    for _ in range(10 * KEPT_MAX):
        line.hear(GroupLostNotice("again"))
    assert len(unread.waiting) == 1 + KEPT_MAX < QUEUE_MAX
    assert [why.text for why in unread.ends] == ["this rank has read too little"]


# -- a server that talks nonsense


class Nonsense:
    """A lighthouse, or a ManagerServer, that answers each session with bytes that are no message."""

    def __init__(self, *good: bytes) -> None:
        self._good = good
        self.sessions = 0
        handlers = {"Session": grpc.stream_stream_rpc_method_handler(self._serve)}
        services = [
            grpc.method_handlers_generic_handler(name, handlers)
            for name in ("torchft.LighthouseService", "torchft.ManagerService")
        ]

        async def start() -> Address:
            self._server, bound = make_aio_server(parse_address("127.0.0.1:0"), services, ServerLimits())
            await self._server.start()
            return bound

        self.address = coordination_loop().run(start())

    def stop(self) -> None:
        coordination_loop().run(self._server.stop(0))

    async def _serve(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.sessions += 1
        for message in self._good:
            await context.write(message)
        if self.sessions == 1:
            await context.write(b"\xff\xff\xff")
        await asyncio.sleep(LIMIT_S)


def test_a_lighthouse_that_talks_nonsense_is_asked_again() -> None:
    good = pb.SessionResponse(registered=pb.JobConfig(min_replicas=1)).SerializeToString()
    nonsense = Nonsense(good)
    group = ManagerServer("patient", nonsense.address.url, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1)
    wait_for(lambda: nonsense.sessions >= 2)
    assert "no message of the protocol" in group._link.last_error
    group.close()
    nonsense.stop()
