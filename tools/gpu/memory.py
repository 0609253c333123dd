"""What a Baby group's processes take: of the device, with their context, and of the host for themselves."""

from __future__ import annotations

import psutil
import torch

from benchmarks.group_worker import roles_of
from tools.gpu import contenders
from tools.gpu.contenders import BABIES, Contender, Here, ranks_of
from tools.gpu.figures import attempted, figure, run_probe


def main(*, dry: bool) -> None:
    for contender in BABIES:
        attempted(lambda: _measure(contender, dry=dry), contender.name)  # noqa: B023 - called at once


def _measure(contender: Contender, *, dry: bool) -> None:
    with ranks_of(contender, 1, dry=dry) as ranks:
        ranks.ask(contenders.block, 1000, 3, False)
        (before,) = ranks.ask(device_megabytes)
        ((taken, sizes),) = ranks.ask(end_of_child, before)
        for role, megabytes in sizes.items():
            figure(f"{contender.name}: {role}, of the host", megabytes, "MB")
        figure(f"{contender.name}: child and spare, of the device", taken, "MB")


def device_megabytes(here: Here, rank: int) -> float:
    """Return the memory that is in use, by any process."""
    if here.device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def end_of_child(here: Here, rank: int, before: float) -> tuple[float, dict[str, float]]:
    """Return what is free on the device once the group's processes are dead, and what each had of the
    host.
    """
    family = psutil.Process().children(recursive=True)
    roles = {pid: role for role, pid in roles_of(here.group).items()}
    sizes = {roles.get(p.pid, "helper"): p.memory_full_info().uss / 1e6 for p in family}
    for process in family:
        process.kill()
    psutil.wait_procs(family, 10)
    return before - device_megabytes(here, rank), sizes


if __name__ == "__main__":
    run_probe(main)
