"""Store addresses, torch's client, and the client whose waits can be ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError

from lighthouse.address import Address
from torchft_like.errors import AddressError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.process_group import ProcessGroupGloo, create_store_client
from torchft_like.process_group.store import AbortableStore, ExchangeStore, StoreAddress, parse_store_address
from torchft_like.process_group.store_server import StoreServer
from torchft_like.runtime.connecting import connect_tcp

from .conftest import LIMIT_S, Party

pytestmark = pytest.mark.usefixtures("no_operator")

LIMIT = timedelta(seconds=30)


@pytest.fixture
def client(party: Party) -> Iterator[AbortableStore]:
    with closing(AbortableStore(parse_store_address(party.prefix()), LIMIT)) as client:
        client.connect()
        yield client


def test_an_address_is_read_into_host_port_and_prefix() -> None:
    assert parse_store_address("host:29500/a/b") == StoreAddress(Address("host", 29500), "a/b")
    assert parse_store_address("[::1]:1/x") == StoreAddress(Address("::1", 1), "x")
    assert parse_store_address("http://host:1/x").server == Address("host", 1)
    assert parse_store_address("host:1").prefix == ""
    assert str(parse_store_address("[::1]:1/x")) == "[::1]:1/x"


@pytest.mark.parametrize(
    "text", ["", "host", "host/prefix", "host:port/x", ":1/x", "::1:1/x", "host:99999/x"]
)
def test_a_malformed_address_is_a_value_error_that_shows_it(text: str) -> None:
    with pytest.raises(AddressError, match=r"host:port/prefix") as caught:
        create_store_client(text)
    assert isinstance(caught.value, ValueError)
    assert repr(text) in str(caught.value)


def test_torchs_client_and_ours_see_the_same_keys(party: Party, client: AbortableStore) -> None:
    theirs = create_store_client(f"127.0.0.1:{party.store.port}/{client._prefix}", LIMIT)
    assert isinstance(theirs, PrefixStore)
    theirs.set("a", "1")
    client.set("b", b"2")
    assert client.get("a") == b"1"
    assert theirs.get("b") == b"2"
    assert client.check(["a", "b"])
    assert not client.check(["a", "c"])
    assert client.add("n", 2) == 2
    assert theirs.add("n", 3) == 5
    assert client.compare_set("a", "1", "3") == b"3"
    assert client.compare_set("a", "1", "4") == b"3"
    assert client.delete_key("a")
    assert not client.delete_key("a")
    client.set("large", b"x" * 1_000_000)
    assert len(theirs.get("large")) == 1_000_000


def test_a_store_with_an_ipv6_address_is_reached() -> None:
    try:
        server = TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    except RuntimeError:
        pytest.skip("no IPv6 on this host")
    with closing(AbortableStore(parse_store_address(f"[::1]:{server.port}/six"), LIMIT)) as client:
        client.connect()
        client.set("k", "v")
    assert create_store_client(f"[::1]:{server.port}/six", LIMIT).get("k") == b"v"


def test_an_abort_ends_the_wait_for_a_host_that_does_not_answer(party: Party) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = StoreAddress(Address(*full.getsockname()), "x")
        with socket.create_connection(full.getsockname()), closing(AbortableStore(address, LIMIT)) as client:
            started = threading.Event()

            def connect() -> None:
                started.set()
                client.connect()

            connecting = party.aside(connect)
            started.wait(LIMIT.total_seconds())
            client.abort()
            with pytest.raises(ProcessGroupAbortedError):
                connecting.result(LIMIT.total_seconds())


def test_a_store_that_refuses_or_goes_away_is_named(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = StoreAddress(Address(*server.getsockname()), "x")
        with closing(AbortableStore(address, LIMIT)) as client:
            connecting = party.aside(client.connect)
            server.accept()[0].close()
            with pytest.raises(ProcessGroupError, match=str(address.server)):
                connecting.result(LIMIT.total_seconds())
    with (
        closing(AbortableStore(address, timedelta(milliseconds=100))) as client,
        pytest.raises(ProcessGroupError, match="refuses"),
    ):
        client.connect()


def test_a_store_is_reached_whose_port_another_process_had_for_a_moment(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as another:
        address = Address("127.0.0.1", another.getsockname()[1])
        connecting = party.aside(create_store_client, f"{address}/x", LIMIT_S)
        another.accept()[0].close()
    server = StoreServer(address)
    client = connecting.result(LIMIT_S)
    client.set("key", "value")
    assert client.get("key") == b"value"
    server.close()


def test_a_store_is_looked_for_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.process_group.store.HANGS_UP_S", 1e6)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        port = ended.getsockname()[1]
    with pytest.raises(DistNetworkError, match="refuses"):
        create_store_client(f"127.0.0.1:{port}/x", 0.2)


def test_of_several_addresses_one_that_listens_wins(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` does, where the store listens on one address family only."""
    real, asked = socket.getaddrinfo, []

    def two_addresses(host: str, port: int, **kwargs: Any) -> list[Any]:
        asked.append(host)
        return [*real("::1", port, **kwargs), *real("127.0.0.1", port, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with closing(AbortableStore(parse_store_address(f"some-name:{store.port}/x"), LIMIT)) as client:
        client.connect()
        client.set("key", "value")
        assert client.get("key") == b"value"
    assert asked == ["some-name"]


# What the members of a group say to each other while a backend is made.


WORLD = 3


@pytest.fixture
def stores(party: Party) -> Iterator[list[AbortableStore]]:
    address = parse_store_address(party.prefix())
    stores = [AbortableStore(address, timedelta(seconds=LIMIT_S)) for _ in range(WORLD)]
    for store in stores:
        store.connect()
    yield stores
    for store in stores:
        store.close()


def test_members_of_large_groups_ask_no_more(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = AbortableStore._ask
    monkeypatch.setattr(AbortableStore, "_ask", lambda *args: asked.append(1) or ask(*args))  # type: ignore[func-returns-value]
    counts = []
    for world_size in (2, 5):
        asked.clear()
        party.meet(world_size, lambda: ProcessGroupGloo(30, check_collectives=False))
        counts.append(len(asked) / world_size)
    assert counts[0] == counts[1] > 0


def test_what_is_said_later_is_heard_too(party: Party, stores: list[AbortableStore]) -> None:
    def speak_late(rank: int, store: AbortableStore) -> bytes:
        exchange = ExchangeStore(store, rank, WORLD)
        assert not exchange.check([f"late/{rank}"])
        exchange.set(f"late/{rank}", f"by {rank}")
        exchange.wait([f"late/{peer}" for peer in range(WORLD)])
        return exchange.get(f"late/{(rank + 1) % WORLD}")

    members = [party.aside(speak_late, rank, store) for rank, store in enumerate(stores)]
    assert [member.result(LIMIT_S) for member in members] == [b"by 1", b"by 2", b"by 0"]


@pytest.mark.parametrize(
    "nonsense", [b"\x01", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00a", b"\x03\x00\x00\x00a"]
)
def test_what_no_member_of_ours_said_is_an_error(stores: list[AbortableStore], nonsense: bytes) -> None:
    stores[1].set("member/1", nonsense)
    stores[2].set("member/2", b"")
    with pytest.raises(ProcessGroupError, match="something else"):
        ExchangeStore(stores[0], 0, WORLD).wait(["address/1"])


def test_a_connection_to_itself_is_to_no_server() -> None:
    """A client that tries again and again is given the server's port at some time, and keeps it from it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = free.getsockname()
    tried: list[socket.socket] = []

    def take_port(connection: socket.socket) -> None:
        tried.append(connection)
        connection.bind(place)

    with pytest.raises(ConnectionRefusedError):
        connect_tcp(Address(*place), LIMIT_S, take_port)
    assert [connection.fileno() for connection in tried] == [-1]
