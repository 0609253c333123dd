"""How long it takes to give a newcomer the state, for states of 1 to 256 MB on loopback."""

from __future__ import annotations

import statistics
from copy import copy
from dataclasses import replace

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, PEER_VERSIONS, PEERS, System

MEGABYTES = (1, 16, 64, 256)
COMPARED_MEGABYTES = (1, 16, 64)
DTENSOR_RATIO_MAX = 1.05
SHARDED = replace(OURS, name="torchft_like, DTensors")
CONTESTANTS = (
    OURS,
    *PEERS,
    *(replace(peer, name=f"{peer.name}, 4 chunks", worker_options=("--chunks=4",)) for peer in PEERS),
)
SECONDS_MAX = 60.0
FAR = 1 << 20  # steps of the other kind of state that the same processes transfer

METHOD = [
    "Two processes on one machine, one torch thread each: one offers a state of 1 MB float32 tensors through "
    "its package's HTTPTransport, the other fetches it. The sender's snapshot and the transfer are both "
    "counted, the snapshot also by itself; process start and connection to the lighthouse are not.",
    "The systems take turns. Every fetched state was compared with the offered one by checksum.",
    PEER_VERSIONS,
    "torchft sends the live tensors, unchecked; ours a snapshot with a checksum for every chunk.",
    "DTensors are a rank's shards, as FSDP2 has them; the fetch includes putting them on the receiver's "
    "mesh. The same two processes transfer plain tensors and DTensors, in turns, as two pairs of processes "
    "differ by up to 30 percent. The ratio is that of two transfers of one turn, of 40 turns.",
]


class CorruptStateError(RuntimeError):
    """What was fetched is not what was offered."""


def main(samples: int = 5) -> Result:
    result = Result("heal", "How long does it take to give a newcomer the state?", METHOD)
    with Fleet() as fleet:
        pairs = [_Pair(fleet, system) for system in CONTESTANTS]
        pairs.insert(1, pairs[0].with_dtensors())
        for pair in pairs:
            pair.transfer(1)
        for megabytes in MEGABYTES:
            _measure(result, pairs, megabytes, samples)
        for megabytes in COMPARED_MEGABYTES:
            _compare(result, pairs[0], pairs[1], megabytes, 8 * samples)
    result.save()
    return result


def _measure(result: Result, pairs: list[_Pair], megabytes: int, samples: int) -> None:
    times: dict[str, list[tuple[float, float]]] = {pair.system.name: [] for pair in pairs}
    for turn in range(samples):
        for pair in pairs if turn % 2 else reversed(pairs):
            times[pair.system.name].append(pair.transfer(megabytes))
    for name, of_system in times.items():
        result.add(f"{megabytes} MB", name, "ms", [(offer + fetch) * 1e3 for offer, fetch in of_system])
    for name, of_system in times.items():
        result.add(f"{megabytes} MB, the offer alone", name, "ms", [offer * 1e3 for offer, _ in of_system])


def _compare(result: Result, plain: _Pair, sharded: _Pair, megabytes: int, turns: int) -> None:
    """DTensors over plain tensors, in the same two processes."""
    ratios = []
    for turn in range(turns):
        order = (plain, sharded) if turn % 2 else (sharded, plain)
        seconds = {pair.system.name: sum(pair.transfer(megabytes)) for pair in order}
        ratios.append(seconds[SHARDED.name] / seconds[OURS.name])
    result.add(f"{megabytes} MB, over plain tensors", SHARDED.name, "x", ratios)
    what = f"{megabytes} MB of DTensors over as many of plain tensors, median"
    result.bars.append(Bar(what, statistics.median(ratios), DTENSOR_RATIO_MAX, "x"))


class _Pair:
    """A process that offers states and one that fetches them."""

    def __init__(self, fleet: Fleet, system: System) -> None:
        self.system = system
        self._fleet = fleet
        self._source, self._sink = (self._start(role) for role in ("source", "sink"))
        self._step = 0
        self._dtensors = False

    def with_dtensors(self) -> _Pair:
        """Return the same two processes, with the other kind of state."""
        pair = copy(self)
        pair.system, pair._dtensors, pair._step = SHARDED, True, FAR
        return pair

    def transfer(self, megabytes: int) -> tuple[float, float]:
        """Return the seconds for the offer and for the fetch."""
        self._step += 1
        of = {"megabytes": megabytes, "step": self._step, "dtensors": self._dtensors}
        offered = self._ask(self._source, do="offer", **of)
        fetched = self._ask(self._sink, do="fetch", metadata=offered["metadata"], **of)
        self._ask(self._source, do="withdraw")
        if fetched["checksum"] != offered["checksum"]:
            raise CorruptStateError(f"{self.system.name}: {megabytes} MB arrived with another checksum")
        return float(offered["seconds"]), float(fetched["seconds"])

    def _start(self, role: str) -> FleetProcess:
        script = [self.system.interpreter, "-W", "ignore", str(FOLDER / "heal_worker.py")]
        options = [f"--package={self.system.package}", *self.system.worker_options]
        return self._fleet.start(f"{self.system.name}-{role}", [*script, *options])

    def _ask(self, process: FleetProcess, **command: object) -> Record:
        if not process.records:
            self._fleet.wait_for(lambda: process.records or None, f"start of {process.name}", SECONDS_MAX)
        count = len(process.records)
        process.order(**command)
        return self._fleet.wait_for(
            lambda: process.records[-1] if len(process.records) > count else None,
            f"answer of {process.name} to {command}",
            SECONDS_MAX,
        )
