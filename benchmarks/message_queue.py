"""What a message costs, beside vLLM's queue and what Python and torch have for it.

Four processes: one writer, three readers. All ways of sending take turns in short blocks, so that
whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

from benchmarks.process_groups import start_store, turns
from benchmarks.processes import Fleet, FleetProcess
from benchmarks.queue_worker import PAYLOADS, RANKS
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER
from benchmarks.vllm_queue import PEER, queue_source
from tools.environments import UnavailableError

QUEUE = "MessageQueue"
PIPE = "multiprocessing's connection"
VLLM = "vLLM's MessageQueue"
OBJECT_LIST = "broadcast_object_list"
CASE_SECONDS_MAX = 30.0
WAKE = "one-way, 100 B, to a reader that has been asleep"
# The case, seconds of silence before each message, and whether the writer works meanwhile.
SILENCES = (
    ("one-way, 100 B, from a writer that has been asleep for a moment", 50e-6, False),
    (WAKE, 0.02, True),
    ("one-way, 100 B, where both have been asleep", 0.02, False),
)
LIMITS_US = {"10 B": 17, "100 B": 17, "1 KB": 17, "1 MB": 280, "array of 1 MB": 280}

METHOD = [
    "4 processes, one torch thread each: one writes, three read. One-way: from the call of `enqueue` to the "
    "return of `dequeue` in the other process, on the clock that all processes share; the next message is "
    "sent when the reader has confirmed the last. A sample is the median (or the 99th percentile) of a block "
    "of 500 messages, 100 of 1 MB or more; the ways of sending take turns, block by block.",
    "Asleep: 20 ms of silence before each message, so that the reader sleeps. The writer works meanwhile (it "
    "multiplies matrices, it dumps and loads JSON) or sleeps as well, and then it is both that have to wake "
    "and find their caches cold; the bar is about readers, hence about the first. For a moment: the writer "
    "asks for 50 µs of sleep and gets some more, and the reader still watches. Idle: the processor time of a "
    "reader that waits for 3 s, as a share of a core.",
    f"vLLM's is that of {PEER}, as large as vLLM makes it for its workers. It pickles, and whoever waits "
    "turns round until there is something, so that its readers need not wake.",
    "Broadcast: a dict of some numbers and words, from the call on the writer to the moment when the last of "
    "three readers has the object; the next one when all have confirmed the last. `broadcast_object_list` is "
    "over Gloo, in the same processes. A sample is the median of a block of 100.",
    "multiprocessing's connection is a Unix socket with pickle.",
]


@dataclass(frozen=True)
class Plan:
    """How long it may take."""

    rounds: int = 15
    idle_seconds: float = 3.0


QUICK: Plan = Plan(rounds=2, idle_seconds=1.0)


def main(plan: Plan) -> Result:
    """The time of messages, and what waiting for them costs."""
    result = Result("message_queue", "What does a message through the queue cost?", METHOD)
    vllm = _vllm_source()
    vias = [QUEUE, PIPE, *([VLLM] if vllm else [])]
    with Fleet() as fleet:
        store = start_store(fleet)
        command = [sys.executable, "-W", "ignore", str(FOLDER / "queue_worker.py"), f"--store={store}", *vllm]
        ranks = [fleet.start(f"rank-{rank}", [*command, f"--rank={rank}"]) for rank in range(RANKS)]
        for payload in PAYLOADS:
            _measure_one_way(result, fleet, ranks, payload, plan.rounds, vias)
        _measure_after_silence(result, fleet, ranks, plan.rounds, vias)
        for via in vias:
            idle = [fleet.ask(ranks, do="idle", via=via, seconds=plan.idle_seconds)[1] for _ in range(3)]
            result.add("idle reader", via, "% of a core", [answer["percent"] for answer in idle])
        _measure_broadcast(result, fleet, ranks, plan.rounds)
    _judge(result)
    result.save()
    return result


def _vllm_source() -> list[str]:
    try:
        return [f"--vllm={queue_source()}"]
    except UnavailableError as error:
        print(f"message_queue: without vLLM's: {error}", file=sys.stderr)
        return []


def _measure_one_way(
    result: Result, fleet: Fleet, ranks: list[FleetProcess], payload: str, rounds: int, vias: list[str]
) -> None:
    count = 100 if "MB" in payload else 500
    blocks: dict[str, list[list[float]]] = {via: [] for via in vias}
    for turn in turns(rounds, CASE_SECONDS_MAX):
        for via, of_one in blocks.items():
            answers = fleet.ask(ranks, do="one_way", via=via, payload=payload, count=count)
            if turn > 0:  # the first is to warm up
                of_one.append(answers[1]["us"])
    for via, of_one in blocks.items():
        result.add(f"one-way, {payload}", via, "µs", map(statistics.median, of_one))
        result.add(f"one-way, {payload}, 99th percentile", via, "µs", map(_percentile_99, of_one))


def _measure_after_silence(
    result: Result, fleet: Fleet, ranks: list[FleetProcess], rounds: int, vias: list[str]
) -> None:
    for case, pause, works in SILENCES:
        found: dict[str, list[float]] = {via: [] for via in vias}
        for _ in range(rounds):
            for via, samples in found.items():
                answers = fleet.ask(
                    ranks, do="one_way", via=via, payload="100 B", count=20, pause=pause, works=works
                )
                samples.append(statistics.median(answers[1]["us"]))
        for via, samples in found.items():
            result.add(case, via, "µs", samples)


def _measure_broadcast(result: Result, fleet: Fleet, ranks: list[FleetProcess], rounds: int) -> None:
    found: dict[str, list[float]] = {QUEUE: [], OBJECT_LIST: []}
    for turn in turns(rounds, CASE_SECONDS_MAX):
        for via, samples in found.items():
            sent, *received = (
                answer["ns"] for answer in fleet.ask(ranks, do="broadcast", via=via, count=100)
            )
            if turn > 0:
                times = [
                    max(last) - start for start, last in zip(sent, zip(*received, strict=True), strict=True)
                ]
                samples.append(statistics.median(times) / 1e3)
    for via, samples in found.items():
        result.add("broadcast to 3 readers", via, "µs", samples)
    shares = [ours / theirs for ours, theirs in zip(found[QUEUE], found[OBJECT_LIST], strict=True)]
    result.add("broadcast to 3 readers, of the time of broadcast_object_list", QUEUE, "x", shares)


def _judge(result: Result) -> None:
    for payload, limit in LIMITS_US.items():
        median = result.median(f"one-way, {payload}", QUEUE)
        result.bars.append(Bar(f"MessageQueue one-way, {payload}", median, limit, "µs"))
        if (ratio := result.ratio(f"one-way, {payload}", QUEUE, over=VLLM)) is not None:
            result.bars.append(
                Bar(f"MessageQueue one-way, {payload}, of vLLM's in the same run", ratio, 1, "x")
            )
    wake = result.median(WAKE, QUEUE)
    result.bars.append(Bar("MessageQueue: an idle reader wakes", wake, 250, "µs"))
    result.bars.append(
        Bar("MessageQueue: idle reader", result.median("idle reader", QUEUE), 1, "% of a core")
    )
    share = result.median("broadcast to 3 readers, of the time of broadcast_object_list", QUEUE)
    result.bars.append(Bar("MessageQueue: broadcast to 3 readers, of broadcast_object_list", share, 0.1, "x"))


def _percentile_99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]
