"""The line to a real lighthouse, and a listener that fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import socket
import weakref
from collections.abc import AsyncIterator

import pytest

from lighthouse.address import parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.history import Report
from lighthouse.net import ServerLimits, make_aio_server
from lighthouse.server import Lighthouse, ReplicaSession
from lighthouse.session import service
from lighthouse.wire import torchft_pb2 as pb
from tests.waiting import await_fact
from torchft_like.core.stall_watch import REPORT_PER_MEMBER_S, ProgressLog
from torchft_like.manager_server.server import LighthouseLink
from torchft_like.runtime.event_loop import coordination_loop

LIMIT_S = 30.0


class Listener:
    """Joins whenever it is connected, and fails at the first of what it is told, whatever that is."""

    def __init__(self, failing: str) -> None:
        self.failing = {failing}
        self.link: LighthouseLink | None = None
        self.quorums = asyncio.Queue[int]()
        self.leases = asyncio.Queue[str]()
        self.refusals = asyncio.Queue[str]()

    def fail(self, kind: str) -> None:
        if kind in self.failing:
            self.failing.remove(kind)
            raise RuntimeError("abort failed")

    def registration(self) -> pb.Register:
        self.fail("registration")
        return pb.Register(replica_id="a", address="http://h:1", world_size=1)

    def lighthouse_connected(self) -> None:
        self.fail("connected")
        assert self.link is not None
        self.link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="a")))

    def lighthouse_disconnected(self, reason: str) -> None:
        self.fail("disconnected")

    def hear(self, response: pb.SessionResponse) -> None:
        if response.WhichOneof("response") == "quorum":
            self.quorums.put_nowait(response.quorum.quorum_id)
            self.fail("quorum")

    def refused(self, reason: str) -> None:
        self.refusals.put_nowait(reason)

    def lease_ended(self) -> None:
        self.leases.put_nowait("ended")


@contextlib.asynccontextmanager
async def linked(
    listener: Listener, lease_ms: int = 30_000, kind: type[Lighthouse] = Lighthouse
) -> AsyncIterator[tuple[Lighthouse, LighthouseLink]]:
    """A lighthouse, and the line of a ManagerServer to it."""
    config = LighthouseConfig(standing_lease_ms=lease_ms)
    lighthouse = await kind.start(config, parse_address("127.0.0.1:0"))
    listener.link = link = LighthouseLink(lighthouse.address, listener, 0.1)  # type: ignore[arg-type] # it has what is asked
    try:
        yield lighthouse, link
    finally:
        await link.close()
        await lighthouse.stop()


async def quorums_in_two_sessions(failing: str) -> tuple[int, int]:
    """Those before and after a failure that ends the first session."""
    async with linked(listener := Listener(failing)) as (_, link), asyncio.timeout(LIMIT_S):
        first = await listener.quorums.get()
        if failing == "disconnected":  # a join that names somebody else ends the session
            link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="b")))
        elif failing != "quorum":
            link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="a")))
        return first, await listener.quorums.get()


@pytest.mark.parametrize("failing", ["registration", "connected", "quorum", "disconnected"])
def test_a_listener_that_fails_does_not_deafen_the_line(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        first, second = coordination_loop().run(quorums_in_two_sessions(failing))
    assert second >= first
    assert "RuntimeError: abort failed" in caplog.text


async def tasks_left_by_calling_again(times: int) -> int:
    async with linked(listener := Listener("nothing")) as (_, link), asyncio.timeout(LIMIT_S):
        earlier = []
        await listener.quorums.get()
        for _ in range(times):
            earlier.append(weakref.ref(link._task))
            link.hang_up()
            link.call_again()
            await listener.quorums.get()
        gc.collect()
        return sum(task() is not None for task in earlier)


@pytest.mark.no_leak
def test_sessions_that_were_ended_while_a_rank_was_silent_do_not_add_up() -> None:
    # gRPC 1.71 keeps the newest of them; the one of today keeps none.
    assert coordination_loop().run(tasks_left_by_calling_again(5)) <= 1


async def lease_without_a_lighthouse(lease_ms: int, *, is_silent: bool) -> str:
    """Return what happens to the lease first: it has ended, or was renewed."""
    async with linked(listener := Listener("nothing"), lease_ms) as (lighthouse, link):
        assert await link.wait_connected(LIMIT_S)
        await lighthouse.stop()
        address = lighthouse.address
        with socket.create_server((address.host, address.port)) if is_silent else contextlib.nullcontext():
            await await_fact(lambda: link._lease is not None or not listener.leases.empty())
            first = link._lease
            await await_fact(lambda: link._lease is not first or not listener.leases.empty())
            return "renewed" if listener.leases.empty() else listener.leases.get_nowait()


@pytest.mark.one_quorum_per_step
def test_a_lease_ends_while_the_lighthouse_is_silent() -> None:
    assert coordination_loop().run(lease_without_a_lighthouse(200, is_silent=True)) == "ended"


@pytest.mark.progress
def test_a_lease_does_not_end_while_no_lighthouse_listens() -> None:
    assert coordination_loop().run(lease_without_a_lighthouse(60_000, is_silent=False)) == "renewed"


async def rest_of_a_lease(lease_ms: int) -> float:
    """The seconds for which members go on after a lighthouse with this lease has ended their session."""
    async with linked(Listener("nothing"), lease_ms) as (lighthouse, link):
        assert await link.wait_connected(LIMIT_S)
        await lighthouse.stop()
        await await_fact(lambda: link._lease)
        assert link._lease is not None
        return link._lease.when() - asyncio.get_running_loop().time()


@pytest.mark.one_quorum_per_step
def test_the_time_in_which_a_trainer_notices_silence_is_a_part_of_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", "20000")
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "5000")
    assert coordination_loop().run(rest_of_a_lease(30_000)) <= 5.0


async def sign_after_another_server() -> str:
    """By what a replica is healthy at a lighthouse at whose address was a server that knew no session."""
    other, address = make_aio_server(parse_address("127.0.0.1:0"), [], ServerLimits())
    await other.start()
    listener = Listener("nothing")
    listener.link = link = LighthouseLink(address, listener, 0.1)  # type: ignore[arg-type] # it has what is asked
    try:
        async with asyncio.timeout(LIMIT_S):
            while link.last_error == "no answer":
                await asyncio.sleep(0.01)
            await other.stop(None)
            lighthouse = await Lighthouse.start(LighthouseConfig(), address)
            try:
                await listener.quorums.get()
                return lighthouse.sign_of("a")
            finally:
                await lighthouse.stop()
    finally:
        await link.close()
        await other.stop(None)


def test_a_lighthouse_that_knows_sessions_gets_one_after_a_server_that_knew_none() -> None:
    assert coordination_loop().run(sign_after_another_server()) == "session"


class UnaryLighthouse:
    """Knows the unary calls alone, as torchft's does, and forms a quorum when it is told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # for which it was asked
        self.asked, self.forms = asyncio.Event(), asyncio.Event()

    async def serve_quorum(self, request: pb.LighthouseQuorumRequest, _: object) -> bytes:
        self.steps.append(request.requester.step)
        self.asked.set()
        await self.forms.wait()
        return pb.LighthouseQuorumResponse(quorum=pb.Quorum(quorum_id=7)).SerializeToString()

    async def serve_heartbeat(self, _request: object, _context: object) -> bytes:
        return b""


async def steps_asked_for() -> list[int]:
    """The steps for which a lighthouse is asked by one that asks again before it has the answer."""
    lighthouse = UnaryLighthouse()
    calls = {
        "Quorum": (lighthouse.serve_quorum, pb.LighthouseQuorumRequest),
        "Heartbeat": (lighthouse.serve_heartbeat, pb.LighthouseHeartbeatRequest),
    }
    handlers = service("torchft.LighthouseService", streams={}, calls=calls)
    server, address = make_aio_server(parse_address("127.0.0.1:0"), [handlers], ServerLimits())
    await server.start()
    listener = Listener("nothing")
    listener.link = link = LighthouseLink(address, listener, 0.1)  # type: ignore[arg-type] # it has what is asked
    try:
        async with asyncio.timeout(LIMIT_S):
            await lighthouse.asked.wait()
            link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="a", step=1)))
            lighthouse.forms.set()
            await listener.quorums.get()
            link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="a", step=2)))
            await listener.quorums.get()
        return lighthouse.steps
    finally:
        await link.close()
        await server.stop(None)


def test_what_was_asked_again_before_the_answer_is_no_request_for_the_next_quorum() -> None:
    assert coordination_loop().run(steps_asked_for()) == [0, 2]


class BusyLighthouse(Lighthouse):
    """Begins to read a session a second after it was opened."""

    async def _serve_session(self, session: ReplicaSession) -> str:
        await asyncio.sleep(1.0)
        return await super()._serve_session(session)


async def told_of_a_leave() -> list[str]:
    """What a busy lighthouse writes down of a replica that leaves."""
    told: list[str] = []
    async with linked(Listener("nothing"), kind=BusyLighthouse) as (lighthouse, link):
        lighthouse.events.subscribe(
            lambda event: told.append(event.to_text()) if "member" in event.fields else None
        )
        assert await link.wait_connected(LIMIT_S)
        await link.leave("done", 0)
        await await_fact(lambda: len(told) >= 2)
        return told


def test_a_leave_is_no_loss_where_the_lighthouse_is_busy() -> None:
    assert coordination_loop().run(told_of_a_leave()) == [
        "[lighthouse] a registered",
        "[lighthouse] a left: done",
    ]


# When a replica group says how far it is.


EVERY_S = 1.0


class Looks:
    """A log, at which a ManagerServer looks eight times a second."""

    def __init__(self, members: int = 3) -> None:
        self.log, self.now, self.members, self.every_s = ProgressLog(), 100.0, members, EVERY_S

    def look(self, step: int, quorum_id: int = 1, waits_for: str = "", heals_from: str = "") -> Report | None:
        self.now += 0.125
        seen = Report(quorum_id, step, waits_for, heals_from=heals_from)
        return self.log.look(seen, self.members, self.every_s, self.now)

    def steps_told(self, steps: range) -> list[int]:
        return [told.step for step in steps if (told := self.look(step)) is not None]


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_the_first_step_in_a_quorum_is_told_at_once_and_later_ones_once_in_an_interval(looks: Looks) -> None:
    assert looks.look(4) == Report(1, 4)
    assert looks.steps_told(range(5, 30)) == [5, 13, 21, 29]
    assert looks.look(30, quorum_id=2) is None, "no step was committed in this one yet"
    assert looks.look(31, quorum_id=2) == Report(2, 31)


def test_what_has_not_changed_is_not_told_again(looks: Looks) -> None:
    assert looks.look(4) is not None
    assert [looks.look(4) for _ in range(50)] == [None] * 50


def test_a_heal_is_told_at_its_beginning_and_at_its_end(looks: Looks) -> None:
    assert looks.look(0) is not None
    assert looks.look(0, heals_from="a") == Report(1, 0, heals_from="a")
    assert looks.look(0, heals_from="a") is None
    assert looks.look(9) == Report(1, 9)


def test_the_share_of_waiting_is_that_of_the_looks(looks: Looks) -> None:
    looks.look(0)
    looks.look(1)
    told = [looks.look(2, waits_for="allreduce" if i % 4 else "") for i in range(12)]
    (report,) = [report for report in told if report is not None]
    assert (report.waits_for, report.waiting_permille) == ("allreduce", 750)


def test_many_members_tell_less_often() -> None:
    looks = Looks(members=int(3 * EVERY_S / REPORT_PER_MEMBER_S))
    assert looks.steps_told(range(100)) == [0, 24, 48, 72, 96]


def test_while_nobody_looks_only_beginnings_and_ends_are_told(looks: Looks) -> None:
    looks.every_s = math.inf
    assert looks.steps_told(range(4, 40)) == [4, 5]
    assert looks.look(0, quorum_id=2, heals_from="a") == Report(2, 0, heals_from="a")
    looks.every_s = EVERY_S
    assert looks.steps_told(range(40, 50)) == [40, 48]
