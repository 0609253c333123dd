"""Hosts that are network namespaces, joined by a switch that loses, delays and cuts.

Each host has a TUN device whose other end is a descriptor of this process; one thread carries the packets
between them and applies the rules. `tc netem` on veth pairs is no alternative: many kernels are built without
netem, and a switch in user space can do what netem cannot: cut one direction between two sets of hosts, and
count what it did for each of them.

Nothing is left behind, however this process ends: a namespace lives as long as the process that
holds it, which the kernel kills with this one, and a device as long as its descriptor.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from torchft_like.testing.processes import RunningProcess, holds_within, run_tool, why_no_namespace

TUN = "/dev/net/tun"
PACKET_BYTES_MAX = 65536
PACKETS_WAITING_MAX = 20_000
BATCH_MAX = 64
SMALL_BYTES_MAX = 1000  # of a packet that passes over a narrow link
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NETWORK = "10.213.0"
_TCP = struct.Struct("!HHIIBB")  # ports, what is sent and heard, the length of the head, flags
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16
_READY_S_MAX = 5.0


class NetworkUnavailableError(RuntimeError):
    """This machine or user cannot make networks; the text says why."""


@dataclass
class Rules:
    """The rules of the switch. They are replaced as a whole, so that no lock is needed.

    Attributes:
        cut: pairs (from, to) of hosts between which nothing passes in that direction.
        refused: the same, where the sender is told so: its TCP packets are answered with a reset, as by a
            firewall that rejects them.
        narrow: the same, where small packets pass and all others are lost in silence, as where a network on
            the way carries smaller packets than the hosts believe, and nobody tells them.
        loss: probability with which a packet from or to a host is lost.
        delay_s: the seconds by which packets from or to a host are late.
        bytes_per_s: the rate of a host's link, in each direction; packets queue for it, in order.
    """

    cut: frozenset[tuple[str, str]] = frozenset()
    refused: frozenset[tuple[str, str]] = frozenset()
    narrow: frozenset[tuple[str, str]] = frozenset()
    loss: dict[str, float] = field(default_factory=dict)
    delay_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: dict[str, float] = field(default_factory=dict)


def why_unavailable() -> str | None:
    """Return why there can be no network of namespaces here; None if there can."""
    if reason := why_no_namespace("a network of hosts", "-n", "ip", "nsenter"):
        return reason
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"a network of hosts needs {TUN}: {error.strerror}"
    return None


class Network:
    """A star of hosts around one switch.

    Args:
        folder: the folder for the logs of the holders.
        seed: the seed of the losses.
        packet_bytes: the most that one packet has. Large ones let the switch, which takes some 10 µs for
            each, carry gigabits.

    Raises:
        NetworkUnavailableError: `why_unavailable` gives a reason, or the system refused.
    """

    def __init__(self, names: Sequence[str], folder: Path, seed: int, packet_bytes: int = 1500) -> None:
        if reason := why_unavailable():
            raise NetworkUnavailableError(reason)
        self.hosts: tuple[str, ...] = tuple(names)
        self._addresses = {name: f"{_NETWORK}.{index + 1}" for index, name in enumerate(names)}
        self._holders: dict[str, RunningProcess] = {}
        self._packet_bytes = packet_bytes
        self._switch = Switch(seed)
        try:
            for index, name in enumerate(names):
                self._holders[name] = RunningProcess(
                    ["unshare", "-n", "sleep", "infinity"], folder / "hosts.log", {}
                )
                device = self._device_of(name, f"ft{os.getpid() % 10**7}x{index}")
                self._switch.plug_in(name, self._addresses[name], device)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: str) -> str:
        """Return the host's IPv4 address."""
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """Return the path of the host's namespace."""
        return f"/proc/{self._holders[host].pid}/ns/net"

    def entering(self, host: str) -> list[str]:
        """Return the words to put in front of a command that has to run on the host."""
        return ["nsenter", f"--net={self.namespace(host)}", "--"]

    def apply(self, rules: Rules) -> None:
        """Apply these rules from now on, and no others."""
        self._switch.rules = rules

    def cut_off(self, hosts: Iterable[str], *, incoming: bool = True) -> Rules:
        """Return rules that separate these hosts from all others; without `incoming` they still receive."""
        inside = set(hosts)
        outside = [host for host in self.hosts if host not in inside]
        pairs = {(host, other) for host in inside for other in outside}
        return Rules(cut=frozenset(pairs | ({(b, a) for a, b in pairs} if incoming else set())))

    def counts(self) -> Counter[str]:
        """Return how many packets were passed, delayed, lost (by chance), cut, refused and too large."""
        return Counter(self._switch.counts)

    def retransmits(self, host: str) -> int:
        """Return how many TCP segments the host has sent again so far."""
        lines = Path(f"/proc/{self._holders[host].pid}/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def close(self) -> None:
        """Remove every device and namespace. Safe to call again."""
        self._switch.close()
        for holder in self._holders.values():
            holder.kill()
        self._holders.clear()

    def _device_of(self, host: str, device: str) -> int:
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
            holder = self._holders[host]
            own, made = (Path(f"/proc/{process}/ns/net") for process in ("self", holder.pid))
            if not holds_within(_READY_S_MAX, lambda: made.readlink() != own.readlink()):
                raise NetworkUnavailableError("unshare -n made no network namespace")
            _run("ip", "link", "set", device, "netns", str(holder.pid))
            inside = self.entering(host)
            _run(*inside, "ip", "address", "add", f"{self.address(host)}/24", "dev", device)
            _run(*inside, "ip", "link", "set", device, "mtu", str(self._packet_bytes), "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


class Switch:
    """A switch that carries packets between descriptors, which it owns, on a thread of its own."""

    def __init__(self, seed: int) -> None:
        self.rules: Rules = Rules()
        self.counts: Counter[str] = Counter()
        self._descriptors: dict[str, int] = {}
        self._by_address: dict[bytes, str] = {}
        self._random = random.Random(seed)  # noqa: S311 - for faults, not for secrets
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._free: dict[tuple[str, str], float] = {}  # when a link's direction has nothing to send
        self._selector = selectors.DefaultSelector()
        self._stop_read, self._stop_write = os.pipe()
        self._selector.register(self._stop_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def plug_in(self, host: str, address: str, descriptor: int) -> None:
        """Carry packets from and to this host, too, from now on."""
        self._descriptors[host] = descriptor
        self._by_address[bytes(map(int, address.split(".")))] = host
        self._selector.register(descriptor, selectors.EVENT_READ, host)

    def close(self) -> None:
        """Stop, and remove the devices."""
        if self._thread.is_alive():
            os.write(self._stop_write, b".")
            self._thread.join()
            self._selector.close()
            for descriptor in (*self._descriptors.values(), self._stop_read, self._stop_write):
                os.close(descriptor)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._send_due()):
                if key.data is None:
                    return
                self._receive(key.data, key.fd)

    def _receive(self, source: str, descriptor: int) -> None:
        for _ in range(BATCH_MAX):
            try:
                packet = os.read(descriptor, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is not None:
                self._carry(source, target, packet)

    def _carry(self, source: str, target: str, packet: bytes) -> None:
        rules = self.rules
        if (source, target) in rules.cut:
            self.counts["cut"] += 1
            return
        if (source, target) in rules.refused:
            self.counts["refused"] += 1
            if reset := reset_for(packet):
                self._send(self._descriptors[source], reset)
            return
        if (source, target) in rules.narrow and len(packet) > SMALL_BYTES_MAX:
            self.counts["narrow"] += 1
            return
        for loss in (rules.loss.get(source, 0.0), rules.loss.get(target, 0.0)):
            if loss and self._random.random() < loss:
                self.counts["lost"] += 1
                return
        delay_s = rules.delay_s.get(source, 0.0) + rules.delay_s.get(target, 0.0)
        delay_s += self._wait_for_links(source, target, len(packet))
        if delay_s and len(self._waiting) < PACKETS_WAITING_MAX:
            self.counts["delayed"] += 1
            self._number += 1  # packets that are due at the same time keep their order
            due = time.monotonic() + delay_s
            heapq.heappush(self._waiting, (due, self._number, self._descriptors[target], packet))
        else:
            self._send(self._descriptors[target], packet)

    def _wait_for_links(self, source: str, target: str, size: int) -> float:
        """Queue a packet for the links of both hosts; return the seconds until it has left the slower one."""
        now, wait_s = time.monotonic(), 0.0
        for link in (("from", source), ("to", target)):
            if rate := self.rules.bytes_per_s.get(link[1]):
                free = self._free[link] = max(self._free.get(link, now), now) + size / rate
                wait_s = max(wait_s, free - now)
        return wait_s

    def _send_due(self) -> float | None:
        """Send the packets that are due; return how long it takes until the next one is."""
        while self._waiting:
            left_s = self._waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            _, _, descriptor, packet = heapq.heappop(self._waiting)
            self._send(descriptor, packet)
        return None

    def _send(self, descriptor: int, packet: bytes) -> None:
        try:
            os.write(descriptor, packet)
            self.counts["passed"] += 1
        except OSError:  # the device's queue is full, or it is down: a real network loses such a packet, too
            self.counts["overrun"] += 1


def reset_for(packet: bytes) -> bytes:
    """Return the packet with which a firewall resets the TCP connection of a packet of IPv4; none for one of
    another protocol, and for a reset.
    """
    head_bytes = 4 * (packet[0] & 15)
    if packet[9] != socket.IPPROTO_TCP or packet[head_bytes + 13] & _RST:
        return b""
    source, target = packet[12:16], packet[16:20]
    source_port, target_port, number, heard, offset, flags = _TCP.unpack_from(packet, head_bytes)
    # It acknowledges what the packet has: a flag that begins or ends the connection counts as a byte.
    ends = number + len(packet) - head_bytes - 4 * (offset >> 4) + bool(flags & _SYN) + bool(flags & _FIN)
    own = heard if flags & _ACK else 0
    tcp = _TCP.pack(target_port, source_port, own, ends & 0xFFFFFFFF, 5 << 4, _RST | _ACK)
    length = len(tcp) + 6
    between = target + source + struct.pack("!HH", socket.IPPROTO_TCP, length)
    tcp += struct.pack("!HHH", 0, _checksum(between + tcp), 0)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, socket.IPPROTO_TCP, 0) + target + source
    return ip[:10] + struct.pack("!H", _checksum(ip)) + ip[12:] + tcp


def _checksum(data: bytes) -> int:
    """Return the checksum of IP and TCP, over an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _run(*command: str) -> None:
    if complaint := run_tool(*command):
        raise NetworkUnavailableError(complaint)
