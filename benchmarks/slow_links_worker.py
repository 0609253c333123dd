"""One member of a group whose links are slow, for `slow_links`.

Its argument is its rank. It carries out commands:

* {"do": "meet", "host": h, "port": p, "world_size": n}: meet the other members;
* {"do": "allreduce", "megabytes": n, "quantize_to": f}: average a tensor of float32, as it is if f is empty;
  the seconds and the CPU seconds of it, and the greatest error.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ReduceOp

from benchmarks.commands import serve
from torchft_like.collectives import allreduce_quantized
from torchft_like.process_group import ProcessGroupGloo

LIMIT_S = 120.0


def main() -> None:
    torch.set_num_threads(1)
    serve(Member(int(sys.argv[1])))


class Member:
    """Carries out the commands of the parent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def meet(self, host: str, port: int, world_size: int) -> None:
        if self._rank == 0:
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        self._group = ProcessGroupGloo(LIMIT_S)
        self._group.configure(f"{host}:{port}/slow", self._rank, world_size)

    def allreduce(self, megabytes: int, quantize_to: str) -> dict[str, Any]:
        numbers = torch.randn(megabytes << 18, generator=torch.Generator().manual_seed(0))
        wanted = numbers.clone()
        self._group.allreduce([torch.zeros(1)]).wait()  # all begin together
        began, began_cpu = time.perf_counter(), time.process_time()
        if quantize_to:
            allreduce_quantized([numbers], ReduceOp.AVG, self._group, quantize_to=quantize_to).wait()
        else:
            self._group.allreduce([numbers], ReduceOp.SUM).wait()
            numbers /= self._group.size()
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        return {"seconds": seconds, "cpu": cpu, "error": (numbers - wanted).abs().max().item()}


if __name__ == "__main__":
    main()
