"""Aborts touch nothing of others, and nothing of a group stays behind."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Collection
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group.store import AbortableStore, parse_store_address

from .conftest import LIMIT_S, Party, assert_ended

pytestmark = pytest.mark.no_leak


def test_aborts_break_no_other_connection_of_the_process(party: Party) -> None:
    """Other threads open, use and close connections like mad, to the same store among others."""
    stop, served = threading.Event(), threading.Event()
    exchanged = [0, 0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = party.aside(serve_echo, server, served)
        others = [
            party.aside(use_sockets, server.getsockname(), stop, exchanged),
            party.aside(use_store, party.store.port, stop, exchanged),
        ]
        groups = [party.own(ProcessGroupGloo(30)) for _ in range(2)]
        for _ in range(15):
            party.configure(groups)
            blocked = party.aside(lambda: groups[0].allreduce([torch.ones(4)]).wait())
            groups[0].abort()
            with pytest.raises(RuntimeError):
                blocked.result(LIMIT_S)
        stop.set()
        for other in others:
            other.result(LIMIT_S)
        served.set()
        echo.result(LIMIT_S)
    assert min(exchanged) > 15


def serve_echo(server: socket.socket, stop: threading.Event) -> None:
    server.settimeout(0.1)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(LIMIT_S)
            while data := connection.recv(100):
                connection.sendall(data)


def use_sockets(address: Any, stop: threading.Event, exchanged: list[int]) -> None:
    while not stop.is_set():
        with socket.create_connection(address, timeout=LIMIT_S) as connection:
            for _ in range(5):
                connection.sendall(b"hello")
                assert connection.recv(100) == b"hello"
                exchanged[0] += 1
        with socket.create_server(("127.0.0.1", 0)):
            pass


def use_store(port: int, stop: threading.Event, exchanged: list[int]) -> None:
    torchs = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while not stop.is_set():
        with closing(
            AbortableStore(parse_store_address(f"127.0.0.1:{port}/busy"), timedelta(seconds=LIMIT_S))
        ) as ours:
            ours.connect()
            for client in (torchs, ours):
                client.set("busy", "yes")
                assert client.get("busy") == b"yes"
                exchanged[1] += 1


# Open descriptors, native threads, Python threads.
Usage = tuple[int, int, int]


def settled_usage(groups: list[ProcessGroup], of_others: Collection[threading.Thread]) -> Usage:
    """What is in use when the groups have given everything back and it no longer changes."""
    for group in groups:
        group.shutdown()
    gc.collect()
    assert_ended("torchft-process-group", of_others)
    readings = [usage_now()]
    while len(readings) < 1000 and readings[-20:] != readings[-1:] * 20:
        threading.Event().wait(0.01)  # the kernel buries a joined thread a little later
        readings.append(usage_now())
    return readings[-1]


def assert_no_more(before: Usage, after: Usage) -> None:
    """Less there may be: what Gloo forgot of other tests in this process ends when its time is up."""
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def usage_now() -> Usage:
    return (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count())


def test_a_kept_error_keeps_no_connection(party: Party) -> None:
    of_others = threading.enumerate()
    groups = party.meet(2)
    before = settled_usage(groups, of_others)
    party.configure(groups)
    groups[0].abort()
    kept = []
    for group in groups:
        try:
            group.allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            kept.append((error, group.errored()))
    assert len(kept) == 2
    assert_no_more(before, settled_usage(groups, of_others))
