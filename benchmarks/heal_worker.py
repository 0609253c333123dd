"""One end of a state transfer: the HTTPTransport of the package that it is told to use.

It reads commands, one JSON object in a line, and answers each with one record:

* {"do": "offer", "megabytes": n, "step": s, "dtensors": b}: make a state of that size and offer it;
* {"do": "fetch", "metadata": m, "step": s, "megabytes": n, "dtensors": b}: fetch it from the process that
  offers it;
* {"do": "withdraw"}: end the offer.

Times are of the transport's own calls; the checksum of the state is taken outside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

TENSOR_FLOATS = 1024 * 256  # 1 MB, a mid-sized layer
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=["torchft", "torchft_like"], required=True)
    parser.add_argument("--chunks", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = mesh_of_one() if options.package == "torchft_like" else None
    module = importlib.import_module(f"{options.package}.checkpointing.http_transport")
    transport = module.HTTPTransport(timeout=TIMEOUT, num_chunks=options.chunks)
    report(event="ready")
    for line in sys.stdin:
        report(**obey(transport, json.loads(line), mesh))


def mesh_of_one() -> DeviceMesh:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def obey(transport: Any, command: dict[str, Any], mesh: DeviceMesh | None) -> dict[str, object]:
    if command["do"] == "withdraw":
        transport.disallow_checkpoint()
        return {"event": "withdrawn"}
    mesh = mesh if command["dtensors"] else None
    state = make_state(command["megabytes"], command["step"], mesh)
    if command["do"] == "offer":
        return offer(transport, state, command["step"])
    return fetch(transport, command["metadata"], command["step"], state if mesh else None)


def offer(transport: Any, state: dict[str, Any], step: int) -> dict[str, object]:
    start = time.perf_counter()
    transport.send_checkpoint(dst_ranks=[1], step=step, state_dict=state, timeout=TIMEOUT)
    seconds = time.perf_counter() - start
    return {
        "event": "offered",
        "seconds": seconds,
        "metadata": transport.metadata(),
        "checksum": checksum(state),
    }


def fetch(transport: Any, metadata: str, step: int, own: dict[str, Any] | None) -> dict[str, object]:
    """`own` is this process's state where it has DTensors, on whose mesh those that arrive are put."""
    start = time.perf_counter()
    state = transport.recv_checkpoint(src_rank=0, metadata=metadata, step=step, timeout=TIMEOUT)
    if own is not None:
        state = importlib.import_module("torchft_like.checkpointing.shards").place(state, own)
    seconds = time.perf_counter() - start
    return {"event": "fetched", "seconds": seconds, "checksum": checksum(state)}


def make_state(megabytes: int, seed: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A model of 1 MB tensors and a step count, nested as a Manager's state is."""
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, torch.Tensor] = {}
    for i in range(megabytes):
        plain = torch.randn(TENSOR_FLOATS, generator=generator)
        layers[f"layer{i}.weight"] = DTensor.from_local(plain, mesh, [Shard(0)]) if mesh else plain
    return {"user": {"default": layers}, "torchft": {"step": seed}}


def checksum(state: object) -> int:
    value = 0
    for tensor in tensors(state):
        value = zlib.crc32(tensor.numpy().data, value)
    return value


def tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state):
            yield from tensors(state[key])


def report(**record: object) -> None:
    os.write(sys.stdout.fileno(), (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    main()
