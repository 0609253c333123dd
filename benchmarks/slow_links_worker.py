"""One member of a group whose links are slow, for `slow_links`.

It reads commands, one JSON object in a line, and answers each with one record:

* {"do": "meet", "host": h, "port": p, "rank": r, "world_size": n}: meet the other members;
* {"do": "allreduce", "megabytes": n, "quantize_to": f}: average a tensor of float32, as it is if f is empty;
  the seconds and the CPU seconds of it, and the greatest error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ReduceOp

from torchft_like.collectives import allreduce_quantized
from torchft_like.process_group import ProcessGroupGloo

LIMIT_S = 120.0


def main() -> None:
    torch.set_num_threads(1)
    member = Member()
    report(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        report(event=command["do"], **getattr(member, command.pop("do"))(**command))


class Member:
    """Carries out the commands of the parent."""

    def meet(self, host: str, port: int, rank: int, world_size: int) -> dict[str, Any]:
        if rank == 0:
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        self._group = ProcessGroupGloo(LIMIT_S)
        self._group.configure(f"{host}:{port}/slow", rank, world_size)
        return {}

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


def report(**record: object) -> None:
    os.write(sys.stdout.fileno(), (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    main()
