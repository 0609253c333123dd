"""The lighthouse daemon with real clients: sessions, unary calls, deaths, restarts, bad input."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from lighthouse import wire
from lighthouse.address import parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.events import Event, read_events
from lighthouse.net import make_channel
from lighthouse.server import Lighthouse
from lighthouse.wire import torchft_pb2 as pb
from tests.conftest import ROOT
from tests.integration.lighthouse_clients import (
    LIMIT_S,
    SessionClient,
    UnaryClient,
    ids_of,
    registered,
)
from tests.waiting import soon
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.testing.cluster import LighthouseProcess
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

MEGABYTE = "x" * 1_000_000


class Embedded:
    """A lighthouse inside this process, of which a test can ask what it waits for."""

    def __init__(self, bind: str = "127.0.0.1:0") -> None:
        self._loop = coordination_loop()
        starting = Lighthouse.start(LighthouseConfig(min_replicas=2), parse_address(bind))
        self._lighthouse = self._loop.run(starting, LIMIT_S)
        self.address = str(self._lighthouse.address)
        self.events: list[Event] = []
        self._lighthouse.events.subscribe(self.events.append)

    def stop(self) -> None:
        self._loop.run(self._lighthouse.stop(), LIMIT_S)

    def wait_until_described(self, line: str) -> None:
        async def describe() -> str:
            return self._lighthouse.describe()

        is_described = soon(lambda: line in self._loop.run(describe(), LIMIT_S).splitlines())
        assert is_described, f"not {line!r} but\n{self._loop.run(describe(), LIMIT_S)}"


@pytest.fixture
def embedded() -> Iterator[Embedded]:
    lighthouse = Embedded()
    yield lighthouse
    lighthouse.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[str]:
    """The address of a lighthouse that several tests share: min_replicas 2, nobody waits long."""
    with LighthouseProcess("--min_replicas=2", "--heartbeat_timeout_ms=60000") as daemon:
        yield daemon.address


@pytest.fixture
def fresh() -> Iterator[str]:
    """The address of a lighthouse of the test's own, with torchft's flags in both spellings."""
    with LighthouseProcess("--min-replicas", "2", "--join_timeout_ms", "60000") as daemon:
        yield daemon.address


# -- quorums


def test_sessions_get_the_job_config_and_the_quorum(fresh: str) -> None:
    with SessionClient(fresh, "a") as a, SessionClient(fresh, "b") as b:
        assert (a.registered().min_replicas, b.registered().join_timeout_ms) == (2, 60_000)
        fields = {
            "address": "http://a:1",
            "store_address": "a:2",
            "step": 7,
            "world_size": 4,
            "data": '{"k":1}',
            "commit_quorum_id": 3,
        }
        a.join(**fields)
        b.join()
        quorum = a.quorum()
        assert b.quorum() == quorum
        assert quorum.participants[0] == pb.QuorumMember(replica_id="a", **fields)  # type: ignore[arg-type]
        assert quorum.created.seconds > 1_700_000_000


def test_a_cancelled_unary_call_has_not_joined(embedded: Embedded) -> None:
    with registered(embedded.address, "a", "b") as (a, b), UnaryClient(embedded.address) as client:
        call = client.join("u", step=1)
        embedded.wait_until_described("joined: u")
        assert call.cancel()
        embedded.wait_until_described("joined: nobody")
        a.join()
        b.join()
        embedded.wait_until_described("awaited: u")
        again = client.join("u", step=2)
        assert [(m.replica_id, m.step) for m in a.quorum().participants] == [("a", 0), ("b", 0), ("u", 2)]
        assert again.result().quorum == b.quorum()


# -- deaths


def test_a_silent_unary_member_is_lost_after_heartbeat_timeout() -> None:
    with (
        LighthouseProcess("--min_replicas=2", "--heartbeat_timeout_ms=300") as daemon,
        registered(daemon.address, "a") as (a,),
        UnaryClient(daemon.address) as client,
    ):
        call = client.join("u")
        a.join()
        assert ids_of(call.result().quorum) == ids_of(a.quorum()) == ["a", "u"]
        lost = a.member_lost()
        assert (lost.replica_id, lost.reason) == ("u", "no heartbeat within heartbeat_timeout")


def test_a_reader_that_does_not_read_is_lost_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "20000")  # a PING's answer waits behind megabytes
    flags = "--min_replicas=1", "--session_queue_max=4", "--replicas_max=8", "--keepalive_timeout_ms=20000"
    with (
        LighthouseProcess(*flags) as daemon,
        registered(daemon.address, "a") as (a,),
        SessionClient(daemon.address, "slow", reads=False) as slow,
    ):
        answers: list[pb.Quorum | pb.MemberLost] = []
        while not answers or isinstance(answers[-1], pb.Quorum):
            slow.join()
            a.join(data=MEGABYTE)
            answers.append(a.quorum_or_loss())
        assert len(answers) > 4
        assert isinstance(answers[-1], pb.MemberLost)
        assert answers[-1].reason == "the session's messages are not being read"
        assert ids_of(a.quorum()) == ["a"]
        slow.start_reading()
        assert slow.end()[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


# -- restarts


def test_a_quorum_forms_beside_silent_members_once_their_processes_are_gone() -> None:
    with LighthouseProcess() as daemon, socket.create_server(("127.0.0.1", 0)) as process:
        address, url = daemon.address, "http://{}:{}".format(*process.getsockname())
        with SessionClient(address, "a", serves_at=url) as a, SessionClient(address, "b", serves_at=url) as b:
            a.registered()
            b.registered()
            a.join(step=1, may_stand=True)
            b.join(step=1, may_stand=True)
            assert a.quorum().stands
        with registered(address, "c") as (c,):
            c.join()
            process.accept()[0].close()  # the lighthouse looks for them, and finds that somebody listens
            assert not c.has_message()
            process.close()
            assert ids_of(c.quorum()) == ["c"]


def test_a_silent_member_of_an_earlier_quorum_is_gone_once_its_process_is() -> None:
    never = "--standing_lease_ms=3600000"
    with LighthouseProcess(never) as daemon, socket.create_server(("127.0.0.1", 0)) as process:
        address, url = daemon.address, "http://{}:{}".format(*process.getsockname())
        with SessionClient(address, "b", serves_at=url) as b:
            b.registered()
            with SessionClient(address, "a", serves_at=url) as a:
                a.registered()
                a.join(step=1)
                b.join(step=1)
                assert ids_of(a.quorum()) == ids_of(b.quorum()) == ["a", "b"]
            assert b.member_lost().replica_id == "a"
            b.join(step=2)
            assert ids_of(b.quorum()) == ["b"]
        process.close()
        with registered(address, "c") as (c,):
            c.join()
            assert ids_of(c.quorum()) == ["c"]


def test_silent_members_are_gone_once_their_successors_have_their_addresses() -> None:
    never = "--standing_lease_ms=3600000"
    with LighthouseProcess(never) as daemon, socket.create_server(("127.0.0.1", 0)) as process:
        address, url = daemon.address, "http://{}:{}".format(*process.getsockname())

        def come(stack: ExitStack, *names: str, **said: object) -> list[SessionClient]:
            clients = [stack.enter_context(SessionClient(address, name, serves_at=url)) for name in names]
            for client in clients:
                client.registered()
            for client in clients:
                client.join(**said)
            return clients

        with ExitStack() as lost:
            assert come(lost, "a:1", "b:1", step=1, may_stand=True)[0].quorum().stands
        with ExitStack() as new:
            (c,) = come(new, "c:1")
            process.accept()[0].close()  # the lighthouse looks for them, and finds that somebody listens
            assert not c.has_message(), "the address of another replica may be wrong"
            come(new, "a:2", "b:2")
            assert "c:1" in ids_of(c.quorum())


# -- bad input


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        ({}, "the first message of a session must be a register, not empty"),
        ({"join": pb.QuorumMember(replica_id="a")}, "must be a register, not join"),
        ({"leave": pb.Leave()}, "must be a register, not leave"),
        ({"register": pb.Register()}, "replica_id is empty"),
        ({"register": pb.Register(replica_id="x" * 5000)}, "replica_id is longer than 4096 characters"),
        (
            {"register": pb.Register(replica_id="a", address="ftp://h:21")},
            "address 'ftp://h:21' is not host:port",
        ),
        ({"register": pb.Register(replica_id="a", last_quorum_id=2**63 - 1)}, "last_quorum_id"),
        ({"register": pb.Register(replica_id="a", last_quorum_round=2**63 - 1)}, "last_quorum_round"),
    ],
)
def test_a_session_with_a_bad_first_message_is_refused(
    two: str, first: dict[str, object], complaint: str
) -> None:
    with UnaryClient(two) as client, pytest.raises(grpc.RpcError) as refused:
        client.session(pb.SessionRequest(**first))  # type: ignore[arg-type]
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in (refused.value.details() or "")


def test_replicas_serve_where_they_call_from_or_at_the_hosts_of_the_list() -> None:
    elsewhere = "http://169.254.169.254:80"
    with LighthouseProcess("--hosts", "192.168.0.0/16") as daemon:
        with SessionClient(daemon.address, "a", serves_at="http://127.0.0.1:29511") as here:
            here.registered()
        with SessionClient(daemon.address, "b", serves_at="http://192.168.3.4:29511") as listed:
            listed.registered()
        members = (
            pb.QuorumMember(replica_id="c", address=elsewhere),
            pb.QuorumMember(replica_id="c", store_address=elsewhere),
        )
        for member in members:
            with pytest.raises(grpc.RpcError, match="neither at the caller's 127"):
                call(daemon.address, member.SerializeToString())


def test_a_session_is_ended_even_while_its_first_answer_is_being_written(two: str) -> None:
    register = pb.SessionRequest(register=pb.Register(replica_id="hasty"))
    wrong = pb.SessionRequest(join=pb.QuorumMember(replica_id="somebody else"))
    with UnaryClient(two) as client:
        for _ in range(100):
            with pytest.raises(grpc.RpcError) as refused:
                client.session(register, wrong)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_unary_calls_without_a_replica_id_are_refused(two: str) -> None:
    with UnaryClient(two) as client, pytest.raises(grpc.RpcError) as refused:
        client.heartbeat("")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with UnaryClient(two) as client, pytest.raises(grpc.RpcError, match="replica_id is empty"):
        client.join("").result()


def test_more_replicas_than_the_limit_are_refused() -> None:
    with (
        LighthouseProcess("--replicas_max=2") as daemon,
        registered(daemon.address, "a", "b"),
        UnaryClient(daemon.address) as client,
    ):
        client.heartbeat("a")
        with pytest.raises(grpc.RpcError, match="--replicas_max"):
            client.heartbeat("c")
        with SessionClient(daemon.address, "c") as c:
            assert c.end()[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


# -- the daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_sessions_calls_and_daemon(number: signal.Signals) -> None:
    with LighthouseProcess("--min_replicas=3") as daemon:
        assert daemon.output == f"lighthouse listening on http://{daemon.address}\n"
        with registered(daemon.address, "a") as (a,), UnaryClient(daemon.address) as client:
            call = client.join("u")
            client.heartbeat("u")
            assert daemon.stop(number) == 0
            assert a.end() == (grpc.StatusCode.UNAVAILABLE, "the lighthouse shuts down")
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                call.result()


def test_a_port_in_use_is_one_line_and_status_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "lighthouse", "--bind", bind]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lighthouse: cannot listen on {bind}: Address already in use")
    assert done.stderr.count("\n") == 1


def test_a_lighthouse_serves_where_its_output_cannot_be_written(processes: Processes) -> None:
    command = f"exec {sys.executable} -m lighthouse --bind 127.0.0.1:0 --min_replicas 1 > /dev/full"
    daemon = processes.start("sh", "-c", command)
    place = "No space left on device; lighthouse {} on http://(\\S+)"
    assert daemon.wait_for_output(place.format("page"), LIMIT_S)
    address = daemon.wait_for_output(place.format("listening"), LIMIT_S)[1]
    with registered(address, "a") as (a,):
        a.join()
        assert ids_of(a.quorum()) == ["a"]
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(LIMIT_S) == 0


def test_event_records_tell_the_story(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with LighthouseProcess("--min_replicas=1", event_file=path) as daemon:
        with registered(daemon.address, "a", "b") as (a, b):
            a.join()
            b.join()
            quorum_id = a.quorum().quorum_id
            b.quorum()
            b.send(leave=pb.Leave(reason="done"))
            a.join()
            a.quorum()
        assert daemon.stop() == 0
    records = [r for r in read_events(path) if r["kind"] != "loss"]
    assert [r["kind"] for r in records] == ["register", "register", "quorum", "leave", "quorum", "shutdown"]
    assert records[2] | {"time": 0} == {
        "kind": "quorum",
        "source": "lighthouse",
        "time": 0,
        "replica_id": "",
        "group_rank": 0,
        "step": -1,
        "quorum_id": quorum_id,
        "members": ["a", "b"],
        "joined": ["a", "b"],
        "left": [],
    }
    assert (records[3]["member"], records[3]["reason"]) == ("b", "done")
    assert records[4]["left"] == ["b"]


# -- embedded


def test_an_embedded_lighthouse_serves_and_stops(embedded: Embedded) -> None:
    with registered(embedded.address, "a") as (a,):
        embedded.wait_until_described("awaited: a")
        embedded.stop()
        assert a.end()[0] == grpc.StatusCode.UNAVAILABLE
    assert [event.kind for event in embedded.events] == ["register", "shutdown"]
    embedded.stop()  # once more does no harm


# Fields of a member that the lighthouse does not know: a newer peer's, for instance.


# Fields 500 to 503 of nobody: a number, a text, a message with a text in it, and 8 bytes.
UNKNOWN = (
    b"\xa0\x1f\x96\x01\xaa\x1f\x05later\xb2\x1f\x07\x0a\x05inner\xb9\x1f\x01\x02\x03\x04\x05\x06\x07\x08"
)
GROUP = b"\xa3\x1f\xa4\x1f"  # field 500, empty


def with_fields(fields: bytes, **known: Any) -> bytes:
    return pb.QuorumMember(**known).SerializeToString() + fields


def call(address: str, member: bytes) -> bytes:
    """torchft's Quorum, in bytes."""
    request = pb.LighthouseQuorumRequest(requester=pb.QuorumMember.FromString(member)).SerializeToString()
    with make_channel(parse_address(address)) as channel:
        answer: bytes = channel.unary_unary(wire.QUORUM, None, None)(request, timeout=LIMIT_S)
    return answer


def test_they_reach_the_other_members_as_they_came(fresh: str) -> None:
    handles = ["h0", "", "h2"]
    joined = with_fields(UNKNOWN, replica_id="newer", step=5, world_size=3, reconfigure_handles=handles)
    with SessionClient(fresh, "a") as session:
        session.registered()
        session.join(step=5)
        answered = pb.LighthouseQuorumResponse.FromString(call(fresh, joined)).quorum
        told = session.quorum()
    for quorum in (answered, told):
        ours, newer = quorum.participants
        assert (ours.replica_id, newer.replica_id) == ("a", "newer")
        assert newer.SerializeToString() == joined


def test_they_come_back_from_a_session_too(fresh: str) -> None:
    with SessionClient(fresh, "a") as older, SessionClient(fresh, "b") as newer:
        joined = with_fields(UNKNOWN, replica_id="b")
        newer.send(join=pb.QuorumMember.FromString(joined))
        older.join()
        older.registered()
        assert older.quorum().participants[1].SerializeToString() == joined


def test_a_message_of_an_unknown_kind_disturbs_no_session(fresh: str) -> None:
    with SessionClient(fresh, "a") as other, SessionClient(fresh, "b") as newer:
        newer.registered()
        newer.say(pb.SessionRequest.FromString(UNKNOWN))
        newer.join()
        other.join()
        assert len(newer.quorum().participants) == 2


def test_they_count_for_the_size_of_a_member(fresh: str) -> None:
    text = 40_000 * b"x"
    member = with_fields(b"\xaa\x1f\xc0\xb8\x02" + text, replica_id="large")
    with pytest.raises(grpc.RpcError, match="is too large") as refused:
        call(fresh, member)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_group_among_them_is_refused(fresh: str) -> None:
    with pytest.raises(grpc.RpcError, match="protobuf group") as refused:
        call(fresh, with_fields(GROUP, replica_id="nested"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
