"""Replica groups on this machine, each under a torchrun of its own, one of which is killed on the way."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import psutil

from torchft_like.testing.processes import end_with_parent


class LocalGroup:
    """A replica group under a torchrun of its own, which runs the present script, and its output."""

    def __init__(
        self, index: int, ranks: int, lighthouse: str, kill_at_steps: range, inside: Sequence[str]
    ) -> None:
        self.index = index
        self.kill_at_steps = kill_at_steps
        self.result: dict[str, Any] = {}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        torchrun += [f"--nproc_per_node={ranks}", "--max-restarts=3", "--no-python"]
        # A SIGKILL to this process ends torchrun, and with it the ranks.
        script = [*end_with_parent(), sys.executable, *sys.argv]
        own = ["--replica-id", str(index), "--finish-together"]
        self.process = subprocess.Popen(
            [*end_with_parent(), *inside, sys.executable, *torchrun, *script, *own],
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout or ():
            print(f"group {self.index} | {line.rstrip()}", flush=True)
            if line.startswith("{"):
                self.result = json.loads(line)
            elif self.trains_with_others_in(self.kill_at_steps, line):
                self.kill_at_steps = range(0)
                self.kill_ranks()

    @staticmethod
    def trains_with_others_in(steps: range, line: str) -> bool:
        match = re.match(r"step (\d+) .* participants (\d+)", line)
        return match is not None and int(match[1]) in steps and int(match[2]) > 1

    def kill_ranks(self) -> None:
        """Send SIGKILL to every rank at once; torchrun starts them again."""
        print(f"group {self.index} | killed", flush=True)
        kill(psutil.Process(self.process.pid).children())

    def end(self) -> None:
        """End every process, however the run went."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            kill(family)
            psutil.wait_procs(family)
        self.reader.join()


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # torchrun ends the others when one is gone
            process.kill()


def kill_steps(args: argparse.Namespace) -> range:
    """Return the steps in which a group may be killed: none without --kill-at-step."""
    return range(0) if args.kill_at_step is None else range(args.kill_at_step, args.steps - 1)


def run_groups(ranks: int, lighthouse: str, kill_at_steps: range, insides: Sequence[Sequence[str]]) -> int:
    """Run the present script without --local as replica groups; return 0 if all end with the same bits.

    Args:
        ranks: the ranks of each group.
        lighthouse: its address.
        kill_at_steps: the steps in which the last group is killed, once, as soon as it trains with others. If
          it were killed later, the others would have ended, and it would wait for them to finish with it.
        insides: for each group the words to put in front of its command.
    """
    sys.argv.remove("--local")
    groups: list[LocalGroup] = []
    try:
        for index, inside in enumerate(insides):
            own_kill = kill_at_steps if index == len(insides) - 1 else range(0)
            groups.append(LocalGroup(index, ranks, lighthouse, own_kill, inside))
        codes = [group.process.wait() for group in groups]
    finally:
        for group in groups:
            group.end()
    if groups[-1].kill_at_steps:
        print(f"no group was killed: they did not train together in steps {kill_at_steps}")
    digests = {group.result.get("digest") for group in groups}
    is_identical = len(digests) == 1 and None not in digests and not any(codes)
    print("all groups ended with the same bits" if is_identical else f"failed: {codes}, {digests}")
    return 0 if is_identical else 1


def interrupt_at_sigterm() -> None:
    """Let SIGTERM end the groups, too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
