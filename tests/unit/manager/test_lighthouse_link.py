"""The line to a real lighthouse, and a listener that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest

from lighthouse.address import parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.server import Lighthouse, ReplicaSession
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.manager_server.lighthouse_link import LighthouseLink
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


async def quorums_in_two_sessions(failing: str) -> tuple[int, int]:
    """Those before and after a failure that ends the first session."""
    lighthouse = await Lighthouse.start(LighthouseConfig(), parse_address("127.0.0.1:0"))
    listener = Listener(failing)
    listener.link = link = LighthouseLink(lighthouse.address, listener, 0.1)
    try:
        async with asyncio.timeout(LIMIT_S):
            first = await listener.quorums.get()
            if failing == "disconnected":  # a join that names somebody else ends the session
                link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="b")))
            elif failing != "quorum":
                link.say(pb.SessionRequest(join=pb.QuorumMember(replica_id="a")))
            return first, await listener.quorums.get()
    finally:
        await link.close()
        await lighthouse.stop()


@pytest.mark.parametrize("failing", ["registration", "connected", "quorum", "disconnected"])
def test_a_listener_that_fails_does_not_deafen_the_line(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        first, second = coordination_loop().run(quorums_in_two_sessions(failing))
    assert second >= first
    assert "RuntimeError: abort failed" in caplog.text


async def lease_without_a_lighthouse(lease_ms: int, *, is_silent: bool) -> str:
    """Return what happens to the lease first: it has ended, or was renewed."""
    config = LighthouseConfig(standing_lease_ms=lease_ms)
    lighthouse = await Lighthouse.start(config, parse_address("127.0.0.1:0"))
    listener = Listener("nothing")
    listener.link = link = LighthouseLink(lighthouse.address, listener, 0.1)
    try:
        assert await link.wait_connected(LIMIT_S)
        await lighthouse.stop()
        address = lighthouse.address
        with socket.create_server((address.host, address.port)) if is_silent else contextlib.nullcontext():
            async with asyncio.timeout(LIMIT_S):
                while (first := link._lease) is None and listener.leases.empty():
                    await asyncio.sleep(0.01)
                while link._lease is first and listener.leases.empty():
                    await asyncio.sleep(0.01)
                return "renewed" if listener.leases.empty() else listener.leases.get_nowait()
    finally:
        await link.close()
        await lighthouse.stop()


@pytest.mark.one_quorum_per_step
def test_a_lease_ends_while_the_lighthouse_is_silent() -> None:
    assert coordination_loop().run(lease_without_a_lighthouse(200, is_silent=True)) == "ended"


@pytest.mark.progress
def test_a_lease_does_not_end_while_no_lighthouse_listens() -> None:
    assert coordination_loop().run(lease_without_a_lighthouse(60_000, is_silent=False)) == "renewed"


async def rest_of_a_lease(lease_ms: int) -> float:
    """The seconds for which members go on after a lighthouse with this lease has ended their session."""
    lighthouse = await Lighthouse.start(
        LighthouseConfig(standing_lease_ms=lease_ms), parse_address("127.0.0.1:0")
    )
    listener = Listener("nothing")
    listener.link = link = LighthouseLink(lighthouse.address, listener, 0.1)
    try:
        assert await link.wait_connected(LIMIT_S)
        await lighthouse.stop()
        async with asyncio.timeout(LIMIT_S):
            while (lease := link._lease) is None:
                await asyncio.sleep(0.01)
        return lease.when() - asyncio.get_running_loop().time()
    finally:
        await link.close()


@pytest.mark.one_quorum_per_step
def test_the_time_in_which_a_trainer_notices_silence_is_a_part_of_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", "20000")
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "5000")
    assert coordination_loop().run(rest_of_a_lease(30_000)) <= 5.0


class BusyLighthouse(Lighthouse):
    """Begins to read a session a second after it was opened."""

    async def _serve_session(self, session: ReplicaSession) -> str:
        await asyncio.sleep(1.0)
        return await super()._serve_session(session)


async def told_of_a_leave() -> list[str]:
    """What a busy lighthouse writes down of a replica that leaves."""
    lighthouse = await BusyLighthouse.start(LighthouseConfig(), parse_address("127.0.0.1:0"))
    told: list[str] = []
    lighthouse.events.subscribe(
        lambda event: told.append(event.to_text()) if "member" in event.fields else None
    )
    listener = Listener("nothing")
    listener.link = link = LighthouseLink(lighthouse.address, listener, 0.1)
    try:
        assert await link.wait_connected(LIMIT_S)
        await link.leave("done", 0)
        async with asyncio.timeout(LIMIT_S):
            while len(told) < 2:
                await asyncio.sleep(0.01)
        return told
    finally:
        await link.close()
        await lighthouse.stop()


def test_a_leave_is_no_loss_where_the_lighthouse_is_busy() -> None:
    assert coordination_loop().run(told_of_a_leave()) == [
        "[lighthouse] a registered",
        "[lighthouse] a left: done",
    ]
