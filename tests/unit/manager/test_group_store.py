"""The stores of a replica group: who serves which, and which ones a job goes on without."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lighthouse.address import Address, parse_address
from tests.conftest import WAIT_LIMIT_S
from tests.managers import lighthouse_here
from tests.ports import free_ports
from tests.stores import serve_store
from torchft_like.coordination import ManagerServer
from torchft_like.errors import BindError, ConfigError, ConnectError
from torchft_like.manager import group_store
from torchft_like.manager.config import GroupPlace, ManagerArguments, resolve
from torchft_like.manager.group_store import (
    PLACES,
    connect_rank,
    find_start,
    open_group_store,
    publish_start,
)
from torchft_like.process_group.store import AbortableStore, StoreAddress

RANK_1 = GroupPlace(1, 2, None, store_is_agents=True, run="job", start="0")


def start_text(address: object, place: GroupPlace, rest: str) -> str:
    """What `publish_start` writes."""
    return f"{address} {place.group_world_size} {rest}"


def environment(port: int, is_agents: bool) -> dict[str, str]:
    return {
        "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(is_agents),
    }


def test_process_groups_meet_in_a_store_of_rank_0_and_not_in_torchruns() -> None:
    agents = serve_store()
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(agents.port, is_agents=True))
    first = open_group_store(config)
    second = open_group_store(replace(config, group_rank=1))
    first.shared.set("manager", "here")
    assert second.shared.get("manager") == b"here"
    assert second.meeting_place is None
    assert first.meeting_place is not None
    assert first.meeting_place.address.server.port != agents.port


def test_rank_0_serves_the_store_that_the_user_has_named_where_torchrun_does_not() -> None:
    free = serve_store()
    port = free.port
    del free
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(port, is_agents=False))
    first = open_group_store(config)
    second = open_group_store(replace(config, group_rank=1))
    first.shared.set("manager", "here")
    assert second.shared.get("manager") == b"here"


def test_a_store_that_answers_too_late_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = group_store.is_listening
    served = serve_store()
    late = iter([False])  # as on a busy machine
    monkeypatch.setattr(group_store, "is_listening", lambda place: next(late, None) is None and asked(place))
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(served.port, is_agents=False))
    open_group_store(config).shared.set("manager", "here")
    assert served.get("manager") == b"here"


def test_rank_0_serves_its_store_once_no_connection_has_the_port_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system gives the port to any process that connects somewhere, where it is one of those for that."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))  # no connection of before lingers at such a port
        connection.connect(other.getsockname())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends at once
        port = connection.getsockname()[1]
        given = ManagerArguments(rank=0, world_size=2, connect_timeout=0.3)
        config = resolve(given, environment(port, is_agents=False))
        with pytest.raises(BindError, match=r"Address already in use.*; choose another MASTER_PORT"):
            open_group_store(config)
        monkeypatch.setattr("time.sleep", lambda _: connection.close())
        first = open_group_store(replace(config, connect_timeout_s=WAIT_LIMIT_S))
        first.shared.set("manager", "here")
        assert open_group_store(replace(config, group_rank=1)).shared.get("manager") == b"here"


def test_a_group_of_one_rank_needs_no_store_of_the_users() -> None:
    config = resolve(ManagerArguments(), {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1"})
    store = open_group_store(config)
    assert isinstance(store.shared, HashStore)
    assert store.meeting_place is not None


@pytest.fixture
def store() -> Iterator[AbortableStore]:
    served = serve_store()
    limit = timedelta(seconds=WAIT_LIMIT_S)
    with closing(AbortableStore(StoreAddress(Address("127.0.0.1", served.port), ""), limit)) as store:
        store.connect()
        yield store


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """The addresses at which two processes serve, of rank 0 before and after a restart."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        yield [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]


def test_a_rank_finds_its_rank_0_though_their_agents_count_other_restarts(
    store: AbortableStore, servers: list[str]
) -> None:
    """An agent of torchrun that starts its ranks again because of another's does not count that."""
    store.set("start", start_text(servers[0], RANK_1, "key"))
    for rank, start in ((1, "0"), (2, "3")):
        place = replace(RANK_1, group_rank=rank, start=start)
        assert find_start(store, "start", place) == (parse_address(servers[0]), "key")


def found_later(store: AbortableStore, place: GroupPlace, said: str) -> str:
    """Check that a rank passes over what the store has of rank 0; return what it finds then."""
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(TimeoutError, match="rank 0 of an earlier start was at"):
        find_start(store, "start", place)
    store.set_timeout(timedelta(seconds=WAIT_LIMIT_S))
    with ThreadPoolExecutor(1) as threads:
        finding = threads.submit(find_start, store, "start", place)
        store.set("start", said)
        address, key = finding.result(WAIT_LIMIT_S)
    return start_text(address, place, key)


@pytest.mark.no_zombie
def test_a_restarted_group_does_not_take_its_predecessors_address(
    store: AbortableStore, servers: list[str]
) -> None:
    (port,) = free_ports()  # where nobody serves any more
    store.set("start", start_text(f"127.0.0.1:{port}", RANK_1, "old"))
    said = start_text(servers[1], RANK_1, "new")
    assert found_later(store, RANK_1, said) == said


@pytest.mark.no_zombie
def test_a_rank_that_was_started_again_does_not_join_those_who_lost_its_predecessor(
    store: AbortableStore, servers: list[str]
) -> None:
    store.set("start", start_text(servers[0], RANK_1, "old"))
    find_start(store, "start", RANK_1)
    said = start_text(servers[1], RANK_1, "new")
    assert found_later(store, replace(RANK_1, start="1"), said) == said


def test_a_second_process_that_is_rank_0_is_refused_while_the_first_one_serves(
    store: AbortableStore, servers: list[str]
) -> None:
    """As where two replica groups are given one MASTER_PORT: their ranks would be mixed."""
    place = replace(RANK_1, group_rank=0)
    publish_start(store, "start", place, servers[0], "first")
    assert store.get("start").decode() == start_text(servers[0], place, "first")
    with pytest.raises(ConfigError, match=f"rank 0 .* which serves at {servers[0]}: start each rank once"):
        publish_start(store, "start", place, servers[1], "second")
    assert find_start(store, "start", RANK_1) == (parse_address(servers[0]), "first")
    publish_start(store, "start", replace(place, start="1"), servers[1], "its successor")
    assert find_start(store, "start", RANK_1) == (parse_address(servers[1]), "its successor")


def test_a_rank_0_comes_after_one_that_has_ended(store: AbortableStore, servers: list[str]) -> None:
    (port,) = free_ports()  # where nobody serves any more
    place = replace(RANK_1, group_rank=0)
    for address in (f"127.0.0.1:{port}", servers[1]):
        publish_start(store, "start", place, address, "key")
    assert find_start(store, "start", RANK_1) == (parse_address(servers[1]), "key")


def test_a_rank_0_that_serves_at_its_predecessors_address_is_no_second_one(
    store: AbortableStore, servers: list[str]
) -> None:
    """As with TORCHFT_MANAGER_PORT, and a launcher that counts no starts: it is what listens there."""
    place = replace(RANK_1, group_rank=0)
    for key in ("old", "new"):
        publish_start(store, "start", place, servers[0], key)
        assert find_start(store, "start", RANK_1) == (parse_address(servers[0]), key)


def test_of_two_that_come_as_rank_0_after_one_that_has_ended_the_later_is_refused(
    store: AbortableStore, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports()
    place = replace(RANK_1, group_rank=0)
    store.set("start", start_text(f"127.0.0.1:{port}", place, "old"))

    def other_comes(address: Address) -> bool:
        monkeypatch.undo()
        publish_start(store, "start", place, servers[0], "other")
        return group_store.is_listening(address)

    monkeypatch.setattr(group_store, "is_listening", other_comes)
    with pytest.raises(ConfigError, match=f"which serves at {servers[0]}"):
        publish_start(store, "start", place, servers[1], "key")


@pytest.mark.progress
def test_a_rank_does_not_join_a_rank_0_with_another_world_size(
    store: AbortableStore, servers: list[str]
) -> None:
    """Each would train on another part of the data. One of this world size may be about to start."""
    place = replace(RANK_1, group_world_size=3)
    store.set("start", start_text(servers[0], RANK_1, "key"))
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(TimeoutError, match="WORLD_SIZE is 3 here, and 2 on rank 0, which serves at"):
        find_start(store, "start", place)
    store.set("start", start_text(servers[1], place, "key"))
    assert find_start(store, "start", place) == (parse_address(servers[1]), "key")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_rank_0_names_the_variable_that_is_not_of_its_host(host: str) -> None:
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(1, is_agents=False))
    with pytest.raises(BindError, match=rf"store at {host}:1234: .*; store_addr .MASTER_ADDR. has to"):
        open_group_store(replace(config, store=Address(host, 1234)))


@pytest.mark.progress
def test_what_is_no_store_and_says_nothing_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = ManagerArguments(rank=1, world_size=2, connect_timeout=0.5)
        config = resolve(given, environment(silent.getsockname()[1], is_agents=True))
        with pytest.raises(ConnectError, match="no TCPStore answered at"):
            open_group_store(config)


@pytest.mark.progress
@pytest.mark.parametrize("is_fixed", [False, True], ids=["another port", "the same port"])
def test_a_rank_whose_rank_0_ends_as_it_comes_meets_the_one_of_the_next_start(is_fixed: bool) -> None:
    """At the same port it is refused as long as it shows the key of the earlier one."""
    served = serve_store()
    given = ManagerArguments(rank=1, world_size=2, connect_timeout=WAIT_LIMIT_S)
    config = resolve(given, environment(served.port, is_agents=True))
    address = StoreAddress(Address("127.0.0.1", served.port), PLACES)
    with lighthouse_here() as lighthouse, closing(AbortableStore(address, timedelta(WAIT_LIMIT_S))) as store:
        store.connect()
        place = lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2
        earlier, later = ManagerServer("earlier", *place), ManagerServer("later", *place)
        with closing(later), pytest.MonkeyPatch.context() as patch:

            def found(*args: Any) -> tuple[Address, str]:
                found_at = find_start(*args)
                earlier.close()
                store.set(config.run, start_text(later.address(), config, "new"))
                return found_at

            later.rank_key = "new"
            found_first = later if is_fixed else earlier
            store.set(config.run, start_text(found_first.address(), config, "old"))
            patch.setattr(group_store, "find_start", found)
            link = connect_rank(config, Deaf())
        assert link.replica_id == "later"
        link.close()


class Deaf:
    """A rank that heeds nothing that it is told."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None
