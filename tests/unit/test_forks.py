"""What a fork leaves to its parent, and in which order."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

import pytest

from lighthouse import forks, grpc_forks
from lighthouse.address import Address
from lighthouse.forks import Turn, disown, in_each_fork


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_actions", {turn: [] for turn in Turn})
    monkeypatch.setattr(forks, "_addresses", {})


def test_actions_run_in_the_order_of_their_turns_whatever_one_of_them_raises() -> None:
    ran: list[str] = []
    in_each_fork(Turn.SOCKETS, lambda: ran.append("sockets"))
    in_each_fork(Turn.OBJECTS, lambda: ran.append(str(1 // 0)))
    in_each_fork(Turn.LOCKS, lambda: ran.append("locks"))
    with pytest.raises(ExceptionGroup, match="could not be left to its parent"):
        forks._run_actions()
    assert ran == ["locks", "sockets"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::", "127.0.0.2"])
def test_both_ends_of_a_connection_to_a_disowned_address_are_given_up_and_no_others(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        disown(Address(host, listener.getsockname()[1]))
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as served:
            ends = {listener.fileno(), client.fileno(), served.fileno()}
            assert set(forks._disowned()) == (set() if host == "127.0.0.2" else ends)


def test_a_replaced_descriptor_ends_and_its_other_copies_live() -> None:
    one, other = socket.socketpair()
    copy = os.dup(one.fileno())
    with one, other:
        forks.replace_sockets([copy])
        with socket.socket(fileno=copy) as replaced:
            assert replaced.recv(1) == b""
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_the_oldest_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ADDRESSES_MAX", 2)
    for port in (1, 2, 1, 3):
        disown(Address("127.0.0.1", port))
    assert list(forks._addresses) == [("127.0.0.1", 1), ("127.0.0.1", 3)]


# What of gRPC is in a fork.


grpc: Any = importlib.import_module("grpc")  # much of what is looked at here is its own
cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")

HOLDERS = [(module, *holder) for module, holders in grpc_forks._HOLDERS.items() for holder in holders]


@pytest.mark.parametrize(("module", "name", "attribute"), HOLDERS)
def test_each_holder_of_an_object_of_the_library_exists(module: str, name: str, attribute: str) -> None:
    holder = getattr(importlib.import_module(module), name)
    names = holder.__init__.__code__.co_names
    assert attribute in names or attribute in getattr(holder, "__slots__", ()) or name.endswith("Rendezvous")


def test_credentials_can_be_read_and_made_again() -> None:
    plain = grpc.ssl_channel_credentials(b"root", b"key", b"chain")._credentials
    assert list(grpc_forks._parts(plain))[:3] == [b"root", b"key", b"chain"]
    token = grpc.access_token_call_credentials("token")
    both = grpc.composite_channel_credentials(grpc.ssl_channel_credentials(), token, token)._credentials
    calls, channel = grpc_forks._parts(both)
    assert type(channel) is cygrpc.SSLChannelCredentials
    assert [type(call) for call in calls] == [cygrpc.MetadataPluginCallCredentials] * 2
    assert all(callable(plugin) for plugin, _ in map(grpc_forks._parts, calls))
    assert len(list(grpc_forks._parts(grpc.composite_call_credentials(token, token)._credentials))) == 1


def test_what_this_process_made_is_used_as_it_is() -> None:
    made = grpc.ssl_channel_credentials()._credentials
    assert grpc_forks._usable(made) is made


def test_the_destructors_of_the_library_are_found() -> None:
    assert len(grpc_forks._destructors(cygrpc)) > 20  # 62 in grpcio 1.80
