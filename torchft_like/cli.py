"""The command `torchft-like`; `python -m torchft_like.chaos` where the package is not installed.

    torchft-like lighthouse --min_replicas 2
    torchft-like status 127.0.0.1:29510
    torchft-like watch
    torchft-like kill replica-3
    torchft-like doctor
    torchft-like keys tokens
    torchft-like spare train.py --its --arguments
    torchft-like chaos --length 60 --interval 5
    torchft-like chaos --kinds kill,stop --command 'python train.py --id {index}' --names 'replica-{index}'
    torchft-like soak --length 3600 --interval 10

`lighthouse` is the daemon; `status` and `watch` show what it knows of its job, and `kill` ends a replica
group (docs/lighthouse-page.md). `doctor` looks for what this host lacks to run a trainer. `keys` makes what
the processes of a job know each other by (docs/security.md). `spare` waits for the place of a rank that has
died: it is `TORCHFT_SPARE=rank python ...`, for a script whose training function is `restartable`
(docs/in-process-restart.md).

`chaos` runs one schedule of faults and checks all records of the job. `soak` first runs the job without
faults, for as long, so that the throughputs can be compared. Both end with a report, in text on standard
output and as text, JSON and PNG in the output folder, and with exit status 1 when anything diverged, hung,
crashed, leaked or was not felt, or the job did not even start; 2 means a wrong argument, or that `pip install
'torchft-like[chaos]'` is missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from lighthouse import __version__
from lighthouse.cli import main as run_lighthouse
from lighthouse.errors import CoordinationError
from lighthouse.keys import add_command as add_keys_command
from lighthouse.page.cli import LIGHTHOUSE_ENV, RefusedError
from lighthouse.page.cli import add_commands as add_status_commands
from torchft_like.core.restarts import SPARE_ENV, SPARE_RANK
from torchft_like.doctor import add_command as add_doctor_command
from torchft_like.testing.chaos.orders import NAMING, Training
from torchft_like.testing.chaos.schedule import KINDS

NOT_INSTALLED = 2
REPLICAS_MAX = 40  # each replica has a bit of the ledger
SECONDS_MAX = 1e7
_LIGHTHOUSE = "lighthouse"
_LENGTHS = {"chaos": 60.0, "soak": 600.0}  # seconds
_BACKENDS = ("gloo", "baby-gloo", "mixed")
_ALGORITHMS = ("ddp", "diloco")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [_LIGHTHOUSE]:
        return run_lighthouse(arguments[1:])
    options = _parse(arguments)
    if options.name not in _LENGTHS:
        try:
            status = int(options.run(options))
            sys.stdout.flush()
            return status
        except BrokenPipeError:  # the reader has enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except CoordinationError as error:
            print(f"torchft-like: {error}", file=sys.stderr)  # noqa: T201 - a command line prints its errors
            return 1 if isinstance(error, RefusedError) else 2
    try:
        from torchft_like.testing.chaos import campaign  # noqa: PLC0415 - --help does without it
    except ModuleNotFoundError as error:
        if error.name != "psutil":
            raise
        text = "torchft-like: chaos needs psutil: pip install 'torchft-like[chaos]'"
        print(text, file=sys.stderr)  # noqa: T201 - a command line prints its errors
        return NOT_INSTALLED
    return campaign.run(options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchft-like", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"torchft-like {__version__}")
    commands = parser.add_subparsers(dest="name", required=True)
    commands.add_parser(_LIGHTHOUSE, help="decide who is in the quorum of a job; it has a --help of its own")
    add_status_commands(commands)
    add_keys_command(commands)
    add_doctor_command(commands)
    _add_spare_command(commands)
    for name, what in (
        ("chaos", "inject faults into a job of real processes, and check what it wrote"),
        ("soak", "do as chaos does, after a run of the same length without faults"),
    ):
        _add_options(commands.add_parser(name, help=what, description=what), _LENGTHS[name])
    options = parser.parse_args(argv)
    if options.name not in _LENGTHS:
        return options
    parser = commands.choices[options.name]
    if options.baseline is None:
        options.baseline = options.length if options.name == "soak" else 0.0
    if "{index}" not in options.names:
        parser.error(f"--names {options.names}: all would be called the same without {{index}}")
    if any(sign in options.names for sign in ":/"):
        parser.error(
            f"--names {options.names}: a name has no ':', which begins the start's own part, and no '/'"
        )
    if not 2 <= options.replicas <= REPLICAS_MAX or options.ranks < 1:
        parser.error(f"a fault needs a survivor: --replicas 2 to {REPLICAS_MAX}, --ranks 1 or more")
    if options.spares < 0 or (options.spares and (options.ranks == 1 or options.command)):
        parser.error(f"--spares {options.spares}: they are for --ranks 2 or more, and the built-in worker")
    return options


def _add_spare_command(commands: Any) -> None:
    what = "wait for the place of a rank that has died, with the script that the ranks run"
    parser = commands.add_parser("spare", help=what, description=what)
    address = os.environ.get(LIGHTHOUSE_ENV, "")
    parser.add_argument("--lighthouse", default=address, help=f"its address (default: {LIGHTHOUSE_ENV})")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="a script, or -m and a module; its arguments"
    )
    parser.set_defaults(run=_become_spare)


def _become_spare(options: argparse.Namespace) -> int:
    if options.command and options.lighthouse:
        variables = {**os.environ, SPARE_ENV: SPARE_RANK, LIGHTHOUSE_ENV: options.lighthouse}
        os.execve(sys.executable, [sys.executable, *options.command], variables)  # noqa: S606 - the user's own
    lacks = f"--lighthouse ({LIGHTHOUSE_ENV})" if options.command else "a script"
    sys.stderr.write(f"torchft-like: spare needs {lacks}\n")
    return 2


def _add_options(parser: argparse.ArgumentParser, length: float) -> None:
    def add(flag: str, default: object, text: str, **more: Any) -> None:
        is_said_by_the_text = default in (None, "", ()) or isinstance(default, list)
        shown = "" if is_said_by_the_text else f" (default: {default!r})"
        settings = {"type": type(default), "default": default, "help": text + shown, **more}
        parser.add_argument(flag, **settings)

    add("--length", length, "seconds, counted from the first common step", type=seconds)
    add("--interval", 10.0, "seconds between two faults, give or take a fifth", type=seconds)
    add("--replicas", 4, "replica groups")
    add("--ranks", 1, "ranks of each replica group")
    add("--spares", 0, "processes that take the place of a rank that has died; others are started then")
    add("--seed", 0, "of the schedule: the same seed gives the same faults")
    add("--kinds", list(KINDS), f"all unless given: {', '.join(KINDS)}", type=_kinds, metavar="KIND,...")
    add("--backend", "gloo", "of the process groups; mixed: the last group's is baby-gloo", choices=_BACKENDS)
    add("--algorithm", "ddp", "of the training; diloco: a step is a sync", choices=_ALGORITHMS)
    add(
        "--step-time",
        Training.pause_s,
        "seconds of a step, with diloco of an inner step, outside of its collectives",
        type=seconds,
    )
    add(
        "--command",
        (),
        "the training command instead of the built-in worker; {index} is the replica's",
        type=_command,
    )
    add("--names", NAMING, "how the command names its replica groups")
    add("--out", "", "folder for logs and the report; by default they are kept only after a failure")
    add("--baseline", None, "seconds of the run without faults (soak: as --length)", type=seconds)
    parser.add_argument("--cold", action="store_true", help="each worker loads torch itself, and is no fork")
    parser.add_argument("--no-network", action="store_true", help="no namespaces, and no faults of them")


def seconds(text: str) -> float:
    """Read a number of seconds; argparse names this function where it is no number."""
    if not 0 <= (found := float(text)) <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {SECONDS_MAX:g} seconds")
    return found


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    if words and "{index}" not in words[0] and shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(f"{words[0]} is no program that can be found and run")
    return words


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    if not kinds or not KINDS.keys() >= set(kinds):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(KINDS)}")
    return kinds
