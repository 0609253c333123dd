"""Gloo's own traffic, as somebody on the network sees it: plain, or behind what docs/security.md names."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lighthouse.tls import AUTHORITIES, CERTIFICATE, KEY
from tests.certificates import certify
from tests.waiting import soon
from torchft_like.testing.chaos.network import Network, Switch, why_unavailable
from torchft_like.testing.processes import RunningProcess, run_tool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable())),
]

LIMIT_S = 60.0
SECRET = 1234.567
SEEN = struct.pack("<4f", *[SECRET] * 4)
HOSTS = ("a", "b")
PORT, WIREGUARD_PORT = 29500, 51820
TUNNEL = "10.214.0"
MEMBER = f"""
import sys
import torch
from torch.distributed import TCPStore
from torchft_like.errors import ConfigError
from torchft_like.process_group import ProcessGroupBabyGloo, ProcessGroupGloo

host, rank = sys.argv[1], int(sys.argv[2])
try:
    group = ProcessGroupGloo({LIMIT_S})
except ConfigError as error:
    for other in (lambda: ProcessGroupBabyGloo({LIMIT_S}), lambda: ProcessGroupGloo({LIMIT_S})):
        try:
            other()
        except ConfigError:
            continue
        sys.exit("it went on")
    print("refused:", error)
    sys.exit()
store = TCPStore(host, {PORT}, is_master=rank == 0, wait_for_workers=False)
group.configure(f"{{host}}:{PORT}/group", rank, 2)
tensor = torch.full((64,), {SECRET} if rank == 0 else 0.0)
group.broadcast_one(tensor, 0).wait()
group.barrier().wait()
print("has", tensor[0].item())
group.shutdown()
"""


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every packet between the hosts."""
    packets: list[bytes] = []
    carry = Switch._carry

    def tapped(switch: Switch, source: str, target: str, packet: bytes) -> None:
        packets.append(packet)
        carry(switch, source, target, packet)

    monkeypatch.setattr(Switch, "_carry", tapped)
    return packets


@pytest.fixture
def network(wire: list[bytes], tmp_path: Path) -> Iterator[Network]:
    with Network(HOSTS, tmp_path, seed=1) as network:
        yield network


def broadcast(network: Network, folder: Path, store_host: str, **variables: str) -> list[str]:
    """Send the secret from a to b; return what each said."""
    script = folder / "member.py"
    script.write_text(MEMBER)
    members = [
        RunningProcess(
            [str(script), store_host, str(rank)],
            variables=variables,
            is_fork=True,
            namespace=network.namespace(host),
        )
        for rank, host in enumerate(HOSTS)
    ]
    try:
        for member in members:
            assert member.wait(LIMIT_S) == 0, member.output
    finally:
        for member in members:
            member.kill()
    return [member.output for member in members]


def test_gloo_is_plain(network: Network, wire: list[bytes], tmp_path: Path) -> None:
    assert all("has 1234.5" in said for said in broadcast(network, tmp_path, network.address("a")))
    assert any(SEEN in packet for packet in wire)


def test_gloo_has_its_tls_or_says_what_to_do(network: Network, wire: list[bytes], tmp_path: Path) -> None:
    """No wheel of torch from the package index has it today; a torch that does has to encrypt."""
    files = certify(tmp_path / "tls")
    names = {"PKEY": KEY, "CERT": CERTIFICATE, "CA_FILE": AUTHORITIES}
    variables = {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{end}": str(files / name) for end, name in names.items()}
    said = broadcast(network, tmp_path, network.address("a"), GLOO_DEVICE_TRANSPORT="TCP_TLS", **variables)
    for output in said:
        refused = "refused:" in output and "USE_GLOO_WITH_OPENSSL=1" in output and "WireGuard" in output
        assert refused or "has 1234.5" in output
    assert not any(SEEN in packet for packet in wire)


def listens(path: str) -> bool:
    """Return whether a server accepts; `wg` deletes the socket of one that is bound and not yet listens."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


@contextmanager
def tunnel(network: Network, folder: Path) -> Iterator[str]:
    """Join the hosts by WireGuard, whose packets go over the network; yield the address of a in it."""
    keys = [subprocess.check_output(["wg", "genkey"], text=True) for _ in HOSTS]
    publics = [subprocess.check_output(["wg", "pubkey"], input=key, text=True).strip() for key in keys]
    daemons = []
    try:
        for number, host in enumerate(HOSTS):
            device, inside, peer = f"wg{os.getpid() % 10**7}x{number}", network.entering(host), 1 - number
            daemons.append(RunningProcess([*inside, "wireguard-go", "--foreground", device]))
            assert soon(partial(listens, f"/var/run/wireguard/{device}.sock"), LIMIT_S)
            (private := folder / device).write_text(keys[number])
            private.chmod(0o600)
            known = ["peer", publics[peer], "allowed-ips", f"{TUNNEL}.{peer + 1}/32"]
            endpoint = f"{network.address(HOSTS[peer])}:{WIREGUARD_PORT}"
            for command in (
                ["wg", "set", device, "listen-port", str(WIREGUARD_PORT), "private-key", str(private)],
                ["wg", "set", device, *known, "endpoint", endpoint],
                ["ip", "address", "add", f"{TUNNEL}.{number + 1}/24", "dev", device],
                ["ip", "link", "set", device, "mtu", "1420", "up"],
            ):
                assert run_tool(*inside, *command) is None
        yield f"{TUNNEL}.1"
    finally:
        for daemon in daemons:
            daemon.kill()


@pytest.mark.skipif(
    not (shutil.which("wireguard-go") and shutil.which("wg")),
    reason="no WireGuard here (apt-get install wireguard-go wireguard-tools)",
)
def test_wireguard_hides_gloo_and_its_store(network: Network, wire: list[bytes], tmp_path: Path) -> None:
    with tunnel(network, tmp_path) as first:
        assert all("has 1234.5" in said for said in broadcast(network, tmp_path, first))
    assert wire
    assert not any(SEEN in packet or b"/group/" in packet for packet in wire)
