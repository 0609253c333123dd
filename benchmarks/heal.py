"""How long it takes to give a newcomer the state, for states of 1 MB to 1 GB on loopback, and what memory."""

from __future__ import annotations

import statistics
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, PEER_VERSIONS, PEERS, TRUSTED, System, with_and_without_trust
from torchft_like.runtime.environment import environment

MEGABYTES = (1, 16, 64, 256, 1024)
GB_PER_S_MIN = 2.5
PEER_RATIO_MIN = 1.5
MEMORY_RATIO_MAX = 1.1
COMPARED_MEGABYTES = (1, 16, 64)
DTENSOR_RATIO_MAX = 1.05
ENCRYPTED = replace(OURS, name=f"{OURS.name}, {TRUSTED}")
SHARDED = replace(OURS, name="torchft_like, DTensors")
CONTESTANTS = (
    OURS,
    *PEERS,
    *(replace(peer, name=f"{peer.name}, 4 chunks", worker_options=("--chunks=4",)) for peer in PEERS),
)
PLAIN = {"a plain connection": False, "a plain connection, checksums": True}
LINK_GBITS, LINK_SOURCES, LINK_MEGABYTES = 1, 3, 256
SPEEDUP_MIN = 2.5
FAR = 1 << 20  # steps of the other kind of state that the same processes transfer

METHOD = [
    "Two processes on one machine, one torch thread each: one offers a state of 1 MB float32 tensors through "
    "its package's HTTPTransport; the other fetches it and copies it into tensors of its own, as a model's "
    "load_state_dict does. As in a job, the receiver asks before the state is offered. The time is that from "
    "the beginning of the offer until the receiver's tensors hold the state; process start and connection to "
    "the lighthouse are not in it. The offer alone is what the source's training waits for; torchft's waits "
    "at the end of the offer.",
    "The systems take turns. Every fetched state was compared with the offered one by checksum.",
    PEER_VERSIONS,
    "torchft sends the live tensors, unchecked, while its source's training waits; ours sends them while "
    "they are taken at least as fast as it could copy them, or else a copy, with checksums on both sides.",
    "A plain connection shows what the machine gives: as many bytes between the same two processes, from and "
    "into memory that was used before, with no copies but the kernel's, and a CRC-32 of them on both sides "
    "or none.",
    "Memory is the highest use of each process during a transfer, beside what it had before and could not be "
    "taken from it.",
    "DTensors are a rank's shards, as FSDP2 has them; the fetch includes putting them on the receiver's "
    "mesh. The same two processes transfer plain tensors and DTensors, in turns, as two pairs of processes "
    "differ by up to 30 percent. The ratio is that of two transfers of one turn, of 40 turns.",
    f"Several sources: {LINK_SOURCES} processes offer the same state, and a fourth one fetches it from one "
    f"of them, or from all. The kernel paces what each sends to {LINK_GBITS} Gbit/s (SO_MAX_PACING_RATE).",
]


class CorruptStateError(RuntimeError):
    """What was fetched is not what was offered."""


def main(samples: int = 5) -> Result:
    result = Result("heal", "How long does it take to give a newcomer the state?", METHOD)
    with Fleet() as fleet, with_and_without_trust() as kinds:
        pairs = [_Pair(fleet, system) for system in CONTESTANTS]
        pairs.insert(1, pairs[0].with_dtensors())
        with environment(kinds[TRUSTED]):
            pairs.insert(2, _Pair(fleet, ENCRYPTED))
        for pair in pairs:
            pair.transfer(1)
        for megabytes in MEGABYTES:
            _measure(result, pairs, megabytes, samples)
        for megabytes in COMPARED_MEGABYTES:
            _compare(result, pairs[0], pairs[1], megabytes, 8 * samples)
        measure_links(result, fleet, samples)
    result.save()
    return result


def _measure(result: Result, pairs: list[_Pair], megabytes: int, samples: int) -> None:
    taken: dict[str, list[_Transfer]] = {pair.system.name: [] for pair in pairs}
    for turn in range(samples):
        for pair in pairs if turn % 2 else reversed(pairs):
            taken[pair.system.name].append(pair.transfer(megabytes))
    state = f"{megabytes} MB"
    for name, of_system in taken.items():
        result.add(state, name, "ms", [transfer.seconds * 1e3 for transfer in of_system])
    for name, of_system in taken.items():
        result.add(
            f"{state}, the offer alone", name, "ms", [transfer.offer_s * 1e3 for transfer in of_system]
        )
    if megabytes == MEGABYTES[-1]:
        for pair in pairs[2:]:
            pair.end()  # for their memory, of which they have given little back
        for name, sums in PLAIN.items():
            seconds = [pairs[0].pass_bytes(megabytes, sums) for _ in range(samples)]
            result.add(state, name, "ms", [one * 1e3 for one in seconds])
        for name, of_system in taken.items():
            memory = [transfer.extra_bytes / (megabytes << 20) for transfer in of_system]
            result.add(f"{state}, extra memory of both over the state's", name, "x", memory)
        _judge(result, taken, megabytes)


def _judge(result: Result, taken: dict[str, list[_Transfer]], megabytes: int) -> None:
    seconds = {name: statistics.median([t.seconds for t in taken[name]]) for name in taken}
    best = min(seconds[name] for name in seconds if name not in (OURS.name, SHARDED.name, ENCRYPTED.name))
    memory = statistics.median([transfer.extra_bytes for transfer in taken[OURS.name]])
    gigabytes = (megabytes << 20) / 1e9
    result.bars += [
        Bar(f"seconds for each GB of {megabytes} MB", seconds[OURS.name] / gigabytes, 1 / GB_PER_S_MIN, "s"),
        Bar(f"{megabytes} MB over the best torchft's", seconds[OURS.name] / best, 1 / PEER_RATIO_MIN, "x"),
        Bar("extra memory of both over the state's", memory / (megabytes << 20), MEMORY_RATIO_MAX, "x"),
    ]


def _compare(result: Result, plain: _Pair, sharded: _Pair, megabytes: int, turns: int) -> None:
    """DTensors over plain tensors, in the same two processes."""
    ratios = []
    for turn in range(turns):
        order = (plain, sharded) if turn % 2 else (sharded, plain)
        seconds = {pair.system.name: pair.transfer(megabytes).seconds for pair in order}
        ratios.append(seconds[SHARDED.name] / seconds[OURS.name])
    result.add(f"{megabytes} MB, over plain tensors", SHARDED.name, "x", ratios)
    what = f"{megabytes} MB of DTensors over as many of plain tensors, median"
    result.bars.append(Bar(what, statistics.median(ratios), DTENSOR_RATIO_MAX, "x"))


def measure_links(result: Result, fleet: Fleet, samples: int) -> None:
    """Fetch from one source and from several, each behind a link of its own."""
    options = (f"--link={LINK_GBITS}",)
    sources = [start_end(fleet, OURS, f"linked-source{number}", *options) for number in range(LINK_SOURCES)]
    sink = start_end(fleet, OURS, "linked-sink")
    taken: dict[int, list[float]] = {1: [], LINK_SOURCES: []}
    step = 0
    for _ in range(samples):
        for count, seconds in taken.items():
            step += 1
            state = {"step": step, "megabytes": LINK_MEGABYTES, "dtensors": False}
            prepared = fleet.ask(sources[:count], do="prepare", **state)
            fleet.ask([sink], do="prepare", **{**state, "step": -step})
            fetching = fleet.begin(
                sink, do="fetch", metadata=[one["metadata"] for one in prepared], step=step
            )
            offered = fleet.ask(sources[:count], do="offer", step=step)
            fetched = fetching()
            fleet.ask(sources[:count], do="withdraw")
            if fetched["checksum"] != prepared[0]["checksum"]:
                raise CorruptStateError(f"what {count} sources sent arrived with another checksum")
            seconds.append(float(fetched["ended"]) - min(float(one["began"]) for one in offered))
    for count, seconds in taken.items():
        case = f"{LINK_MEGABYTES} MB, {count} source{'s' * (count > 1)} of {LINK_GBITS} Gbit/s"
        result.add(case, OURS.name, "ms", [one * 1e3 for one in seconds])
    one, several = (statistics.median(seconds) for seconds in taken.values())
    what = f"{LINK_MEGABYTES} MB from {LINK_SOURCES} sources of {LINK_GBITS} Gbit/s over that from one"
    result.bars.append(Bar(what, several / one, 1 / SPEEDUP_MIN, "x"))


def start_end(fleet: Fleet, system: System, name: str, *options: str) -> FleetProcess:
    """Start a process that is one end of transfers."""
    command = [system.interpreter, "-W", "ignore", str(FOLDER / "heal_worker.py")]
    return fleet.start(name, [*command, f"--package={system.package}", *system.worker_options, *options])


class _Transfer(NamedTuple):
    """What one transfer took: seconds, those of the offer alone, and bytes of memory."""

    seconds: float
    offer_s: float
    extra_bytes: int


class _Pair:
    """A process that offers states and one that fetches them."""

    def __init__(self, fleet: Fleet, system: System) -> None:
        self.system = system
        self._fleet = fleet
        self._source, self._sink = (
            start_end(fleet, system, f"{system.name}-{role}") for role in ("source", "sink")
        )
        self._step = 0
        self._dtensors = False

    def with_dtensors(self) -> _Pair:
        """Return the same two processes, with the other kind of state."""
        pair = copy(self)
        pair.system, pair._dtensors, pair._step = SHARDED, True, FAR
        return pair

    def transfer(self, megabytes: int) -> _Transfer:
        """Give the receiver the state of the source."""
        self._step += 1
        of = {"megabytes": megabytes, "dtensors": self._dtensors}
        prepared = self._ask(self._source, do="prepare", step=self._step, **of)
        self._ask(self._sink, do="prepare", step=-self._step, **of)
        fetching = self._fleet.begin(self._sink, do="fetch", metadata=[prepared["metadata"]], step=self._step)
        offered = self._ask(self._source, do="offer", step=self._step)
        fetched = fetching()
        withdrawn = self._ask(self._source, do="withdraw")
        if fetched["checksum"] != prepared["checksum"]:
            raise CorruptStateError(f"{self.system.name}: {megabytes} MB arrived with another checksum")
        seconds = float(fetched["ended"]) - float(offered["began"])
        extra_bytes = int(withdrawn["bytes"]) + int(fetched["bytes"])
        return _Transfer(seconds, float(offered["seconds"]), extra_bytes)

    def end(self) -> None:
        """End both processes."""
        self._source.kill()
        self._sink.kill()

    def pass_bytes(self, megabytes: int, sums: bool) -> float:
        """Return the seconds that as many bytes take over a plain connection between the two processes."""
        bytes_ = {"megabytes": megabytes, "sums": sums}
        port = self._ask(self._source, do="listen", **bytes_)["port"]
        return float(self._ask(self._sink, do="drain", port=port, **bytes_)["seconds"])

    def _ask(self, process: FleetProcess, **command: object) -> Record:
        return self._fleet.ask([process], **command)[0]
