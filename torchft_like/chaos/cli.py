"""The command `torchft-like`, or `python -m torchft_like.chaos`.

    torchft-like chaos --length 60 --interval 5
    torchft-like chaos --kinds kill,stop --command 'python train.py --id {index}' --names 'replica-{index}'
    torchft-like soak --length 3600 --interval 10

`chaos` runs one schedule of faults and checks everything that was written. `soak` runs the job
without faults first, for as long, so that the throughput that was kept can be told. Both end with a
report, in text on standard output and as text, JSON and PNG in the output folder, and with exit
status 1 when anything diverged, hung, crashed, leaked or was not felt, or the job did not even start;
2 is a wrong argument.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lighthouse import __version__
from torchft_like.chaos.engine import Engine, Features, Run, features, usable
from torchft_like.chaos.job import JobError, JobSettings
from torchft_like.chaos.network import NetworkUnavailableError
from torchft_like.chaos.orders import Training
from torchft_like.chaos.report import Report, hangs, make_report
from torchft_like.chaos.schedule import KINDS, Planned, draw

FAILED, WRONG_ARGUMENT, INTERRUPTED = 1, 2, 130
LINE_EVERY_S = 1.0
LINE_IN_A_FILE_EVERY_S = 30.0
REPLICAS_MAX = 40  # each has a bit of the ledger
SECONDS_MAX = 1e7
_BACKENDS = ("gloo", "baby-gloo", "mixed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    options = _parse(argv)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options)
    except (JobError, NetworkUnavailableError, OSError, ValueError) as error:
        _say(f"torchft-like: {error}", sys.stderr)
        return FAILED if isinstance(error, JobError) else WRONG_ARGUMENT
    except KeyboardInterrupt:
        _say("\ninterrupted; every process has been ended", sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(options: argparse.Namespace) -> int:
    settings = JobSettings(
        replicas=options.replicas,
        ranks=options.ranks,
        training=Training(pause_s=options.step_time, backend=options.backend),
        spares=options.spares,
        command=options.command,
        naming=options.names,
    )
    offered = features(settings, network=not options.no_network)
    kinds, skipped = usable(options.kinds, offered)
    if not kinds:
        reasons = "\n".join(f"  {kind}: {why}" for kind, why in skipped.items())
        raise ValueError(f"--kinds: none of them can be injected here\n{reasons}")
    plan = draw(options.seed, kinds, options.length, options.interval, settings.replicas)
    out, passed = Path(options.out or tempfile.mkdtemp(prefix="torchft-like-")), False
    try:
        report = _rounds(options, settings, offered, plan, skipped, out)
        _say(report.to_text().rstrip("\n"))
        passed = report.passed
    finally:
        if not options.out and passed:
            shutil.rmtree(out)
        elif not options.out:
            _say(f"logs are kept in {out}", sys.stderr)
    return 0 if passed else FAILED


def _rounds(
    options: argparse.Namespace,
    settings: JobSettings,
    offered: Features,
    plan: list[Planned],
    skipped: dict[str, str],
    out: Path,
) -> Report:
    """The run without faults, if asked for, and the one with them; the report is saved."""
    if any((out / name).exists() for name in ("baseline", "chaos")):
        raise ValueError(f"--out {out} holds another run; choose a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    baseline = None
    if options.baseline:
        with_line = Line("without faults")
        engine = Engine(settings, out / "baseline", offered, with_line, options.seed)
        baseline = engine.run([], options.baseline)
        with_line.end()
    line = Line("faults")
    run = Engine(settings, out / "chaos", offered, line, options.seed).run(plan, options.length)
    line.end()
    report = make_report(run, _setup(options, run), baseline=baseline, skipped=skipped)
    report.save(out)
    _draw(report, out / "report.png")
    return report


def _setup(options: argparse.Namespace, run: Run) -> dict[str, object]:
    return {
        "seed": options.seed,
        "replicas": options.replicas,
        "ranks": options.ranks,
        "backend": options.backend,
        "spares": options.ranks if options.spares is None else options.spares,
        "interval": options.interval,
        "length": options.length,
        "pause": options.step_time,
        "began": round(run.began, 3),
    }


def _draw(report: Report, path: Path) -> None:
    try:
        from torchft_like.chaos.plot import plot  # noqa: PLC0415

        plot(report, path)
    except ImportError as error:
        _say(f"no picture: {error}; pip install matplotlib", sys.stderr)


class Line:
    """The live line: rewritten every second on a terminal, written now and then elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._every_s = LINE_EVERY_S if self._is_terminal else LINE_IN_A_FILE_EVERY_S
        self._next = 0.0

    def __call__(self, run: Run) -> None:
        """Write how things stand, if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        text = _state(self._name, run)
        _say(f"\r\033[K{text}" if self._is_terminal else text, sys.stderr, "" if self._is_terminal else "\n")

    def end(self) -> None:
        """Leave the line as it is."""
        if self._is_terminal:
            _say("", sys.stderr)


def _state(name: str, run: Run) -> str:
    ran = time.strftime("%H:%M:%S", time.gmtime(time.time() - run.began if run.began else 0))
    steps = [commit.step for commit in run.log.commits[-run.settings.replicas :]]
    parts = [f"{name} {ran}", f"step {max(steps, default=0)}"]
    if run.planned:
        felt = sum(bool(outcome.felt) for outcome in run.outcomes)
        parts.append(f"{len(run.outcomes)}/{run.planned} faults, {felt} felt")
        parts.append(f"{len(hangs(run))} hangs")
    if run.outcomes:
        last = run.outcomes[-1]
        recovered = "?" if last.recovery_s is None else f"{last.recovery_s:.2f} s"
        parts.append(f"last: {last.injection.kind} {' '.join(last.injection.victims)} {recovered}")
    return " | ".join(parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchft-like", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"torchft-like {__version__}")
    commands = parser.add_subparsers(dest="name", required=True)
    for name, length, what in (
        ("chaos", 60.0, "inject faults into a job of real processes, and check what it wrote"),
        ("soak", 600.0, "the same, after a run of the same length without faults"),
    ):
        _add_options(commands.add_parser(name, help=what, description=what), length)
    options = parser.parse_args(argv)
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
    return options


def _add_options(parser: argparse.ArgumentParser, length: float) -> None:
    def add(flag: str, default: object, text: str, **more: Any) -> None:
        is_said_by_the_text = default in (None, "", ()) or isinstance(default, list)
        shown = "" if is_said_by_the_text else f" (default: {default!r})"
        settings = {"type": type(default), "default": default, "help": text + shown, **more}
        parser.add_argument(flag, **settings)

    add("--length", length, "seconds, counted from the first common step", type=_seconds)
    add("--interval", 10.0, "seconds between two faults, give or take a fifth", type=_seconds)
    add("--replicas", 4, "replica groups")
    add("--ranks", 1, "ranks of each replica group")
    add("--seed", 0, "of the schedule: the same seed gives the same faults")
    add("--kinds", list(KINDS), f"all unless given: {', '.join(KINDS)}", type=_kinds, metavar="KIND,...")
    add("--backend", "gloo", "of the process groups; mixed: the last group's is baby-gloo", choices=_BACKENDS)
    add("--step-time", Training.pause_s, "seconds of a step outside of its collectives", type=_seconds)
    add("--spares", None, "workers that wait with torch loaded; 0 starts each one cold", type=_count)
    add(
        "--command",
        (),
        "the training command instead of the built-in worker; {index} is the replica's",
        type=_command,
    )
    add("--names", JobSettings.naming, "how the command names its replica groups")
    add("--out", "", "folder for logs and the report; by default they are kept only after a failure")
    add("--baseline", None, "seconds of the run without faults (soak: as --length)", type=_seconds)
    parser.add_argument("--no-network", action="store_true", help="no namespaces, and no faults of them")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {SECONDS_MAX:g} seconds")
    return seconds


def _count(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return int(text)


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
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    if not kinds:
        raise argparse.ArgumentTypeError(f"names no kind of fault; choose from {', '.join(KINDS)}")
    return kinds


def _say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    print(text, end=end, file=stream or sys.stdout, flush=True)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
