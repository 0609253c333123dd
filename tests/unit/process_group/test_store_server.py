"""Our server of a store: what it does for torch's client and ours, whom it admits, and what it holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from lighthouse.address import LOOPBACK, Address
from lighthouse.tls import TLS_ENV
from tests.certificates import certify, stranger_context
from tests.forking import is_so_in_a_fork
from tests.waiting import wait_for
from torchft_like.core.quorum_secret import QuorumSecret, meeting_keys
from torchft_like.core.store import QUORUMS_MAX, Client, KeyValueStore, Query, Request, StoreRequestError
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError
from torchft_like.process_group import ProcessGroupGloo, create_store_client, store_server
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.store import (
    AbortableStore,
    GroupMembers,
    SharedStore,
    StoreAddress,
    meeting_store,
    parse_store_address,
)
from torchft_like.process_group.store_server import UNKNOWN_MAX, StoreServer
from torchft_like.runtime.event_loop import coordination_loop

from .conftest import LIMIT_S, Party, allreduced

LIMIT = timedelta(seconds=LIMIT_S)
SECRETS = [QuorumSecret(bytes([number]) * 32) for number in range(QUORUMS_MAX + 1)]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer(Address(LOOPBACK, 0))) as server:
        yield server


@pytest.fixture
def of_quorums() -> Iterator[StoreServer]:
    with closing(StoreServer(Address(LOOPBACK, 0), awaits_quorums=True)) as server:
        yield server


def announce(server: StoreServer, quorum_id: int, secret: QuorumSecret) -> None:
    async def on_the_loop() -> None:
        server.announce(quorum_id, secret)

    coordination_loop().run(on_the_loop())


def place(server: StoreServer, quorum_id: int, secret: QuorumSecret) -> str:
    return f"{server.address}/torchft/{quorum_id}/0/secret={secret.meeting_key}"


def connected(address: str) -> AbortableStore:
    store = AbortableStore(parse_store_address(address), LIMIT)
    try:
        store.connect()
    except BaseException:
        store.close()
        raise
    return store


def test_torchs_client_has_what_it_asks_of_torchs_server(server: StoreServer) -> None:
    client: Any = create_store_client(f"{server.address}/a", LIMIT)
    other: Any = create_store_client(f"{server.address}/a", LIMIT)
    client.set("a", "1")
    client.multi_set(["b", "c"], ["2", b"3"])
    assert other.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
    client.append("a", "0")
    assert (other.get("a"), other.add("n", 5), client.add("n", -7)) == (b"10", 5, -2)
    assert (client.get("n"), client.add("a", 1)) == (b"-2", 11)
    assert client.compare_set("new", "x", "y") == b"x"
    assert client.compare_set("new", "", "y") == b"y"
    assert other.compare_set("new", "z", "w") == b"y"
    assert (other.check(["a", "b"]), other.check(["a", "none"])) == (True, False)
    with pytest.raises(DistError, match="none"):
        client.wait(["a", "none"], timedelta(milliseconds=50))
    other.set("none", b"x" * 1_000_000)
    client.wait(["a", "none"], LIMIT)
    assert len(client.get("none")) == 1_000_000
    assert (client.delete_key("none"), client.delete_key("none")) == (True, False)


def test_nobody_can_list_or_count_the_keys(server: StoreServer) -> None:
    client = create_store_client(f"{server.address}/a", LIMIT)
    client.set("a", "1")
    for ask in (client.num_keys, client.list_keys):
        with pytest.raises((DistError, RuntimeError)):
            ask()
        client = create_store_client(f"{server.address}/a", LIMIT)


def test_a_member_that_comes_before_its_quorum_is_known_waits(party: Party, of_quorums: StoreServer) -> None:
    announce(of_quorums, 6, SECRETS[0])
    with closing(connected(place(of_quorums, 7, SECRETS[1]))) as early:
        added = party.aside(early.add, "configured/0", 1)
        with closing(connected(place(of_quorums, 6, SECRETS[0]))) as present:
            present.set("a", "1")  # a round trip, in which the early one is heard, too
        assert not added.done()
        announce(of_quorums, 7, SECRETS[1])
        assert added.result(LIMIT_S) == 1
    shared = parse_store_address(place(of_quorums, 7, SECRETS[1])).shared
    create_store_client(str(shared), LIMIT).set("of", "users")


def test_a_member_that_had_to_make_room_comes_again(
    party: Party, of_quorums: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = GroupMembers(parse_store_address(place(of_quorums, 7, SECRETS[1])), 0, 1, LIMIT)
    came: Queue[AbortableStore] = Queue()
    connect = AbortableStore.connect

    def connect_and_tell(store: AbortableStore, **how: bool) -> None:
        connect(store, **how)
        came.put(store)

    monkeypatch.setattr(AbortableStore, "connect", connect_and_tell)

    def enter() -> str:
        with meeting_store(members, AbortSignal()) as store:
            store.set("a", "1")
            return "entered"

    async def make_room() -> None:
        for connection in list(of_quorums._serving._unknown):
            connection.end()

    entered = party.aside(enter)
    first = came.get(timeout=LIMIT_S)
    coordination_loop().run(make_room())
    assert came.get(timeout=LIMIT_S) is first
    announce(of_quorums, 7, SECRETS[1])
    assert entered.result(LIMIT_S) == "entered"
    with pytest.raises(ProcessGroupError, match="has already used"):
        enter()


def test_no_late_answer_is_taken_for_that_to_another_question(server: StoreServer) -> None:
    client = SharedStore(parse_store_address(f"{server.address}/a"), LIMIT)
    client.connect()
    over = threading.Event()
    coordination_loop().loop.call_soon_threadsafe(over.wait, LIMIT_S)
    client.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistError, match="in time"):
        client.add("n", 5)
    client.set_timeout(LIMIT)
    over.set()
    assert client.add("other", 100) == 100


def test_no_fork_holds_a_connection_to_a_store() -> None:
    theirs = TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False
    )  # whose other clients are the script's
    with closing(connected(f"127.0.0.1:{theirs.port}/a")) as client:
        assert client._socket is not None
        descriptor = client._socket.fileno()
        assert is_so_in_a_fork(lambda: socket.socket(fileno=descriptor).family != socket.AF_INET)
        client.set("k", "v")
        assert client.get("k") == b"v"


@pytest.mark.parametrize("shows", ["", "/secret=" + "0" * 32, f"/secret={SECRETS[0].meeting_key}"])
def test_who_does_not_know_the_secret_is_shut_out(
    of_quorums: StoreServer, monkeypatch: pytest.MonkeyPatch, shows: str
) -> None:
    announce(of_quorums, 6, SECRETS[0])
    announce(of_quorums, 7, SECRETS[1])

    def enter(address: str) -> int:
        with closing(connected(address)) as client:
            return client.add("configured/0", 1)

    with monkeypatch.context() as hasty:
        hasty.setattr(store_server, "KEY_S", 0.1)
        with pytest.raises(ProcessGroupError, match="lost the store"):  # perhaps as it connects
            enter(f"{of_quorums.address}/torchft/7/0{shows}")
    assert enter(place(of_quorums, 7, SECRETS[1])) == 1


def test_without_secrets_prefixes_are_admitted_as_they_come(of_quorums: StoreServer) -> None:
    announce(of_quorums, 7, QuorumSecret())
    client = create_store_client(f"{of_quorums.address}/torchft/7/0", LIMIT)
    client.set("a", "1")
    assert client.get("a") == b"1"


def test_what_is_left_of_old_quorums_is_deleted(of_quorums: StoreServer) -> None:
    announce(of_quorums, 0, SECRETS[0])
    with closing(connected(place(of_quorums, 0, SECRETS[0]))) as member:
        for number in range(1, QUORUMS_MAX):
            announce(of_quorums, number, SECRETS[number])
        assert member.add("n", 1) == 1
        announce(of_quorums, QUORUMS_MAX, SECRETS[QUORUMS_MAX])
        with pytest.raises(ProcessGroupError, match="lost the store"):
            member.add("n", 1)


def test_silent_connections_keep_nobody_out(of_quorums: StoreServer) -> None:
    announce(of_quorums, 7, SECRETS[1])
    with ExitStack() as stack:
        for _ in range(UNKNOWN_MAX + 20):
            stack.enter_context(socket.create_connection((LOOPBACK, of_quorums.address.server.port)))
        member = stack.enter_context(closing(connected(place(of_quorums, 7, SECRETS[1]))))
        assert member.add("n", 1) == 1


def test_what_is_too_long_or_no_request_ends_its_connection_alone(server: StoreServer) -> None:
    with closing(connected(f"{server.address}/a/b")) as member:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x01" + b"\xff" * 8, b"\x06" + b"\xff" * 8, b"\x07"):
            with socket.create_connection((LOOPBACK, server.address.server.port)) as stranger:
                stranger.settimeout(LIMIT_S)
                stranger.sendall(nonsense)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert member.add("n", 1) == 1


def test_who_does_not_read_costs_no_copy_of_what_it_asks_for(server: StoreServer) -> None:
    address = f"{server.address}/a"
    with closing(connected(address)) as member, closing(connected(address)) as slow:
        member.set("big", b"x" * 16_000_000)
        assert member.check(["big"])
        for _ in range(3):
            slow._ask(Query.GET, slow._key("big"))
        served = [one._transport for one in server._serving._connections.values() if one._transport]
        wait_for(lambda: any(one.get_write_buffer_size() for one in served))
        assert max(one.get_write_buffer_size() for one in served) <= 4 * store_server.WRITE_BYTES
        assert len(slow._receive_bytes(slow._deadline())) == 16_000_000


def test_old_rooms_make_room_and_a_full_one_is_refused() -> None:
    store = KeyValueStore(awaits_quorums=False, bytes_max=2000)
    first, second = Client(), Client()

    def put(client: Client, key: bytes, size: int) -> None:
        assert store.admits(client, key)
        store.perform(client, Request(Query.SET, (key,), (b"x" * size,)))

    put(first, b"/one/1/a", 1000)
    put(second, b"/two/2/a", 1000)
    assert [(one.client, one.parts) for one in store.take_answers()] == [(first, None)]
    with pytest.raises(StoreRequestError, match="full"):
        put(second, b"/two/2/b", 1000)
    store.perform(second, Request(Query.DELETE_KEY, (b"/two/2/a",)))
    put(second, b"/two/2/b", 1000)


def test_a_room_that_its_own_request_drops_costs_nothing() -> None:
    store = KeyValueStore(awaits_quorums=False, bytes_max=2000)
    client = Client()
    keys = b"/new/2/a", b"/old/1/a"
    assert store.admits(client, keys[1])
    store.perform(client, Request(Query.SET, (keys[1],), (b"",)))
    assert all(store.admits(client, key) for key in keys)
    store.perform(client, Request(Query.MULTI_SET, keys, (b"x" * 1500, b"x" * 100)))
    for room in ("new/2", "old/1"):
        store.drop_room(room)
    assert store.admits(client, keys[0])
    store.perform(client, Request(Query.SET, (keys[0],), (b"x" * 1700,)))


def test_a_wait_costs_its_client_room_until_it_ends() -> None:
    store = KeyValueStore(awaits_quorums=False, bytes_max=2000)
    waiting, other = Client(), Client()
    keys = tuple(b"/a/b/%d" % number for number in range(20))
    for client in (waiting, other):
        assert store.admits(client, keys[0])
    store.perform(waiting, Request(Query.WAIT, keys))
    with pytest.raises(StoreRequestError, match="full"):
        store.perform(other, Request(Query.WAIT, keys))
    store.forget(waiting)
    store.perform(other, Request(Query.WAIT, keys))
    assert not store.take_answers()


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = certify(tmp_path / "job")
    monkeypatch.setenv(TLS_ENV, str(folder))
    return folder


@pytest.fixture
def encrypted(certificate: Path) -> Iterator[StoreAddress]:
    """The address of a server with the job's certificate."""
    with closing(StoreServer(Address(LOOPBACK, 0))) as server:
        yield server.address


def test_with_a_certificate_members_meet_and_share_a_store_over_tls(
    party: Party, encrypted: StoreAddress
) -> None:
    address = f"{encrypted}/a"
    assert address.startswith("tls://")
    groups = [party.own(ProcessGroupGloo(LIMIT)) for _ in range(2)]
    party.together(groups, lambda rank, group: group.configure(f"{address}/b", rank, 2))
    assert party.together(groups, lambda rank, group: allreduced(group, rank + 1)) == [3.0, 3.0]
    shared: list[Any] = [PrefixStore("users", group.get_group_store()) for group in groups]
    with pytest.raises(DistError, match="none"):
        shared[0].wait(["none"], timedelta(milliseconds=50))
    shared[0].set("a", b"x" * 1_000_000)
    assert (len(shared[1].get("a")), shared[1].add("n", 2), shared[0].check(["none"])) == (
        1_000_000,
        2,
        False,
    )
    assert (shared[0].delete_key("a"), shared[1].delete_key("a")) == (True, False)


def test_an_abort_ends_a_wait_over_tls(party: Party, encrypted: StoreAddress) -> None:
    with closing(connected(f"{encrypted}/a")) as client:
        client.set("a", "1")
        waiting = party.aside(client.get, "none")
        with closing(connected(f"{encrypted}/a")) as other:
            assert other.get("a") == b"1"
        client.abort()
        with pytest.raises(ProcessGroupAbortedError):
            waiting.result(LIMIT_S)


def test_who_has_no_certificate_of_the_job_is_shut_out(
    tmp_path: Path, encrypted: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connected(f"{encrypted}/a")) as member:
        with pytest.raises(ProcessGroupError, match="lost the store"):
            connected(f"{encrypted.server}/a")
        for shows in (None, certify(tmp_path / "other")):
            with (
                socket.create_connection((LOOPBACK, encrypted.server.port), LIMIT_S) as plain,
                suppress(OSError),
                stranger_context(shows).wrap_socket(plain) as stranger,
            ):
                assert stranger.recv(1) == b""
        monkeypatch.delenv(TLS_ENV)
        with pytest.raises(ProcessGroupError, match="has no certificate"):
            connected(f"{encrypted}/a")
        assert member.add("n", 1) == 1


def test_who_connects_as_a_store_ends_does_not_wait(server: StoreServer) -> None:
    """torch's client waits for an answer without a limit."""
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(LIMIT_S)

    with closing(connected(f"{server.address}/a")) as earlier:
        assert earlier.add("n", 1) == 1
    coordination_loop().loop.call_soon_threadsafe(hold)
    assert is_held.wait(LIMIT_S)
    place = LOOPBACK, server.address.server.port
    with socket.create_connection(place, LIMIT_S) as client, suppress(ConnectionResetError):
        server.close()
        goes_on.set()
        assert client.recv(1) == b""


def test_keys_of_a_quorum_show_one_of_two_keys() -> None:
    assert len(set(meeting_keys(SECRETS[0]))) == 2
    assert meeting_keys(QuorumSecret()) == ()
