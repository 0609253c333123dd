"""Where servers listen whose host is given as a name."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from lighthouse import listening
from lighthouse.address import Address
from lighthouse.listening import bind_error, listen_tcp, refuse_itself, why_unbindable, why_unreachable
from lighthouse.net import ServerLimits, long_greeting, make_aio_server
from tests.conftest import WAIT_LIMIT_S
from tests.faults import raising
from torchft_like.runtime import hosts

Resolve = Callable[[str], None]


@pytest.fixture
def trainer_3_is(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Return a function that gives the name trainer-3 an address, as /etc/hosts does."""
    resolve = socket.getaddrinfo

    def name(address: str) -> None:
        def look_up(host: str | None, *rest: Any, **more: Any) -> Any:
            return resolve(address if host == "trainer-3" else host, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return name


def _is_reached(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        return client.connect_ex((host, port)) == 0


def test_a_server_at_a_name_that_is_loopback_here_alone_is_reached_at_every_address(
    trainer_3_is: Resolve,
) -> None:
    trainer_3_is("127.0.1.1")
    with listen_tcp(Address("trainer-3", 0)) as listener:
        assert all(_is_reached(host, listener.getsockname()[1]) for host in ("127.0.1.1", "127.0.0.2"))


def test_a_grpc_server_at_such_a_name_is_reached_at_every_address_and_keeps_its_name(
    trainer_3_is: Resolve,
) -> None:
    async def serve() -> None:
        server, address = make_aio_server(Address("trainer-3", 0), [], ServerLimits())
        await server.start()
        try:
            assert address.host == "trainer-3"
            assert all(_is_reached(host, address.port) for host in ("127.0.1.1", "127.0.0.2"))
        finally:
            await server.stop(None)

    trainer_3_is("127.0.1.1")
    asyncio.run(serve())


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST.", "localhost.localdomain", "ip6-localhost", "job.localhost"]
)
def test_a_server_at_localhost_is_reached_at_loopback_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    resolve = socket.getaddrinfo

    def look_up(host: str | None, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == name else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with listen_tcp(Address(name, 0)) as listener:
        assert not _is_reached("127.0.0.2", listener.getsockname()[1])
    assert hosts.local_host_towards(name) == "127.0.0.1"


def test_a_server_listens_at_a_name_that_has_no_ipv4_address(trainer_3_is: Resolve) -> None:
    if why_unbindable(Address("::1", 0)) is not None:
        pytest.skip("no IPv6 on this host")
    trainer_3_is("::1")
    with listen_tcp(Address("trainer-3", 0)) as listener:
        assert _is_reached("::1", listener.getsockname()[1])


@pytest.mark.skipif(why_unbindable(Address("::1", 0)) is not None, reason="no IPv6 on this host")
def test_a_server_at_such_a_name_is_reached_by_ipv6_on_a_host_from_which_no_other_leads_away(
    trainer_3_is: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_3_is("127.0.1.1")
    monkeypatch.setitem(
        listening.ANYWHERE, socket.AF_INET, "255.255.255.255"
    )  # for which a socket lacks leave
    monkeypatch.setitem(listening.ANYWHERE, socket.AF_INET6, "::1")
    with listen_tcp(Address("trainer-3", 0)) as listener:
        assert all(_is_reached(host, listener.getsockname()[1]) for host in ("::1", "127.0.1.1"))


def test_a_host_whose_name_is_loopback_here_alone_gives_an_address_that_others_reach(
    trainer_3_is: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_3_is("127.0.1.1")
    given = {"lo": "127.0.0.1", "eth0": "198.51.100.7"}
    monkeypatch.setattr(hosts, "ANYWHERE", {})  # a host without a default route
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(given, 1)))
    monkeypatch.setattr(hosts, "host_named", given.__getitem__)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-3")
    assert hosts.local_host_towards("trainer-3") == "198.51.100.7"
    assert (hosts.own_host(), hosts.own_host(others_ask=True)) == ("127.0.0.1", "198.51.100.7")
    assert hosts.local_host_towards("127.0.1.1") == "127.0.0.1"
    del given["eth0"]
    assert hosts.local_host_towards("trainer-3") == "127.0.0.1"


def test_torchs_own_gloo_groups_of_such_a_host_listen_where_others_reach_them(
    trainer_3_is: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_3_is("127.0.1.1")
    given = {"lo": "127.0.0.1", "eth0": "198.51.100.7"}
    monkeypatch.setattr(hosts, "ANYWHERE", {})
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(given, 1)))
    monkeypatch.setattr(hosts, "host_named", given.__getitem__)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-3")
    monkeypatch.setattr(hosts, "_led_out", [])
    monkeypatch.setenv(hosts.INTERFACE_ENV, "")
    for meeting in ("127.0.0.1", "trainer-3"):
        assert os.environ[hosts.INTERFACE_ENV] == ""
        hosts.lead_torch_out(Address(meeting, 29400))
    assert (os.environ[hosts.INTERFACE_ENV], hosts.gloo_interface()) == ("eth0", "")  # an operator named none
    monkeypatch.setenv(hosts.INTERFACE_ENV, "eth1,eth2")
    hosts.lead_torch_out(Address("trainer-3", 29400))
    assert (os.environ[hosts.INTERFACE_ENV], hosts.gloo_interface()) == ("eth1,eth2", "eth1")


@pytest.mark.parametrize("greeting", [b"", long_greeting()], ids=["nothing", "a greeting"])
def test_a_server_that_resets_each_connection_listens(
    greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has all the connections that it takes does so, and a busy process hears of the reset first."""
    connect = asyncio.open_connection

    async def reset(*place: Any) -> Any:
        connected = await connect(*place)
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        return connected

    with socket.create_server(("127.0.0.1", 0)) as server:
        place = Address("127.0.0.1", server.getsockname()[1])
        monkeypatch.setattr(asyncio, "open_connection", reset)
        assert asyncio.run(why_unreachable(place, WAIT_LIMIT_S, greeting)) is None
        monkeypatch.setattr(asyncio, "open_connection", raising(ConnectionResetError))
        assert asyncio.run(why_unreachable(place, WAIT_LIMIT_S, greeting)) is None
    monkeypatch.undo()
    refusal = asyncio.run(why_unreachable(place, WAIT_LIMIT_S, greeting))
    assert isinstance(refusal, ConnectionRefusedError)


def test_who_has_asked_for_any_free_port_is_not_told_to() -> None:
    error = bind_error(Address("127.0.0.1", 0), OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)))
    assert "ip_local_port_range" in str(error)
    assert "or port 0" not in str(error)


def test_a_connection_to_itself_is_refused_and_leaves_its_port_to_who_waits_for_it() -> None:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        place = connection.getsockname()
        connection.connect(place)
        with pytest.raises(ConnectionRefusedError, match="to itself"):
            refuse_itself(connection)
    with socket.socket() as server:
        server.bind(place)
