"""Every benchmark, then the plots and the tables: `python -m benchmarks.run`.

Unattended and bounded: a benchmark that fails is reported, the others still run, and the exit status
says that one failed. Tables and plots are made from what is saved.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

from benchmarks import (
    check_collectives,
    divergence,
    group_coordinator,
    growth,
    heal,
    lighthouse_cost,
    lighthouse_page,
    lighthouse_scale,
    loaders,
    local_steps,
    low_communication,
    message_queue,
    native_groups,
    plots,
    process_groups,
    rank_loss,
    recovery,
    slow_links,
    startup,
    step_time,
    tables,
)
from benchmarks.report import MAPPED_LOOPBACK, RESULTS, Result, hosts_name_loopback, load
from benchmarks.systems import PEERS
from tools.environments import UnavailableError


def _of_groups(name: str) -> Callable[[bool], Result]:
    return lambda quick: process_groups.RESULTS[name](
        process_groups.QUICK if quick else process_groups.Plan()
    )


BENCHMARKS: dict[str, Callable[[bool], Result]] = {
    "recovery": lambda quick: recovery.main(recovery.QUICK if quick else recovery.Plan()),
    "rank_loss": lambda quick: rank_loss.main(rank_loss.QUICK if quick else rank_loss.Plan()),
    "startup": lambda quick: startup.main(1 if quick else 5),
    "loaders": lambda quick: loaders.main(loaders.QUICK if quick else loaders.Plan()),
    "step_time": lambda quick: step_time.main(step_time.QUICK if quick else step_time.Plan()),
    "low_communication": lambda quick: low_communication.main(
        low_communication.QUICK if quick else low_communication.Plan()
    ),
    "local_steps": lambda quick: local_steps.main(local_steps.QUICK if quick else local_steps.Plan()),
    "slow_links": lambda quick: slow_links.main(slow_links.QUICK if quick else slow_links.Plan()),
    "heal": lambda quick: heal.main(1 if quick else 5),
    "growth": lambda quick: growth.main(2 if quick else 5),
    "lighthouse_cost": lambda quick: lighthouse_cost.main(lighthouse_cost.QUICK if quick else None),
    "lighthouse_page": lambda quick: lighthouse_page.main(lighthouse_page.QUICK if quick else None),
    "lighthouse_scale": lambda quick: lighthouse_scale.main(lighthouse_scale.QUICK if quick else None),
    "check_collectives": lambda quick: check_collectives.main(
        check_collectives.QUICK if quick else check_collectives.Plan()
    ),
    "divergence": lambda quick: divergence.main(divergence.QUICK if quick else divergence.Plan()),
    **{name: _of_groups(name) for name in process_groups.RESULTS},
    "native_groups": lambda quick: native_groups.main(native_groups.QUICK if quick else native_groups.Plan()),
    "group_coordinator": lambda quick: group_coordinator.main(
        group_coordinator.QUICK if quick else group_coordinator.Plan()
    ),
    "message_queue": lambda quick: message_queue.main(message_queue.QUICK if quick else message_queue.Plan()),
}


def main() -> int:
    options = _options()
    return measure([] if options.tables else options.names, options.quick)


def measure(names: list[str], quick: bool) -> int:
    """Some benchmarks, then the plots and tables of all that is saved; the exit status."""
    if names and not hosts_name_loopback():
        told = (
            "torch's TCPStore asks a name server about %s: /etc/hosts does not name it (benchmarks/README.md)"
        )
        print(told % MAPPED_LOOPBACK, file=sys.stderr)
    failed = _measure_all(names, quick) if names else []
    for name in saved_results():
        plots.plot(load(name))
    tables.write_readme(saved_results())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measure_all(names: list[str], quick: bool) -> list[str]:
    """The names of those that failed."""
    try:
        for system in PEERS:  # each is installed where it is missing
            print(f"{system.peer} runs in {system.interpreter}", flush=True)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return names
    return [name for name in names if not _measure(name, quick)]


def saved_results() -> list[str]:
    """The benchmarks that have a result, of this run or of an earlier one."""
    return [name for name in BENCHMARKS if (RESULTS / f"{name}.json").exists()]


def _measure(name: str, quick: bool) -> bool:
    start = time.monotonic()
    try:
        result = BENCHMARKS[name](quick)
    except Exception:  # noqa: BLE001 - whatever it was, the others are still to be measured
        traceback.print_exc()
        return False
    for bar in result.bars:
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.what}: {bar.measured} (bar: {bar.limit}) {bar.unit}")
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a sample or two of each, to try the benchmarks")
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing: tables and plots of what is saved"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    options.names = options.names or list(BENCHMARKS)
    return options


if __name__ == "__main__":
    sys.exit(main())
