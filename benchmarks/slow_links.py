"""How long an average over slow links takes, with a byte for each number and with four.

Each rank is a process in a network namespace of its own; the switch of `torchft_like.testing.chaos.network`
carries their packets, at the rate and with the delay of the link.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from torchft_like.testing.chaos.network import Network, Rules
from torchft_like.testing.processes import run_tool

MEGABYTES = 64
RANKS = 2
FORMATS = {"float32": "", "int8": "int8", "fp8": "fp8"}
ERROR_MAX = {"float32": 1e-5, "int8": 0.05, "fp8": 0.7}  # of numbers up to 5.5
PACKET_BYTES = 65_520
WINDOW_BYTES_MAX = 64 << 20  # a gigabit with a round trip of 200 ms has 25 MB under way
SPEEDUP_MIN = 3.3
PORT = 29_600  # in a namespace of its own


class Link(NamedTuple):
    """A link between two hosts, alike in both directions."""

    megabits_per_s: int
    delay_ms: int

    def __str__(self) -> str:
        return f"{self.megabits_per_s:,} Mbit/s, {self.delay_ms} ms each way"


LINKS = tuple(Link(rate, delay) for rate in (1000, 100) for delay in (0, 20, 100))

METHOD = [
    f"{RANKS} processes with one torch thread each average {MEGABYTES} MiB of normal random float32 over "
    "Gloo, by `allreduce` of our group and by `allreduce_quantized`. A sample is the time of the slower "
    "rank; CPU is that of all threads of one rank. Each result was compared with the average.",
    "Each process has a network namespace, and a switch in Python carries the packets: it queues them for "
    "the link's rate, and delays them. Packets have up to 64 KiB, so that it can carry a gigabit, and TCP's "
    "windows up to 64 MiB. The formats take turns on connections that are warm: TCP has found its rate.",
    "The ranks and the switch share the cores; on a real link the switch costs nothing.",
]


@dataclass(frozen=True)
class Plan:
    samples: int = 3
    links: tuple[Link, ...] = LINKS


QUICK = Plan(samples=1, links=LINKS[:2])


def main(plan: Plan = Plan()) -> Result:
    result = Result("slow_links", "How long does an average take over slow links?", METHOD)
    with Fleet() as fleet, Network([f"r{i}" for i in range(RANKS)], fleet.folder, 0, PACKET_BYTES) as network:
        ranks = [_start(fleet, network, host, rank) for rank, host in enumerate(network.hosts)]
        fleet.ask(ranks, do="meet", host=network.address(network.hosts[0]), port=PORT, world_size=RANKS)
        for link in plan.links:
            _measure(result, fleet, network, ranks, link, plan.samples)
    result.save()
    return result


def _measure(
    result: Result, fleet: Fleet, network: Network, ranks: list[FleetProcess], link: Link, samples: int
) -> None:
    hosts = network.hosts
    network.apply(
        Rules(
            delay_s={hosts[0]: link.delay_ms / 1e3},  # of all packets: each is from it or to it
            bytes_per_s=dict.fromkeys(hosts, link.megabits_per_s * 1e6 / 8),
        )
    )
    taken: dict[str, list[list[Record]]] = {name: [] for name in FORMATS}
    for turn in range(samples + 1):
        for name, quantize_to in FORMATS.items():
            records = fleet.ask(ranks, do="allreduce", megabytes=MEGABYTES, quantize_to=quantize_to)
            if any(record["error"] > ERROR_MAX[name] for record in records):
                raise AssertionError(f"{name}: not the average: {records}")
            if turn > 0:  # the first one warms up
                taken[name].append(records)
    seconds = {name: [max(r["seconds"] for r in turn) for turn in turns] for name, turns in taken.items()}
    for name, of_turns in seconds.items():
        speedup = _speedup(seconds, name)
        result.add(str(link), name, "s", of_turns, f"{speedup:.2f} times as fast" if FORMATS[name] else "")
        if FORMATS[name] and link.megabits_per_s == 1000:
            what = f"{MEGABYTES} MiB in {name} over {link}, over float32"
            result.bars.append(Bar(what, 1 / speedup, 1 / SPEEDUP_MIN, "x"))
    if link == LINKS[0]:
        for name, turns in taken.items():
            result.add("CPU of a rank", name, "s", [statistics.fmean(r["cpu"] for r in t) for t in turns])


def _speedup(seconds: dict[str, list[float]], name: str) -> float:
    """Return by how much a format is faster than float32: the median over turns."""
    return statistics.median(a / b for a, b in zip(seconds["float32"], seconds[name], strict=True))


def _start(fleet: Fleet, network: Network, host: str, rank: int) -> FleetProcess:
    for name in ("rmem", "wmem"):
        windows = f"net.ipv4.tcp_{name}=4096 1048576 {WINDOW_BYTES_MAX}"
        if complaint := run_tool(*network.entering(host), "sysctl", "-qw", windows):
            raise RuntimeError(complaint)
    command = [*network.entering(host), sys.executable, "-m", "benchmarks.slow_links_worker", str(rank)]
    return fleet.start(host, command)


if __name__ == "__main__":
    main()
