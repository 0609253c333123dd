"""How long an abort of a blocked all-reduce of two ranks takes, and the configure that follows."""

from __future__ import annotations

from tools.gpu import contenders
from tools.gpu.contenders import BABIES, IN_PROCESS, Contender, meet, ranks_of
from tools.gpu.figures import attempted, median_figure, run_probe

ABORT_BAR_S = 0.2


def main(*, dry: bool) -> None:
    ours_first = sorted((*IN_PROCESS, *BABIES), key=lambda contender: contender.package != contenders.OURS)
    for contender in ours_first:
        attempted(lambda: _measure(contender, 1 if dry else 5, dry=dry), contender.name)  # noqa: B023 - called at once


def _measure(contender: Contender, rounds: int, *, dry: bool) -> None:
    aborts, configures = [], []
    with ranks_of(contender, 2, dry=dry) as ranks:
        for _ in range(rounds):
            aborts.append(ranks[0].ask(contenders.abort_a_blocked_sum, 0))
            configures.append(meet(ranks))
            ranks.ask(contenders.block, 1000, 1, False)
    bar = ABORT_BAR_S if contender.package == contenders.OURS else None
    median_figure(f"{contender.name}: abort", aborts, "s", bar=bar)
    median_figure(f"{contender.name}: configure after it", configures, "s")


if __name__ == "__main__":
    run_probe(main)
