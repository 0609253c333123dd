"""What an all-reduce costs the thread that asks for it, in a group of one: no byte moves, all else does."""

from __future__ import annotations

from contextlib import ExitStack

from tools.gpu import contenders
from tools.gpu.contenders import BABIES, IN_PROCESS, MANAGED, RAW, Contender, ranks_of
from tools.gpu.figures import attempted, figure, median_figure, run_probe
from torchft_like.testing.ranks import Ranks

ELEMENTS = 1 << 18  # 1 MB
OVER_BARS_US = {"ours": 20.0, "ours, managed": 30.0, "our Baby": 100.0}
STALL_BAR_US = 100.0


def main(*, dry: bool) -> None:
    count, rounds = (20, 2) if dry else (200, 7)
    with ExitStack() as stack:
        alive: dict[Contender, Ranks] = {}
        for contender in (RAW, *IN_PROCESS, *MANAGED, *BABIES):
            ranks = attempted(lambda: stack.enter_context(ranks_of(contender, 1, dry=dry)), contender.name)  # noqa: B023
            if ranks is not None:
                alive[contender] = ranks
        _stall(alive, 50 if dry else 1000)
        for what, fresh in (("the same tensor", False), ("fresh tensors", True)):
            _compare(alive, what, count, rounds, fresh=fresh)


def _compare(alive: dict[Contender, Ranks], what: str, count: int, rounds: int, *, fresh: bool) -> None:
    """Block by block in turn, so that whatever else goes on meets all of them alike."""
    samples: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in alive}
    for turn in range(rounds + 1):
        for contender, ranks in alive.items():
            (sample,) = ranks.ask(contenders.block, ELEMENTS, count, fresh)
            if turn:  # the first one warms up
                samples[contender.name].append(sample)
    threads = {}
    for name, of_one in samples.items():
        threads[name] = median_figure(f"{name}, {what}", [thread for thread, _ in of_one], "µs")
        median_figure(f"{name}, {what}, all threads", [processor for _, processor in of_one], "µs of CPU")
    for name, bar in OVER_BARS_US.items():
        if name in threads and "raw" in threads:
            figure(
                f"{name}, {what}, over raw", threads[name] - threads["raw"], "µs", bar=None if fresh else bar
            )
    if {"our Baby", "torchft's Baby"} <= threads.keys():
        ratio = threads["our Baby"] / threads["torchft's Baby"]
        figure(f"our Baby over torchft's, {what}", ratio, "x", bar=None if fresh else 1 / 3)


def _stall(alive: dict[Contender, Ranks], count: int) -> None:
    for contender in (RAW, *IN_PROCESS):
        if contender in alive:
            ((typical, slowest),) = alive[contender].ask(contenders.stalls, count)
            name = f"{contender.name}: {count} operations in flight, a call"
            figure(f"{name}, median", typical, "µs")
            figure(f"{name}, slowest", slowest, "µs", bar=STALL_BAR_US if contender.name == "ours" else None)


if __name__ == "__main__":
    run_probe(main)
