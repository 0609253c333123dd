"""A trainer that starts data loaders, again and again, beside a Manager that is reconfigured meanwhile.

    python -m tests.integration.loader_trainer NAME STARTS

It starts STARTS loaders of one to four workers, of each kind in turn, and trains with what they read. Each
worker speaks gRPC of its own, with a server of its trainer, as one does that reads from a service.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchft_like import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

BATCHES = 3  # per worker, so that it is alive and has more to load while its trainer trains


class Served(Dataset[Tensor]):
    """A dataset that each worker reads through a gRPC client of its own, as if it lived on a server."""

    def __init__(self, target: str, length: int) -> None:
        self.target = target
        self.length = length
        self.channel: grpc.Channel | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.length:
            raise IndexError(index)
        self.channel = self.channel or grpc.insecure_channel(self.target)
        read: Any = self.channel.unary_unary("/echo/number", None, None)
        return torch.tensor([float(read(str(index).encode(), timeout=120))])


def chosen(start: int) -> tuple[type[DataLoader[Any]], str, bool]:
    """Return the loader, the start method, and whether its workers persist; every fifth loader does not
    fork.
    """
    loaders = (DataLoader, StatefulDataLoader)
    method = ("forkserver", "spawn")[(start // 5 + start // 10) % 2] if start % 5 == 4 else "fork"
    return loaders[start % 2], method, start // 2 % 2 == 0


def batches(starts: int, target: str) -> Iterator[Tensor]:
    """Yield what the loaders load; each loader is released when its last batch has been used."""
    for start in range(starts):
        kind, method, persistent = chosen(start)
        workers = 1 + start % 3 if method == "fork" else 1  # which loads torch by itself
        data = Served(target, BATCHES * workers)
        loader = kind(
            data, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent
        )
        for _ in range(1 + persistent):
            read = 0
            for batch in loader:
                read += 1
                yield batch
            assert read == len(data), (kind, method, read)
        print(f"start {start + 1}: {kind.__name__} {method} {workers}", flush=True)


def main() -> None:
    name, starts = sys.argv[1], int(sys.argv[2])
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore", UserWarning)  # torch finds too few processors for the workers
    server = grpc.server(ThreadPoolExecutor(4))
    number = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"number": number}),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        replica_id=name,
    )
    sizes = set()
    with manager:
        ddp = DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), 0.001))
        for batch in batches(starts, target):
            optimizer.zero_grad()
            ddp(batch).sum().backward()
            optimizer.step()
            sizes.add(manager.num_participants())
            print(f"step {manager.current_step()} of {manager.num_participants()}", flush=True)
    print(f"over: loaded {starts} times in quorums of {sorted(sizes)}", flush=True)
    server.stop(None).wait()


if __name__ == "__main__":
    main()
