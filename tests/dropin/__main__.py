"""`make dropin` runs every upstream script, one after the other, and prints a table at the end."""

from __future__ import annotations

import argparse
import sys
import time

from tests.dropin.run import Outcome, run_script
from tests.dropin.scripts import SCRIPTS
from tests.dropin.table import RESULTS, save, table

LIMIT_S = 20 * 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dropin", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="run the scripts whose names contain one of these; all by default"
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} and docs/dropin.md")
    arguments = parser.parse_args()
    names = [script.name.lower() for script in SCRIPTS]
    for word in arguments.words:
        if not any(word.lower() in name for name in names):
            parser.error(f"no script has {word} in its name; there are: {', '.join(names)}")
    deadline = time.monotonic() + LIMIT_S
    outcomes: list[Outcome] = []
    try:
        for script in SCRIPTS:
            if not arguments.words or any(word.lower() in script.name.lower() for word in arguments.words):
                outcomes.append(run_script(script, deadline - time.monotonic()))
                print(table(outcomes[-1:]), flush=True)
    finally:
        print(f"\n{table(outcomes)}\n", flush=True)
    if arguments.save:
        save(outcomes)
    for outcome in outcomes:
        if outcome.not_run:
            print(f"NOT RUN: {outcome.name}: {outcome.not_run}")
        if outcome.failed:
            print(f"FAILED: {outcome.name}: {outcome.failed}")
    return any(outcome.failed for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
