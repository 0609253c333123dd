"""Three replicas train a small GPT; one is stopped, one is killed; all of them end with the same bits.

    python examples/demo.py

A lighthouse runs inside this process, the replicas are processes of `train_ddp.py`. On the way one
gets SIGSTOP and later SIGCONT, another gets SIGKILL and is started again. At the end the digests of
all parameters and optimizer states are compared: exit code 0 says that they are identical. The
recovery times are measured from what the replicas wrote. Logs and the picture are kept in
`demo_output/`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # should the packages not be installed

from arguments import SECONDS_MAX, SEED_MAX, number  # noqa: E402
from demo_job import DemoError, Job, Settings  # noqa: E402
from demo_view import make_view  # noqa: E402

if TYPE_CHECKING:
    from torchft_like.coordination import LighthouseServer

INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_settings(argv)
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(settings, console)
    except DemoError as error:
        console.print(
            f"\nthe demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; every replica has been ended")
        return INTERRUPTED
    return 0


def run(settings: Settings, console: Console) -> None:
    """Train, compare, report. However it ends, no process is left."""
    console.print("starting the lighthouse and the replicas ...")
    make_directory(settings.output_dir)
    # Into a file: on the terminal the lighthouse's lines would run through the table.
    logging.basicConfig(filename=settings.output_dir / "lighthouse.log", filemode="w", level=logging.INFO)
    lighthouse = start_lighthouse(settings)
    try:
        job = train(settings, lighthouse.address(), console)
    finally:
        lighthouse.shutdown()
    # It brings matplotlib, whose second of import would otherwise pass before anything is seen.
    from demo_report import report  # noqa: PLC0415

    report(job, console)


def make_directory(path: Path) -> None:
    """Return a directory for the files, or end with one line that says why there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write to --output-dir {path}: {error.strerror}") from error


def train(settings: Settings, lighthouse: str, console: Console) -> Job:
    """Run the replicas to the last step, and return the finished job."""
    view = make_view(console, settings.replicas, settings.steps)
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONPATH": _python_path()}
    job = Job(settings, environment, view)
    try:
        job.run()
    finally:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop this
        job.end()
        view.close()
        signal.signal(signal.SIGINT, handler)
    return job


def start_lighthouse(settings: Settings) -> LighthouseServer:
    """Return a lighthouse that lets the job go on without one replica."""
    # It brings torch, for which --help and a wrong option need not wait.
    from torchft_like.coordination import LighthouseServer  # noqa: PLC0415

    min_replicas = max(1, settings.replicas - 1)
    return LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=10_000)


def parse_settings(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        description="Elastic training that survives a SIGSTOP and a SIGKILL.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=3, help="replica groups, 2 or more")
    parser.add_argument("--steps", type=int, default=400, help="committed steps, 100 or more with faults")
    parser.add_argument(
        "--batch-size", type=number(int, 1), default=8, help="windows of 128 bytes per replica and step"
    )
    parser.add_argument(
        "--seed", type=number(int, 0, SEED_MAX), default=0, help="of the weights and of the batches"
    )
    parser.add_argument(
        "--no-faults", dest="faults", action="store_false", default=argparse.SUPPRESS, help="only train"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("demo_output"), help="logs and the picture")
    some_seconds = number(float, 0, SECONDS_MAX)
    parser.add_argument(
        "--step-time", type=some_seconds, default=0.1, help="seconds that a step takes at the least"
    )
    parser.add_argument(
        "--time-limit", type=some_seconds, default=170.0, help="seconds until the demo gives up"
    )
    parser.add_argument("--script", type=Path, default=HERE / "train_ddp.py", help="what the replicas run")
    settings = Settings(**{"faults": True, **vars(parser.parse_args(argv))})
    if settings.replicas < 2:
        parser.error(f"--replicas {settings.replicas}: a fault needs a survivor, so 2 or more")
    if settings.steps < (100 if settings.faults else 1):
        parser.error(f"--steps {settings.steps}: the victims need time to come back, so 100 or more")
    if not settings.script.is_file():
        parser.error(f"--script {settings.script}: there is no such file")
    return settings


def _python_path() -> str:
    """Return the user's PYTHONPATH, with the packages beside this folder should they not be installed."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parent)]))


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # all is ended; unloading torch would take most of a second, also after a Ctrl-C
