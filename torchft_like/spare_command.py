"""The command `torchft-like spare`: a process that waits for the place of a rank that has died.

    torchft-like spare train.py --its --arguments
    torchft-like spare -m package.train --its --arguments

It is `TORCHFT_SPARE=rank python ...`: the script's training function has to be `restartable`
(docs/in-process-restart.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from lighthouse.page.cli import LIGHTHOUSE_ENV
from torchft_like.core.restarts import SPARE_ENV, SPARE_RANK


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers; `run` among the options is what it does."""
    what = "wait for the place of a rank that has died, with the script that the ranks run"
    parser = commands.add_parser("spare", help=what, description=what)
    parser.add_argument(
        "--lighthouse",
        default=os.environ.get(LIGHTHOUSE_ENV, ""),
        help=f"its address (default: {LIGHTHOUSE_ENV})",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="a script, or -m and a module; its arguments"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.command and options.lighthouse:
        variables = {**os.environ, SPARE_ENV: SPARE_RANK, LIGHTHOUSE_ENV: options.lighthouse}
        os.execve(sys.executable, [sys.executable, *options.command], variables)  # noqa: S606 - the user's own
    lacks = f"--lighthouse ({LIGHTHOUSE_ENV})" if options.command else "a script"
    sys.stderr.write(f"torchft-like: spare needs {lacks}\n")
    return 2
