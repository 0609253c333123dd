"""The simulation's command line; docs/testing.md says how to read what it prints.

python -m tests.simulation --seeds 0:100000 --jobs 2    many seeds; the first failures, made small
python -m tests.simulation --seed 7                     one seed, told in words
python -m tests.simulation --mutants                    broken cores, and who is caught when
python -m tests.simulation --size 10000                 one quorum of so many replica groups
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.simulation import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=seeds, default="0:2000", help="FROM:TO, the latter not included")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seed", type=int, help="replay this one and tell it in words")
    parser.add_argument("--all", action="store_true", help="with --seed: all of the history, not made small")
    parser.add_argument("--mutants", action="store_true", help="hunt the broken cores")
    parser.add_argument("--mutant", help="with --seed: replay it with this broken core")
    parser.add_argument("--size", type=int, help="measure one quorum of so many replica groups")
    options = parser.parse_args(arguments)
    if options.size is not None:
        return report.size(options.size)
    if options.seed is not None:
        return report.replay(options.seed, options.mutant, whole=options.all)
    do = report.mutants if options.mutants else report.many
    return do(options.seeds, max(1, options.jobs))


def seeds(text: str) -> range:
    """Read FROM:TO; argparse names this function where it is none."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


if __name__ == "__main__":
    sys.exit(main())
