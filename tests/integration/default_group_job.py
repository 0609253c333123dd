"""The functions that test_default_group runs on its ranks: a Manager, and torch's default group."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.managers import be_patient, error_of, manager_alone
from torchft_like.manager import group_store

Here = SimpleNamespace


def join(here: Here, rank: int, size: int, lighthouse: str, store_port: int) -> None:
    be_patient()
    members = {"rank": rank, "world_size": size, "store_addr": "127.0.0.1", "store_port": store_port}
    here.manager = manager_alone("a", lighthouse, **members)


def allow_torch(here: Here, rank: int, limit_s: float) -> None:
    """Let torch wait for so long for a rank that has met the others."""
    here.manager._config = replace(here.manager._config, connect_timeout_s=limit_s)


def end_in_torch(here: Here, rank: int) -> None:
    """End once the other ranks have been met, in torch's own function."""
    dist.init_process_group = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)


def init(here: Here, rank: int) -> str:
    error = error_of(lambda: here.manager.init_process_group("gloo"))
    return f"{type(error).__name__}: {error}" if error else "done"


def init_with_a_word(here: Here, rank: int) -> list[str]:
    """Start the default group, and return what is said of a wait for the other ranks; rank 1 comes then."""
    said: list[str] = []
    shared = here.manager._store.shared
    if rank == 1:
        shared.wait(["said/0", "said/2"])
    else:

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())
                shared.set(f"said/{rank}", "")

        group_store._logger.addHandler(Handler())
        group_store.LATE_S = 0.1
    here.manager.init_process_group("gloo")
    return said


def summed(here: Here, rank: int) -> tuple[float, float]:
    """Return the sum of a number of each rank, and the group's timeout."""
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    options = c10d._get_default_group()._get_backend(torch.device("cpu")).options
    return float(number), options._timeout.total_seconds()


def destroy(here: Here, rank: int) -> None:
    dist.destroy_process_group()
