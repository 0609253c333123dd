"""Hosts that are namespaces: what passes between them, and that nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from torchft_like.testing.chaos.network import Network, Rules, why_unavailable

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable())),
]
LIMIT_S = 20
PACKETS = 200
LISTEN = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("0.0.0.0", 7))
    print("ready", flush=True)
    while True:
        server.sendto(*server.recvfrom(100))
"""
ACCEPT = """
import socket
with socket.create_server(("0.0.0.0", 8)) as server:
    print("ready", flush=True)
    client = server.accept()[0]
    while client.recv(100):
        pass
"""
CONNECT = """
import socket, sys
client = socket.create_connection((sys.argv[1], 8))
print("connected", flush=True)
sys.stdin.readline()
# The last packet of the handshake may be the one that is refused: then the send hears of it.
ask = lambda: client.sendall(b"?") or client.recv(1)
for use in (ask, lambda: socket.create_connection((sys.argv[1], 8))):
    try:
        use()
    except OSError as error:
        print(type(error).__name__)
"""
ASK = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.connect((sys.argv[1], 7))
    client.settimeout(float(sys.argv[3]))
    answered, began = 0, time.monotonic()
    for _ in range(int(sys.argv[2])):
        try:
            client.send(b"?")
            answered += bool(client.recv(100))
        except OSError:
            pass
    print(answered, time.monotonic() - began)
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(["a", "b"], tmp_path, seed=1) as network:
        command = [*network.entering("b"), sys.executable, "-c", LISTEN]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
                yield network
            finally:
                server.kill()


def ask(network: Network, count: int, wait_s: float = LIMIT_S) -> tuple[int, float]:
    """How many of so many packets from a to b were answered, and the seconds that it took."""
    command = [
        *network.entering("a"),
        sys.executable,
        "-c",
        ASK,
        network.address("b"),
        str(count),
        str(wait_s),
    ]
    answered, seconds = subprocess.check_output(command, timeout=100).split()
    return int(answered), float(seconds)


def test_hosts_reach_each_other(network: Network) -> None:
    assert ask(network, PACKETS)[0] == PACKETS
    wait_for(lambda: network.counts()["passed"] >= 2 * PACKETS)


@pytest.mark.parametrize("incoming", [True, False])
def test_nothing_comes_back_from_a_host_that_is_cut_off(network: Network, incoming: bool) -> None:
    network.apply(network.cut_off(["b"], incoming=incoming))
    assert ask(network, 2, wait_s=0.2)[0] == 0
    wait_for(lambda: network.counts()["cut"] == 2)  # an answer may come, and be cut, when nobody waits for it
    assert network.counts()["passed"] == (0 if incoming else 2)
    network.apply(Rules())
    assert ask(network, 2)[0] == 2


def test_a_connection_over_a_refused_link_is_reset_whether_it_is_new_or_old(network: Network) -> None:
    listens = [*network.entering("b"), sys.executable, "-c", ACCEPT]
    connects = [*network.entering("a"), sys.executable, "-c", CONNECT, network.address("b")]
    pipe = subprocess.PIPE
    with subprocess.Popen(listens, stdout=pipe) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            with subprocess.Popen(connects, stdin=pipe, stdout=pipe) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == b"connected\n"
                network.apply(Rules(refused=frozenset({("a", "b")})))
                told, _ = client.communicate(b"go on\n", timeout=LIMIT_S)
        finally:
            server.kill()
    assert told.split() == [b"ConnectionResetError", b"ConnectionRefusedError"]
    assert network.counts()["refused"] >= 2


def test_packets_are_lost_as_often_as_the_rules_say(network: Network) -> None:
    network.apply(Rules(loss={"b": 0.2}))
    answered, _ = ask(network, PACKETS, wait_s=0.005)
    assert 0 < network.counts()["lost"] < PACKETS
    assert answered < PACKETS


@pytest.mark.parametrize(
    ("rules", "each_s"),
    [
        (Rules(delay_s={"a": 0.02}), 0.02),
        (Rules(bytes_per_s={"a": 1000}), 29 / 1000),  # an IP header, one of UDP, and a byte
    ],
    ids=["late", "slow"],
)
def test_packets_are_late_in_both_directions(network: Network, rules: Rules, each_s: float) -> None:
    network.apply(rules)
    answered, seconds = ask(network, 5)
    assert answered == 5
    assert seconds >= 5 * 2 * each_s


def test_nothing_is_left_of_a_network(tmp_path: Path) -> None:
    before = set(psutil.net_if_addrs())
    with Network(["a", "b"], tmp_path, seed=1) as network:
        namespaces = [Path(network.namespace(host)) for host in network.hosts]
        assert all(path.exists() for path in namespaces)
    assert not any(path.exists() for path in namespaces)
    assert set(psutil.net_if_addrs()) <= before
