"""What the process groups cost, beside torch's own Gloo group and torchft's.

Three results: the latency of an allreduce, the time of a `configure`, and the memory of what a Baby
group starts. All groups are alive at the same time and take turns in short blocks, so that whatever
else the machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, PEER_VERSIONS, PEERS, System, start_lighthouse

SECONDS_MAX = 60.0
SIZE_SECONDS_MAX = 75.0  # for all rounds of a size, of a number of ranks, and of fresh processes
COUNT_SECONDS_MAX = 40.0
CLASSES_SECONDS_MAX = 60.0
AGAIN_SECONDS_MAX = 20.0
RAW = "torch's Gloo"
SHARED = ", shared memory"
OVER_BYTES_MIN = 1024  # what a group adds to a small operation is told in µs, to a large one as a factor


@dataclass(frozen=True)
class Contestant:
    """One class of one package; `name` is its column."""

    name: str
    package: System
    group: str

    @property
    def is_baby(self) -> bool:
        return self.group.startswith("Baby")

    @property
    def color(self) -> str:
        return "tab:gray" if self.group == "raw" else self.package.color


CONTESTANTS = (
    Contestant(RAW, OURS, "raw"),
    Contestant("Gloo", OURS, "Gloo"),
    Contestant("ErrorSwallowing", OURS, "ErrorSwallowing"),
    Contestant("Managed", OURS, "Managed"),
    Contestant("BabyGloo", OURS, "BabyGloo"),
    *(
        Contestant(f"{peer.name}'s {group}", peer, group)
        for peer in PEERS
        for group in ("Gloo", "Managed", "BabyGloo")
    ),
)


@dataclass(frozen=True)
class Size:
    """How much is summed, how often in one block, and how many times as many rounds that takes.

    What a group adds to an operation of some 80 µs is told apart from noise by many rounds only. And by
    keeping each rank, the backend's threads included, on a core of its own, as launchers of big jobs do:
    where the system is free to move threads, it is they that most of the time goes to.
    """

    name: str
    nbytes: int
    repeats: int
    rounds_times: int = 1
    is_bound: bool = False

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        """The classes for which the question makes sense: a Baby group has more processes than
        ranks.
        """
        return tuple(c for c in CONTESTANTS if not (self.is_bound and c.is_baby))


SIZES = (
    Size("4 B", 4, 200, rounds_times=3),
    Size("4 B, own cores", 4, 200, rounds_times=3, is_bound=True),
    Size("64 KB", 64 * 1024, 100),
    Size("1 MB", 1024**2, 25),
    Size("64 MB", 64 * 1024**2, 3),
)


@dataclass(frozen=True)
class Plan:
    """How long it may take."""

    rounds: int = 15
    fresh_pairs: int = 3
    reconfigurations: int = 10
    rank_counts: tuple[int, ...] = (2, 4, 8, 16, 32)
    growth_rounds: int = 8


QUICK = Plan(rounds=2, fresh_pairs=1, reconfigurations=2, rank_counts=(2, 4), growth_rounds=2)


class Pair:
    """Two processes of one package, which hold one group of every kind that is asked for."""

    def __init__(self, fleet: Fleet, system: System, store: int) -> None:
        self._fleet = fleet
        self.system = system
        self.lighthouse = start_lighthouse(fleet, system, min_replicas=2)
        command = [system.interpreter, "-W", "ignore", str(FOLDER / "group_worker.py")]
        options = [
            f"--package={system.package}",
            f"--store={store}",
            f"--lighthouse={self.lighthouse.address}",
        ]
        self.ranks = [
            fleet.start(f"{system.name}-{rank}", [*command, *options, f"--rank={rank}"]) for rank in range(2)
        ]

    def ask(self, **command: object) -> list[Record]:
        """Return the answers of both ranks to the same command."""
        return self._fleet.ask(self.ranks, **command)

    def meet(self, do: str, group: str) -> float:
        """Make or configure a group; return the seconds of the slower rank."""
        answers = self.ask(do=do, group=group, prefix=fresh_prefix())
        return max(float(answer["seconds"]) for answer in answers)

    def allreduce(self, group: str, size: Size, shared: bool) -> list[float]:
        """Return the seconds of each operation of a block, on rank 0."""
        answers = self.ask(
            do="allreduce", group=group, bytes=size.nbytes, shared=shared, repeats=size.repeats
        )
        return list(answers[0]["seconds"])

    def end(self) -> None:
        """End both ranks, whatever they have started, and the lighthouse."""
        started = [
            child for rank in self.ranks for child in psutil.Process(rank.pid).children(recursive=True)
        ]
        for process in (*self.ranks, self.lighthouse.process):
            process.signal(signal.SIGKILL)
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for process in (*self.ranks, self.lighthouse.process):
            process.wait()


_prefixes = itertools.count()


def fresh_prefix() -> str:
    """Return a prefix of keys in the store that was never used before."""
    return f"benchmark/{next(_prefixes)}"


def turns(rounds: int, seconds_max: float) -> Iterator[int]:
    """Yield 0 to warm up, then up to `rounds` more: as many as fit into the time, but two at the least."""
    begin = time.monotonic()
    for turn in range(rounds + 1):
        if turn > 2 and time.monotonic() - begin > seconds_max:
            return
        yield turn


def start_store(fleet: Fleet) -> int:
    """Start a store, and return its port."""
    process = fleet.start("store", [sys.executable, str(FOLDER / "group_store.py")])
    return int(fleet.record(process)["port"])


# ----------------------------------------------------------------------------- allreduce


ALLREDUCE_METHOD = [
    "2 ranks in 2 processes for each package, one torch thread each, all groups on loopback. A block is "
    + ", ".join(f"{size.repeats} sums of {size.name}" for size in SIZES)
    + "; the groups take turns, block by block. A sample is the median (or the mean, or "
    "the 90th percentile) of a block on rank 0, from the call to the end of `wait`.",
    "Managed: with a real Manager (one replica group per rank) and the package's own lighthouse; a block is "
    "a step. In shared memory: the tensor's storage was moved there before (`share_memory_`); else it is "
    "an ordinary tensor, which a Baby group has to copy.",
    "Added: the block's median minus that of torch's own ProcessGroupGloo in the same round; over: divided "
    "by it. With two processes on two cores, what one rank adds to its own call delays the other, too. Own "
    "cores: each rank, with the threads of its groups, was bound to one; else the system moves them.",
    PEER_VERSIONS,
]


def allreduce(plan: Plan) -> Result:
    """Measure the latency of an allreduce."""
    result = Result("process_groups", "What does an allreduce cost in each process group?", ALLREDUCE_METHOD)
    with Fleet() as fleet:
        store = start_store(fleet)
        pairs = {system: Pair(fleet, system, store) for system in (OURS, *PEERS)}
        for contestant in CONTESTANTS:
            pairs[contestant.package].meet("make", contestant.group)
        for size in SIZES:
            _measure_size(result, pairs, size, plan.rounds)
    _judge_allreduce(result)
    result.save()
    return result


def _measure_size(result: Result, pairs: dict[System, Pair], size: Size, rounds: int) -> None:
    blocks: dict[str, list[list[float]]] = {}
    for pair in pairs.values():
        pair.ask(do="bind", is_bound=size.is_bound)
    for turn in turns(rounds * size.rounds_times, SIZE_SECONDS_MAX):
        for contestant, shared in _blocks_of_a_round(size):
            seconds = pairs[contestant.package].allreduce(contestant.group, size, shared)
            if turn > 0:  # the first is to warm up
                name = f"{contestant.name}{SHARED if shared else ''}"
                blocks.setdefault(name, []).append(seconds)
    raw = [statistics.median(block) for block in blocks[RAW]]
    for name, of_one in blocks.items():
        medians = [statistics.median(block) for block in of_one]
        result.add(size.name, name, "ms", [median * 1e3 for median in medians])
        result.add(f"{size.name}, mean", name, "ms", [statistics.fmean(block) * 1e3 for block in of_one])
        result.add(f"{size.name}, 90th percentile", name, "ms", [_percentile_90(b) * 1e3 for b in of_one])
        if name != RAW and size.nbytes < OVER_BYTES_MIN:
            added = [(median - base) * 1e6 for median, base in zip(medians, raw, strict=True)]
            result.add(f"{size.name}, added", name, "µs", added)
        elif name != RAW:
            over = [median / base for median, base in zip(medians, raw, strict=True)]
            result.add(f"{size.name}, over {RAW}", name, "x", over)


def _blocks_of_a_round(size: Size) -> Iterable[tuple[Contestant, bool]]:
    for contestant in size.contestants:
        yield contestant, False
        if contestant.is_baby:
            yield contestant, True


def _percentile_90(values: list[float]) -> float:
    return sorted(values)[len(values) * 9 // 10]


def _judge_allreduce(result: Result) -> None:
    for case in ("4 B", "4 B, own cores"):
        for name in ("Gloo", "ErrorSwallowing", "Managed"):
            added = result.median(f"{case}, added", name)
            result.bars.append(Bar(f"{name}: allreduce of {case}, added to torch's Gloo", added, 15, "µs"))
    baby = f"BabyGloo{SHARED}"
    result.bars.append(Bar(f"{baby}: 4 B allreduce", result.median("4 B", baby), 0.25, "ms"))
    for size, limit in (("64 KB", 2.0), ("64 MB", 1.05)):
        over = result.median(f"{size}, over {RAW}", baby)
        result.bars.append(Bar(f"{baby}: {size} allreduce, over {RAW}", over, limit, "x"))


# ----------------------------------------------------------------------------- configure


CONFIGURE_METHOD = [
    "Each class: 2 ranks in 2 processes; a sample is the slower rank's time. First: of fresh processes, the "
    "making of the object included. Again: the same object, from its second `configure` on.",
    "n ranks: n processes, forked from one that has imported the package, one after the other the same "
    "store, a TCPStore in a process of its own. A sample runs from the word to all ranks until the last of "
    "them is configured; the first is not counted.",
    f"{RAW}: a new client of the store, a new device and a new group, as `new_group` makes them; the "
    "destruction of the group before is outside the time. The others end the one before inside it.",
    PEER_VERSIONS,
    "The nightly has no `configure`: its users call `reconfigure_with_store`, which exchanges "
    "handles through the store first.",
]
CONFIGURED = tuple(contestant for contestant in CONTESTANTS if contestant.group not in ("raw", "Managed"))
GROWING = (
    (RAW, "torch", OURS),
    *((c.name, c.package.package, c.package) for c in CONTESTANTS if c.group == "Gloo"),
)


def configure(plan: Plan) -> Result:
    """Measure the time of a `configure`."""
    result = Result("configure", "How long does a configure take?", CONFIGURE_METHOD)
    with Fleet() as fleet:
        store = start_store(fleet)
        _measure_classes(result, fleet, store, plan)
        for count in plan.rank_counts:
            _measure_growth(result, fleet, store, count, plan.growth_rounds)
    again = result.median("configure, again", "BabyGloo")
    result.bars.append(Bar("BabyGloo: configure of 2 ranks, from the second on", again, 0.045e3, "ms"))
    result.save()
    return result


def _measure_classes(result: Result, fleet: Fleet, store: int, plan: Plan) -> None:
    first: dict[str, list[float]] = {contestant.name: [] for contestant in CONFIGURED}
    again: dict[str, list[float]] = {contestant.name: [] for contestant in CONFIGURED}
    for _ in turns(plan.fresh_pairs - 1, CLASSES_SECONDS_MAX):
        pairs = {system: Pair(fleet, system, store) for system in (OURS, *PEERS)}
        for contestant in CONFIGURED:
            first[contestant.name].append(pairs[contestant.package].meet("make", contestant.group))
        for _ in turns(plan.reconfigurations - 1, AGAIN_SECONDS_MAX):
            for contestant in CONFIGURED:
                again[contestant.name].append(pairs[contestant.package].meet("configure", contestant.group))
        for pair in pairs.values():
            pair.end()
    for case, times in (("first", first), ("again", again)):
        for name, seconds in times.items():
            result.add(f"configure, {case}", name, "ms", [second * 1e3 for second in seconds])


def _measure_growth(result: Result, fleet: Fleet, store: int, count: int, rounds: int) -> None:
    hosts = {name: _start_ranks(fleet, package, system, store, count) for name, package, system in GROWING}
    times: dict[str, list[float]] = {name: [] for name in hosts}
    for turn in turns(rounds, COUNT_SECONDS_MAX):
        for name, host in hosts.items():
            (answer,) = fleet.ask([host], do="configure", prefix=fresh_prefix())
            if turn > 0:
                times[name].append(float(answer["seconds"]) * 1e3)
    for name, host in hosts.items():
        result.add(f"configure of Gloo, {count} ranks", name, "ms", times[name], at=count)
        host.kill()


def _start_ranks(fleet: Fleet, package: str, system: System, store: int, count: int) -> FleetProcess:
    command = [system.interpreter, "-W", "ignore", str(FOLDER / "group_ranks.py"), f"--package={package}"]
    return fleet.start(f"{package}-ranks", [*command, f"--ranks={count}", f"--store={store}"])


# -------------------------------------------------------------------------------- memory


MEMORY_METHOD = [
    "2 ranks, each with one Baby Gloo group, after 10 allreduces of 1 MB; a sample is a process. USS: what "
    "only this process holds; PSS: with its share of what it shares (libraries, the fork server's pages).",
    "Ours: the server has torch loaded and forks; the child runs the backend; the spare waits for the next "
    "configure; server and spare serve all Baby groups of a process. torchft: every group spawns a child.",
    PEER_VERSIONS,
]


def memory(plan: Plan) -> Result:
    """Measure the memory of what a Baby group starts."""
    result = Result("baby_memory", "How much memory does a Baby group take?", MEMORY_METHOD)
    found: dict[tuple[str, str], list[float]] = {}
    with Fleet() as fleet:
        store = start_store(fleet)
        for name, system in [(c.name, c.package) for c in CONTESTANTS if c.is_baby]:
            pair = Pair(fleet, system, store)
            pair.meet("make", "BabyGloo")
            pair.meet("configure", "BabyGloo")
            pair.allreduce("BabyGloo", Size("1 MB", 1024**2, 10), False)
            for role, kind, megabytes in _memory_of(pair):
                found.setdefault((f"{kind}, {role}", name), []).append(megabytes)
            pair.end()
    for (case, name), samples in found.items():
        result.add(case, name, "MB", samples)
    for role in ("child", "spare"):
        own = result.median(f"USS, {role}", "BabyGloo")
        result.bars.append(Bar(f"BabyGloo: memory of its own, {role}", own, 40, "MB"))
    result.save()
    return result


def _memory_of(pair: Pair) -> Iterable[tuple[str, str, float]]:
    """Return the role, the kind of memory and MB of every process that the pair has started."""
    for rank, answer in zip(pair.ranks, _await_spares(pair), strict=True):
        roles = {pid: role for role, pid in answer["roles"].items()}
        for process in psutil.Process(rank.pid).children(recursive=True):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            used = process.memory_full_info()
            role = roles.get(process.pid, "helper")
            yield role, "USS", used.uss / 1e6
            yield role, "PSS", used.pss / 1e6


def _await_spares(pair: Pair) -> list[Record]:
    """Wait until our groups have made their spares, on another thread; return the answers."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        answers = pair.ask(do="roles", group="BabyGloo")
        if pair.system is not OURS or all("spare" in answer["roles"] for answer in answers):
            return answers
        if time.monotonic() > deadline:
            raise TimeoutError(f"no spare within {SECONDS_MAX} s: {answers}")
        time.sleep(0.05)


RESULTS: dict[str, Any] = {"process_groups": allreduce, "configure": configure, "baby_memory": memory}
