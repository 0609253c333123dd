"""The lighthouse inside this process."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

from lighthouse.address import LOOPBACK, parse_address
from lighthouse.errors import ConfigError
from lighthouse.net import Keepalive, default_keepalive
from torchft_like.coordination import LighthouseClient, LighthouseServer
from torchft_like.errors import AddressError, ConnectError
from torchft_like.runtime.event_loop import coordination_loop

LIMIT_S = 30.0


def test_a_lighthouse_is_described_between_two_events_and_not_in_the_middle_of_one() -> None:
    server, begun, over = LighthouseServer(), threading.Event(), threading.Event()

    def event() -> None:
        begun.set()
        over.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as threads:
        try:
            coordination_loop().loop.call_soon_threadsafe(event)
            assert begun.wait(LIMIT_S)
            description = threads.submit(server.describe)
            with pytest.raises(TimeoutError):
                description.result(0.2)
        finally:
            over.set()
        assert "no quorum" in description.result(LIMIT_S)
    server.shutdown()


@pytest.mark.parametrize(("given", "waits_ms"), [(None, 100), (0, 0)])
def test_it_waits_for_stragglers_as_torchft_s_does(given: int | None, waits_ms: int) -> None:
    server = LighthouseServer(min_replicas=2, join_timeout_ms=given)
    try:
        assert server._lighthouse.config.join_timeout_ms == waits_ms
    finally:
        server.shutdown()


# How patient a process is with its connections.


def test_a_connection_is_given_up_within_a_second_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_keepalive() == Keepalive(500, 500)
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "5000")
    assert default_keepalive() == Keepalive(500, 5000)
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", "")
    assert default_keepalive() == Keepalive(500, 5000)


@pytest.mark.parametrize("text", ["soon", "0.5", "-1", "9"])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIME_MS", text)
    with pytest.raises(ConfigError, match=f"TORCHFT_KEEPALIVE_TIME_MS is '{text}': it must be"):
        default_keepalive()


@pytest.mark.parametrize(
    ("resolved", "host"), [("192.0.2.7", "192.0.2.7"), ("127.0.1.1", "trainer-3"), (None, LOOPBACK)]
)
def test_a_lighthouse_on_all_interfaces_gives_an_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, resolved: str | None, host: str
) -> None:
    def towards(name: str) -> str:
        if resolved is None:
            raise AddressError(f"no route to {name}")
        return resolved

    monkeypatch.setattr("socket.gethostname", lambda: "trainer-3")
    monkeypatch.setattr("torchft_like.runtime.hosts.source_towards", towards)
    server = LighthouseServer(bind="0.0.0.0:0")
    try:
        assert parse_address(server.address()).host == host
        monkeypatch.setenv("TORCHFT_HOSTNAME", "named")
        assert parse_address(server.address()).host == "named"
    finally:
        server.shutdown()


def test_a_client_gives_a_lighthouse_up_in_time_where_the_clock_is_set_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC's own wait would last for as long as the clock was set back."""
    readings = iter([time.time()])
    set_back = SimpleNamespace(time=lambda: next(readings, time.time() - 3600))
    monkeypatch.setattr("grpc._utilities.time", set_back)
    errors = []

    def connect(port: int) -> None:
        try:
            LighthouseClient(f"{LOOPBACK}:{port}", timedelta(seconds=0.2))
        except ConnectError as error:
            errors.append(error)

    with socket.create_server((LOOPBACK, 0)) as silent:
        client = threading.Thread(target=connect, args=[silent.getsockname()[1]], daemon=True)
        client.start()
        client.join(LIMIT_S)
    assert len(errors) == 1


def test_what_the_lighthouse_refuses_is_no_lost_connection() -> None:
    server = LighthouseServer()
    try:
        client = LighthouseClient(server.address())
        with pytest.raises(ConfigError, match="refused Quorum: address 'localhost' is not host:port"):
            client.quorum("a", timedelta(seconds=60), address="localhost")
        client.close()
    finally:
        server.shutdown()
