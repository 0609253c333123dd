"""Many ranks of one Gloo group, which are configured again and again, in either package's environment.

The ranks are forks of this process, which has imported everything and started no thread yet. Its command is
answered with the seconds from the word to the ranks until the last of them was configured. Before it is
given, torch's own group (`--package torch`) has let go of the one before; the others do that inside the
time, as in training.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.commands import serve
from benchmarks.group_worker import LIMIT, configure, make_raw

PR_SET_PDEATHSIG = 1


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    groups = (
        importlib.import_module(f"{options.package}.process_group") if options.package != "torch" else None
    )
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(options.ranks):
        ours, theirs = fork.Pipe()
        fork.Process(target=run_rank, args=(theirs, groups, rank, options), daemon=True).start()
        ranks.append(ours)
    gather(ranks)
    serve(Host(ranks))


class Host:
    """Carries out the command of the parent: {"do": "configure", "prefix": p}."""

    def __init__(self, ranks: list[Connection]) -> None:
        self._ranks = ranks

    def configure(self, prefix: str) -> dict[str, float]:
        self._tell(None)
        start = time.perf_counter()
        self._tell(prefix)
        return {"seconds": time.perf_counter() - start}

    def _tell(self, prefix: str | None) -> None:
        """Give the ranks the prefix to configure with, or None: be ready for it; wait for all of them."""
        for rank in self._ranks:
            rank.send(prefix)
        gather(self._ranks)


def gather(ranks: list[Connection]) -> None:
    """Wait until every rank has answered; an answer that does not come is the end of a rank, and an
    EOFError.
    """
    for rank in ranks:
        rank.recv()


def run_rank(commands: Connection, groups: Any, rank: int, options: argparse.Namespace) -> None:
    _die_with(os.getppid())
    os.close(sys.stdout.fileno())  # so that the host's output ends with the host
    group = groups.ProcessGroupGloo(timeout=LIMIT) if groups else None
    commands.send("ready")
    while True:
        prefix = commands.recv()
        if prefix is None:
            group = group if groups else None  # torch's has nothing that could let go of it inside the time
        elif groups:
            configure(group, options.store, prefix, rank, options.ranks)
        else:
            group = make_raw(options.store, prefix, rank, options.ranks)
        commands.send("done")


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died before")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=["torch", "torchft", "torchft_like"], required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", type=int, required=True, help="port of the TCPStore")
    return parser.parse_args()


if __name__ == "__main__":
    main()
