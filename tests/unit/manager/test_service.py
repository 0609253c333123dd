"""Sessions of ranks with a real ManagerServer, from the first message to the last."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lighthouse import wire
from lighthouse.address import Address, parse_address
from lighthouse.admission import about_member, believable
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.membership import QuorumNumber
from lighthouse.listening import until_refused
from lighthouse.session import RefusedError
from lighthouse.wire import torchft_pb2 as pb
from tests.ports import free_ports
from torchft_like.coordination import LighthouseServer, ManagerServer
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import (
    GroupJoin,
    GroupLeftNotice,
    GroupLostNotice,
    LossNotice,
    RankJoin,
    RankVerdict,
    StepLostNotice,
    SuspectNotice,
    ToRank,
    Verdict,
)
from torchft_like.errors import ConfigError, ConnectError, CoordinationError
from torchft_like.manager_server import suspicion
from torchft_like.manager_server.duplex import DuplexCall
from torchft_like.manager_server.rank_link import RankCall, ServerGoneError, SessionLink
from torchft_like.manager_server.server import LighthouseLink, _SessionLine
from torchft_like.runtime.event_loop import coordination_loop

LIMIT_S = 30.0
REFUSED_S = 3.0  # in which a busy machine gives at least one of the answers


class _AnyText:
    """Equal to every text but the empty one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and bool(other)

    __hash__ = None  # type: ignore[assignment]


ANY_TEXT = _AnyText()


class Ear:
    """A rank's listener; `told` has what it was told, by name."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, Any]] = queue.Queue()

    def hear(self, message: ToRank) -> None:
        match message:
            case RankVerdict(_, verdict):
                self.told.put(("verdict", verdict))
            case SuspectNotice():
                self.told.put(("suspected", tuple(message)))
            case LossNotice():
                self.told.put(("lost", message.replica_id))
            case GroupLeftNotice() | GroupLostNotice():
                self.told.put(("group_lost", message.reason))

    def __getattr__(self, name: str) -> Any:
        return lambda news=None: self.told.put((name, news))

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


@pytest.mark.no_leak
def test_a_start_that_ctrl_c_interrupts_leaves_no_session(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = LighthouseLink.wait_connected

    async def interrupted(link: LighthouseLink, timeout_s: float) -> bool:
        assert await connected(link, timeout_s)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await asyncio.Event().wait()

    given = "g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1
    with monkeypatch.context() as patch:
        patch.setattr(LighthouseLink, "wait_connected", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ManagerServer(*given)
    ManagerServer(*given, connect_timeout=timedelta(seconds=LIMIT_S)).close()  # the name is free again


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        (0, "", "replica_id"),
        (0, 7, "replica_id"),
        (2, "", "hostname"),
        (4, "nowhere", "store_addr"),
        (5, -1, "world_size"),
        (5, "2", "world_size"),
    ],
)
def test_a_wrong_value_is_named_and_not_taken_for_a_lighthouse_that_is_silent(
    lighthouse: LighthouseServer, place: int, value: Any, name: str
) -> None:
    limit = timedelta(seconds=LIMIT_S)
    given: list[Any] = ["g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1, limit, limit]
    given[place] = value
    with pytest.raises(CoordinationError, match=f"{name} (is )?{value!r}"):
        ManagerServer(*given)


def test_a_spare_is_one_or_not(lighthouse: LighthouseServer) -> None:
    given = "g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1
    with pytest.raises(ConfigError, match="spare is 'yes'"):
        ManagerServer(*given, spare="yes")  # type: ignore[arg-type]


class DeafContext:
    """Of a rank that registers, and takes nothing."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> None: ...

    async def send_initial_metadata(self, _: object) -> None: ...

    async def read(self) -> pb.RankSessionRequest:
        if self.has_registered:
            await asyncio.Event().wait()
        self.has_registered = True
        return pb.RankSessionRequest(register=pb.RankRegister(group_rank=1))

    async def write(self, _: bytes) -> None:
        raise ConnectionResetError

    has_registered = False


@pytest.mark.progress
def test_a_rank_whose_stream_ends_before_it_is_registered_is_lost(server: ManagerServer) -> None:
    async def end_at_the_first_write() -> None:
        session = asyncio.ensure_future(server.serve_session(None, DeafContext()))  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match="ConnectionResetError"):
            await session

    ear = Ear()
    server.attach_local_rank(0, ear)
    coordination_loop().run(end_at_the_first_write())
    assert "rank 1" in ear.heard("group_lost")
    with pytest.raises(ConnectError, match="rank 1 of replica group g is gone"):
        SessionLink(parse_address(server.address()), 1, Ear(), REFUSED_S)


def test_a_rank_that_is_refused_says_why(server: ManagerServer) -> None:
    address = parse_address(server.address())
    with pytest.raises(ConnectError, match=r"group rank 7 is not in \[0, 2\)"):
        SessionLink(address, 7, Ear(), REFUSED_S)
    first = SessionLink(address, 1, Ear(), LIMIT_S)
    with pytest.raises(ConnectError, match="rank 1 of g is here already"):
        SessionLink(address, 1, Ear(), REFUSED_S)
    first.close()


class FailingEar(Ear):
    """Fails at one piece of news, as a user's process group may when it is aborted."""

    def hear(self, message: ToRank) -> None:
        if isinstance(message, StepLostNotice):
            raise RuntimeError(f"cannot abort quorum {message.quorum_id}")
        super().hear(message)


class AilingEar(Ear):
    """Fails at any news, as a user's process group may when it is aborted."""

    def hear(self, message: ToRank) -> None:
        raise RuntimeError(f"cannot abort: {message}")


def test_other_groups_are_told_of_no_host_that_they_cannot_reach(server: ManagerServer) -> None:
    link = SessionLink(parse_address(server.address()), 1, Ear(), LIMIT_S, host="127.0.0.2")
    try:
        assert server._other_hosts() == []
    finally:
        link.close()


def test_a_join_of_a_group_of_a_thousand_hosts_is_taken(server: ManagerServer) -> None:
    for rank in range(1, 1000):
        server._ranks[rank] = _SessionLine(b"", f"rank-{rank}.trainers.a-long-name.example.svc:65535")
    join = server._member(GroupJoin(0, shrink_only=False, commit_failures=0, commit_quorum_id=0))
    assert join.rank_addresses
    limit = believable(0, QuorumNumber(0, 0))
    assert about_member(join, LighthouseConfig(min_replicas=1), limit) is None


@pytest.mark.progress
def test_an_error_of_the_rank_beside_the_server_keeps_no_news_from_the_others(server: ManagerServer) -> None:
    ear = Ear()
    server.attach_local_rank(0, AilingEar())
    link = SessionLink(parse_address(server.address()), 1, ear, LIMIT_S)

    async def lose() -> None:
        server.hear(pb.SessionResponse(member_lost=pb.MemberLost(replica_id="b", reason="it died")))

    with pytest.raises(RuntimeError, match="cannot abort"):
        coordination_loop().run(lose())
    assert ear.heard("lost") == "b"
    link.close()


def test_a_rank_that_finds_no_server_says_so_at_once_and_one_with_a_wrong_setting_names_it(
    server: ManagerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports()
    with pytest.raises(ServerGoneError, match=f"no ManagerServer listens at 127.0.0.1:{port}"):
        SessionLink(Address("127.0.0.1", port), 1, Ear(), 86400.0)
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", "soon")
    with pytest.raises(ConfigError, match="TORCHFT_KEEPALIVE_TIME_MS is 'soon'"):
        SessionLink(parse_address(server.address()), 1, Ear(), 86400.0)


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
        types = pb.RankSessionRequest, pb.RankSessionResponse
        call: RankCall = DuplexCall(parse_address(server.address()), wire.RANK_SESSION, *types)
        heard: list[str | None] = []
        try:
            call.send(pb.RankSessionRequest(register=pb.RankRegister(group_rank=1)))
            call.send(pb.RankSessionRequest(leave=pb.Leave(reason="done")))
            async with asyncio.timeout(LIMIT_S):
                while (response := await call.read()) is not None:
                    heard.append(response.WhichOneof("response"))
        finally:
            await call.close()
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
        server.rank_attached(1, ear, b"1")
        leaving = asyncio.ensure_future(server._stop("bye"))
        await asyncio.sleep(0)
        server._perform(server.group.rank_joined(RankJoin(1, step=0, checkpoint_metadata="")))
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
        server.rank_attached(1, ear, b"1")
        for rank in range(2):
            server._perform(server.group.rank_joined(RankJoin(rank, step=0, checkpoint_metadata="")))
        members = [pb.QuorumMember(replica_id=i, address=f"http://{i}:1") for i in ("g", "h")]
        server.hear(pb.SessionResponse(quorum=pb.Quorum(quorum_id=7, participants=members)))
        closing = asyncio.ensure_future(server._stop(None))
        await asyncio.sleep(0)
        for rank in range(2):
            server._perform(
                server.group.rank_joined(RankJoin(rank, step=0, checkpoint_metadata="", commit_failures=1))
            )
        await closing

    coordination_loop().run(hang_up_and_be_asked())
    assert probes == []
    assert "rank 0" in ear.heard("group_lost")


def test_fields_of_a_newer_lighthouse_reach_the_ranks(server: ManagerServer) -> None:
    later = b"\xaa\x1f\x05later"  # field 501 of nobody, a text
    lost = pb.MemberLost(replica_id="b", reason="gone").SerializeToString() + later
    left = pb.LeftOut(quorum_id=7, replica_id="g", unreachable_replica_ids=["b"]).SerializeToString() + later

    async def hear() -> list[bytes]:
        types = pb.RankSessionRequest, pb.RankSessionResponse
        call: RankCall = DuplexCall(parse_address(server.address()), wire.RANK_SESSION, *types)
        call.send(pb.RankSessionRequest(register=pb.RankRegister(group_rank=1)))
        heard: list[bytes] = []
        try:
            assert (await call.read()) is not None  # registered
            for rank in (0, 1):
                server._perform(server.group.rank_joined(RankJoin(rank, step=0, checkpoint_metadata="")))
            server.hear(pb.SessionResponse(member_lost=pb.MemberLost.FromString(lost)))
            server.hear(pb.SessionResponse(left_out=pb.LeftOut.FromString(left)))
            while len(heard) < 2:
                response = await call.read()
                assert response is not None
                kind = response.WhichOneof("response")
                if kind in ("member_lost", "left_out"):
                    heard.append(getattr(response, kind).SerializeToString())
        finally:
            await call.close()
        return heard

    server.attach_local_rank(0, Ear())
    assert coordination_loop().run(hear()) == [lost, left]


class Path:
    """The path of a rank to its ManagerServer; while it is not open, it resets new connections."""

    def __init__(self, server: ManagerServer) -> None:
        self._target = parse_address(server.address())
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = True
        self._listener = coordination_loop().run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Reset all connections."""

        async def reset() -> None:
            for writer in self._writers:
                writer.transport.abort()
            self._writers.clear()

        coordination_loop().run(reset())

    def close(self) -> None:
        """Listen no more."""

        async def close() -> None:
            self._listener.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._tasks)

        coordination_loop().run(close())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.transport.abort()


@pytest.fixture
def path(server: ManagerServer) -> Iterator[Path]:
    path = Path(server)
    yield path
    path.close()


@pytest.mark.suspicion
def test_what_is_said_while_a_session_is_broken_arrives_once_in_the_next_one(
    server: ManagerServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("RESUME_S", "RECOVERY_S"):  # on a busy machine a rank would be suspected, which ends a step
        monkeypatch.setattr(suspicion, pause, 10 * LIMIT_S)
    ear, other = Ear(), Ear()
    link = SessionLink(path.address, 1, ear, LIMIT_S)
    local = server.attach_local_rank(0, other)
    for step in range(30):
        if step % 3 == 0:
            path.cut()
        link.vote(1, Verdict(step, True))
        if step % 3 == 1:
            path.cut()
        local.vote(0, Verdict(step, True))
        assert ear.heard("verdict").step == step
        assert other.heard("verdict").step == step
    link.close()
    assert "rank 1" in other.heard("group_lost")


@pytest.mark.suspicion
def test_a_rank_that_cannot_come_back_is_suspected_and_goes_on_when_it_can(
    server: ManagerServer, path: Path
) -> None:
    ear, other = Ear(), Ear()
    link = SessionLink(path.address, 1, ear, LIMIT_S)
    local = server.attach_local_rank(0, other)
    path.is_open = False
    path.cut()
    assert ear.heard("suspected") == (0, ANY_TEXT)
    assert other.heard("lighthouse_disconnected")
    assert other.heard("suspected") == (1, ANY_TEXT)
    local.vote(0, Verdict(3, True))
    assert not other.heard("verdict").committed  # without its other rank the group commits nothing
    link.vote(1, Verdict(3, True))
    path.is_open = True
    assert other.heard("suspected") == (1, "")
    other.heard("lighthouse_connected")
    local.join(RankJoin(0, step=3, checkpoint_metadata=""))
    assert not ear.heard("verdict").committed
    link.close()


@pytest.mark.suspicion
@pytest.mark.parametrize("silent", ["rank 1", "rank 0"])
def test_a_rank_that_is_silent_for_the_dead_time_is_lost(lighthouse: LighthouseServer, silent: str) -> None:
    limit, dead = timedelta(seconds=LIMIT_S), timedelta(seconds=0.5)
    server = ManagerServer(
        "g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2, limit, dead_after=dead
    )
    ear, other = Ear(), Ear()
    path = Path(server)
    try:
        link = SessionLink(path.address, 1, ear, LIMIT_S, dead_s=0.5 if silent == "rank 0" else LIMIT_S)
        server.attach_local_rank(0, other)
        path.is_open = False
        path.cut()
        lost = (other if silent == "rank 1" else ear).heard("group_lost")
        assert silent in lost
        assert "silent for longer than dead_after, 0.5 s" in lost
        link.close()
    finally:
        server.close()
        path.close()


@pytest.mark.suspicion
def test_no_other_process_takes_the_place_of_a_rank_that_is_suspected(
    server: ManagerServer, path: Path
) -> None:
    other = Ear()
    link = SessionLink(path.address, 1, Ear(), LIMIT_S)
    server.attach_local_rank(0, other)
    path.is_open = False
    path.cut()
    other.heard("suspected")
    with pytest.raises(ConnectError, match="rank 1 of g is here already"):
        SessionLink(parse_address(server.address()), 1, Ear(), REFUSED_S)
    path.is_open = True
    assert other.heard("suspected") == (1, "")
    link.close()


def test_a_rank_does_not_take_a_later_server_at_the_address_for_its_own(
    lighthouse: LighthouseServer, server: ManagerServer
) -> None:
    ear, other = Ear(), Ear()
    link = SessionLink(parse_address(server.address()), 1, ear, LIMIT_S)
    link.replica_id = "the one before"
    server.attach_local_rank(0, other)
    coordination_loop().loop.call_soon_threadsafe(server._ranks[1]._end, "for the test")  # type: ignore[attr-defined]
    assert "the one before is gone: g has its address" in ear.heard("group_lost")
    link.close()


def test_a_process_is_known_to_have_ended_when_its_host_refuses() -> None:
    async def watch() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        address = Address(*listener.getsockname())
        refused = asyncio.ensure_future(until_refused(address))
        done, _ = await asyncio.wait([refused], timeout=0.3)
        assert not done
        listener.close()
        async with asyncio.timeout(LIMIT_S):
            await refused

    coordination_loop().run(watch())
