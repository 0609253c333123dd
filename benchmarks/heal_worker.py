"""One end of a state transfer: the HTTPTransport of the package that it is told to use.

It carries out commands:

* {"do": "prepare", "megabytes": n, "step": s, "dtensors": b}: make a state of that size;
* {"do": "offer", "step": s}: offer it;
* {"do": "fetch", "metadata": [m], "step": s}: fetch the state of those that offer it, into the own one;
* {"do": "withdraw"}: end the offer;
* {"do": "listen", "megabytes": n, "sums": b}: send so many bytes over a plain connection;
* {"do": "drain", "port": p, "megabytes": n, "sums": b}: receive them, into memory that was written to before.

Times are those of a clock that all processes of the machine share. The checksum of the state is taken outside
of them, and the memory is the highest of the process while it offers or fetches, beside what it had before;
memory that it had marked as free for the kernel to take (MADV_FREE) counts as if it had not had it.
"""

from __future__ import annotations

import argparse
import importlib
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.commands import serve

PIECE_BYTES = 1 << 20
TENSOR_FLOATS = 1024 * 256  # 1 MB, a mid-sized layer
TIMEOUT = timedelta(seconds=60)
SO_MAX_PACING_RATE = 47  # of Linux, which Python does not name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=["torchft", "torchft_like"], required=True)
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--link", type=float, default=0, help="Gbit/s at which it sends at the most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = mesh_of_one() if options.package == "torchft_like" else None
    module = importlib.import_module(f"{options.package}.checkpointing.http_transport")
    transport = module.HTTPTransport(timeout=TIMEOUT, num_chunks=options.chunks)
    if options.link:
        shape(transport, options.link)
    serve(End(options.package, transport, mesh))


def shape(transport: Any, gigabits_per_s: float) -> None:
    """Let the kernel pace what the transport sends: each connection has its part of the link."""
    transport.metadata()  # starts the server, whose connections inherit what its socket has
    of_each = int(gigabits_per_s * 1e9 / 8 / transport._lines)
    transport._serving[0]._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, of_each)


def mesh_of_one() -> DeviceMesh:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


class End:
    """One end of transfers, and its present state."""

    def __init__(self, package: str, transport: Any, mesh: DeviceMesh | None) -> None:
        self._package, self._transport, self._mesh = package, transport, mesh
        self._state: dict[str, Any] = {}
        self._before = 0  # bytes of memory, before a transfer

    def prepare(self, megabytes: int, step: int, dtensors: bool) -> dict[str, object]:
        self._state = make_state(megabytes, step, self._mesh if dtensors else None)
        found, self._before = checksum(self._state), forget_peak()  # here, as it looks at each page
        return {"metadata": self._transport.metadata(), "checksum": found}

    def offer(self, step: int) -> dict[str, object]:
        began = time.monotonic()
        self._transport.send_checkpoint(dst_ranks=[1], step=step, state_dict=self._state, timeout=TIMEOUT)
        return {"began": began, "seconds": time.monotonic() - began}

    def fetch(self, metadata: list[str], step: int) -> dict[str, object]:
        if self._package == "torchft":
            (one,) = metadata
            state = self._transport.recv_checkpoint(src_rank=0, metadata=one, step=step, timeout=TIMEOUT)
        else:
            state = self._fetch_in_place(metadata, step)
        with torch.no_grad():  # as `load_state_dict` does
            for own, received in zip(tensors(self._state), tensors(state), strict=True):
                own.copy_(received)
        ended, highest = time.monotonic(), peak()
        found, self._state = checksum(self._state), {}
        return {"ended": ended, "bytes": highest - self._before, "checksum": found}

    def _fetch_in_place(self, metadata: list[str], step: int) -> Any:
        interface = importlib.import_module("torchft_like.checkpointing.transport")
        sources, into = (
            list(map(interface.Source, range(len(metadata)), metadata)),
            interface.Destination(self._state),
        )
        state = self._transport.recv_checkpoint_from(sources, step, TIMEOUT, into)
        place = importlib.import_module("torchft_like.checkpointing.shards").place
        return place(state, self._state) if self._mesh else state

    def listen(self, megabytes: int, sums: bool) -> dict[str, object]:
        crc = importlib.import_module("isal.isal_zlib").crc32  # ours, which torchft's environment lacks
        memory, listener = touched(megabytes), socket.create_server(("127.0.0.1", 0))

        def send() -> None:
            peer, _ = listener.accept()
            with listener, peer:
                for at in range(0, len(memory), PIECE_BYTES):
                    piece = memory[at : at + PIECE_BYTES]
                    if sums:
                        crc(piece)
                    peer.sendall(piece)

        threading.Thread(target=send, daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def drain(self, port: int, megabytes: int, sums: bool) -> dict[str, object]:
        crc, memory = importlib.import_module("isal.isal_zlib").crc32, touched(megabytes)
        began, done = time.monotonic(), 0
        with socket.create_connection(("127.0.0.1", port)) as peer:
            while done < len(memory):
                piece = memory[done : done + PIECE_BYTES]
                count = peer.recv_into(piece, len(piece), socket.MSG_WAITALL)
                if not count:
                    raise ConnectionError("the other end is gone")
                if sums:
                    crc(piece[:count])
                done += count
        return {"seconds": time.monotonic() - began}

    def withdraw(self) -> dict[str, object]:
        highest = peak()
        self._transport.disallow_checkpoint()
        self._state = {}
        if self._package == "torchft":  # it keeps a state until the next one: seven pairs share the machine
            self._transport.send_checkpoint(dst_ranks=[], step=-1, state_dict={}, timeout=TIMEOUT)
            self._transport.disallow_checkpoint()
        return {"bytes": highest - self._before}


def touched(megabytes: int) -> memoryview:
    return torch.ones(megabytes << 20, dtype=torch.uint8).numpy().data


def forget_peak() -> int:
    """Forget the highest use of memory so far; return the present one, without what is marked as free."""
    Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (free,) = (line for line in lines if line.startswith("LazyFree"))
    return peak() - int(free.split()[1]) * 1024


def peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def make_state(megabytes: int, seed: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A model of 1 MB tensors and a step count, nested as a Manager's state is."""
    some = torch.randn(TENSOR_FLOATS, generator=torch.Generator().manual_seed(seed))
    layers: dict[str, torch.Tensor] = {}
    for i in range(megabytes):
        plain = some + i
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


if __name__ == "__main__":
    main()
