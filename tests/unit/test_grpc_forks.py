"""What a fork needs to know of grpc's own classes is true of the grpc that is installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from lighthouse import grpc_forks

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
