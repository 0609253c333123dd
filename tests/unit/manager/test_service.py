"""Sessions of ranks with a real ManagerServer, from the first message to the last."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.net import make_aio_channel
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.coordination import LighthouseServer, ManagerServer
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import RankJoin, Verdict
from torchft_like.errors import ConnectError
from torchft_like.manager_server.duplex import DuplexCall
from torchft_like.manager_server.rank_link import SessionLink
from torchft_like.manager_server.service import _Handlers
from torchft_like.runtime.event_loop import coordination_loop

LIMIT_S = 30.0


class Ear:
    """A rank's listener; `told` has what it was told, by name."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, Any]] = queue.Queue()

    def __getattr__(self, name: str) -> Any:
        return lambda news=None, *_: self.told.put((name, news))

    def heard(self, name: str) -> Any:
        """The next news of this name."""
        while (told := self.told.get(timeout=LIMIT_S))[0] != name:
            pass
        return told[1]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer()
    yield server
    server.shutdown()


@pytest.fixture
def server(lighthouse: LighthouseServer) -> Iterator[ManagerServer]:
    """Of a replica group of two ranks."""
    limit = timedelta(seconds=LIMIT_S)
    server = ManagerServer(
        "g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2, connect_timeout=limit
    )
    yield server
    server.close()


@pytest.mark.progress
def test_a_rank_whose_stream_ends_before_it_is_registered_is_lost(server: ManagerServer) -> None:
    async def requests() -> AsyncIterator[pb.RankSessionRequest]:
        yield pb.RankSessionRequest(register=pb.RankRegister(group_rank=1))

    async def end_at_the_first_write() -> None:
        session: Any = _Handlers(server).session(requests(), None)  # type: ignore[arg-type]
        await anext(session)
        await session.aclose()

    ear = Ear()
    server.attach_local_rank(0, ear)
    coordination_loop().run(end_at_the_first_write())
    assert "rank 1" in ear.heard("group_lost")
    SessionLink(parse_address(server.address()), 1, Ear(), LIMIT_S).close()  # its place is free


def test_a_rank_that_is_refused_says_why(server: ManagerServer) -> None:
    address = parse_address(server.address())
    with pytest.raises(ConnectError, match=r"group rank 7 is not in \[0, 2\)"):
        SessionLink(address, 7, Ear(), 3.0)
    first = SessionLink(address, 1, Ear(), LIMIT_S)
    with pytest.raises(ConnectError, match="rank 1 of g is here already"):
        SessionLink(address, 1, Ear(), 3.0)
    first.close()


class FailingEar(Ear):
    """Fails at one piece of news, as a user's process group may when it is aborted."""

    def step_lost(self, quorum_id: int) -> None:
        raise RuntimeError(f"cannot abort quorum {quorum_id}")


@pytest.mark.progress
def test_a_rank_that_cannot_deal_with_what_it_is_told_loses_its_group(server: ManagerServer) -> None:
    ear, other = FailingEar(), Ear()
    link = SessionLink(parse_address(server.address()), 1, ear, LIMIT_S)
    server.attach_local_rank(0, other).vote(0, Verdict(3, False, False))
    assert "cannot abort quorum 0" in ear.heard("group_lost")
    assert "rank 1" in other.heard("group_lost")
    link.close()


def test_the_stream_of_a_rank_that_leaves_is_ended_by_the_server(server: ManagerServer) -> None:
    async def leave() -> list[str | None]:
        channel = make_aio_channel(parse_address(server.address()))
        call: DuplexCall[pb.RankSessionRequest, pb.RankSessionResponse]
        call = DuplexCall(channel, wire.RANK_SESSION, pb.RankSessionRequest, pb.RankSessionResponse)
        heard: list[str | None] = []
        try:
            call.send(pb.RankSessionRequest(register=pb.RankRegister(group_rank=1)))
            call.send(pb.RankSessionRequest(leave=pb.Leave(reason="done")))
            async with asyncio.timeout(LIMIT_S):
                while (response := await call.read()) is not None:
                    heard.append(response.WhichOneof("response"))
        finally:
            await call.close()
            await channel.close(None)
        return heard

    assert coordination_loop().run(leave()) == ["registered"]


def test_a_rank_that_asks_while_its_group_leaves_makes_no_death_of_that(
    lighthouse: LighthouseServer, server: ManagerServer
) -> None:
    ear, ends = Ear(), queue.Queue[str]()
    lighthouse._lighthouse.events.subscribe(
        lambda event: ends.put(event.kind) if event.kind in ("leave", "loss") else None
    )

    async def leave_and_be_asked() -> None:
        server.rank_attached(1, ear, lasts=True)
        leaving = asyncio.ensure_future(server._stop("bye"))
        await asyncio.sleep(0)
        server.rank_joined(RankJoin(1, step=0, checkpoint_metadata=""))
        await leaving

    coordination_loop().run(leave_and_be_asked())
    assert ends.get(timeout=LIMIT_S) == "leave"
    assert "has left: bye" in ear.heard("group_lost")


def test_a_rank_that_asks_while_its_group_hangs_up_is_told_and_nobody_is_probed(
    server: ManagerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Probe] = []

    async def probe(probe: Probe) -> None:
        probes.append(probe)

    monkeypatch.setattr(server, "_probe", probe)
    ear = Ear()

    async def hang_up_and_be_asked() -> None:
        server.rank_attached(1, ear, lasts=True)
        for rank in range(2):
            server.rank_joined(RankJoin(rank, step=0, checkpoint_metadata=""))
        members = [pb.QuorumMember(replica_id=i, address=f"http://{i}:1") for i in ("g", "h")]
        server.quorum_formed(pb.Quorum(quorum_id=7, participants=members))
        closing = asyncio.ensure_future(server._stop(None))
        await asyncio.sleep(0)
        for rank in range(2):
            server.rank_joined(RankJoin(rank, step=0, checkpoint_metadata="", commit_failures=1))
        await closing

    coordination_loop().run(hang_up_and_be_asked())
    assert probes == []
    assert "rank 0" in ear.heard("group_lost")


def test_fields_of_a_newer_lighthouse_reach_the_ranks(server: ManagerServer) -> None:
    later = b"\xaa\x1f\x05later"  # field 501 of nobody, a text
    lost = pb.MemberLost(replica_id="b", reason="gone").SerializeToString() + later
    left = pb.LeftOut(quorum_id=7, replica_id="g", unreachable_replica_ids=["b"]).SerializeToString() + later

    async def hear() -> list[bytes]:
        channel = make_aio_channel(parse_address(server.address()))
        call: DuplexCall[pb.RankSessionRequest, pb.RankSessionResponse]
        call = DuplexCall(channel, wire.RANK_SESSION, pb.RankSessionRequest, pb.RankSessionResponse)
        call.send(pb.RankSessionRequest(register=pb.RankRegister(group_rank=1)))
        heard: list[bytes] = []
        try:
            assert (await call.read()) is not None  # registered
            for rank in (0, 1):
                server.rank_joined(RankJoin(rank, step=0, checkpoint_metadata=""))
            server.member_lost(pb.MemberLost.FromString(lost))
            server.left_out(pb.LeftOut.FromString(left))
            while len(heard) < 2:
                response = await call.read()
                assert response is not None
                kind = response.WhichOneof("response")
                if kind in ("member_lost", "left_out"):
                    heard.append(getattr(response, kind).SerializeToString())
        finally:
            await call.close()
            await channel.close(None)
        return heard

    server.attach_local_rank(0, Ear())
    assert coordination_loop().run(hear()) == [lost, left]
