"""A command of `torchft-like`: the job with faults, for a soak after the job without them, and the report."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn, TextIO

from torchft_like.testing.chaos.engine import Engine, Run, features, usable
from torchft_like.testing.chaos.job import JobError
from torchft_like.testing.chaos.network import NetworkUnavailableError
from torchft_like.testing.chaos.orders import JobSettings, Training
from torchft_like.testing.chaos.report import hangs, make_report, plot
from torchft_like.testing.chaos.schedule import Planned, draw

FAILED, WRONG_ARGUMENT, INTERRUPTED = 1, 2, 130
SHOWN = ("seed", "replicas", "ranks", "spares", "algorithm", "backend", "interval", "length")


def run(options: argparse.Namespace) -> int:
    """Run a command, and return the exit status."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _carry_out(options)
    except (JobError, NetworkUnavailableError, OSError, ValueError) as error:
        _say(f"torchft-like: {error}", sys.stderr)
        return FAILED if isinstance(error, JobError) else WRONG_ARGUMENT
    except KeyboardInterrupt:
        _say("\ninterrupted; every process has been ended", sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _settings(options: argparse.Namespace) -> JobSettings:
    return JobSettings(
        replicas=options.replicas,
        ranks=options.ranks,
        training=Training(
            pause_s=options.step_time,
            algorithm=options.algorithm,
            backend=options.backend,
            restarts=options.spares > 0,
        ),
        spares=options.spares,
        cold=options.cold,
        command=options.command,
        naming=options.names,
    )


def _carry_out(options: argparse.Namespace) -> int:
    """Run the job without faults, if asked for, and with them; save and print the report."""
    settings = _settings(options)
    missing = features(settings, network=not options.no_network)
    kinds, skipped = usable(options.kinds, missing)
    if not kinds:
        reasons = "\n".join(f"  {kind}: {why}" for kind, why in skipped.items())
        raise ValueError(f"--kinds: none of them can be injected here\n{reasons}")
    plan = draw(options.seed, kinds, options.length, options.interval, settings.replicas)
    out, passed = Path(options.out or tempfile.mkdtemp(prefix="torchft-like-")), False
    if any((out / name).exists() for name in ("baseline", "chaos")):
        raise ValueError(f"--out {out} holds another run; choose a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)

    def run_job(name: str, faults: list[Planned], length_s: float) -> Run:
        line = Line("faults" if faults else "without faults")
        done = Engine(settings, out / name, missing, line, options.seed).run(faults, length_s)
        line.end()
        return done

    try:
        baseline = run_job("baseline", [], options.baseline) if options.baseline else None
        run = run_job("chaos", plan, options.length)
        setup = {name: getattr(options, name) for name in SHOWN}
        setup |= {"workers": "started cold" if options.cold else "forked", "pause": options.step_time}
        setup["began"] = round(run.began, 3)
        report = make_report(run, setup, baseline=baseline, skipped=skipped)
        report.save(out)
        _say(report.to_text().rstrip("\n"))
        passed = report.passed
        try:
            plot(report, out / "report.png")
        except ImportError as error:
            _say(f"no picture: {error}; pip install 'torchft-like[chaos]'", sys.stderr)
    finally:
        if not options.out and passed:
            shutil.rmtree(out)
        elif not options.out:
            _say(f"logs are kept in {out}", sys.stderr)
    return 0 if passed else FAILED


class Line:
    """The live line: rewritten every second on a terminal, written every half minute elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, run: Run) -> None:
        """Write the state of the run, if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (1.0 if self._is_terminal else 30.0)
        ran = time.strftime("%H:%M:%S", time.gmtime(time.time() - run.began if run.began else 0))
        step = max((commit.step for commit in run.log.commits[-run.settings.replicas :]), default=0)
        felt = sum(bool(outcome.felt) for outcome in run.outcomes)
        text = f"{self._name} {ran} | step {step} | {len(run.outcomes)}/{run.planned} faults, {felt} felt"
        text += f" | {len(hangs(run))} hangs"
        if run.outcomes:
            last = run.outcomes[-1]
            recovered = "?" if last.recovery_s is None else f"{last.recovery_s:.2f} s"
            text += f" | last: {last.injection.kind} {' '.join(last.injection.victims)} {recovered}"
        _say(f"\r\033[K{text}" if self._is_terminal else text, sys.stderr, "" if self._is_terminal else "\n")

    def end(self) -> None:
        """End the line."""
        if self._is_terminal:
            _say("", sys.stderr)


def _say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    stream = stream or sys.stdout
    stream.write(text + end)
    stream.flush()


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
