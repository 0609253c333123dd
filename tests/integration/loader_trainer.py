"""A trainer that loads data by workers, beside a Manager that is reconfigured meanwhile, and its peers.

    python -m tests.integration.loader_trainer NAME starts 5

starts so many loaders of one to four workers, of each kind in turn, and trains with what they read, and then
without them until enough peers have come and gone. Each worker speaks gRPC of its own, with a server of its
trainer, as one does that reads from a service. With `workers` one loader of so many workers never ends; with
`together` there is none, and the trainer leaves after so many steps with a peer.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.managers import manager_alone
from torchft_like import DistributedDataParallel, Manager, Optimizer

PEERS = 3  # the second has ended before the third comes
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


def tell(line: str) -> None:
    """Print a line in one write: other threads log, and the test reads whole lines."""
    print(f"{line}\n", end="", flush=True)


def chosen(start: int) -> tuple[type[DataLoader[Any]], str, bool]:
    """Return the loader, the start method, and whether its workers persist; every fifth loader does not
    fork.
    """
    loaders = (DataLoader, StatefulDataLoader)
    method = ("forkserver", "spawn")[(start // 5 + start // 10) % 2] if start % 5 == 4 else "fork"
    return loaders[start % 2], method, start // 2 % 2 == 0


def start_loaders(manager: Manager, starts: int) -> Iterator[Tensor]:
    """Yield what the loaders load; each loader is released when its last batch has been used."""
    server = grpc.server(ThreadPoolExecutor(4))
    number = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"number": number}),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    sizes: list[int] = []
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
                sizes.append(manager.num_participants())
            assert read == len(data), (kind, method, read)
        tell(f"start {start + 1}: {kind.__name__} {method} {workers}")
    while sum(before > after for before, after in itertools.pairwise(sizes)) < PEERS:
        yield torch.ones(1, 1)
        sizes.append(manager.num_participants())
        time.sleep(0.02)
    tell(f"over: loaded {starts} times in quorums of {sorted(set(sizes))}")
    server.stop(None).wait()


def load_for_ever(_: Manager, workers: int) -> Iterator[Tensor]:
    endless: Any = torch.ones(10_000_000, 1)
    yield from DataLoader(endless, batch_size=4, num_workers=workers)


def train_together(manager: Manager, steps: int) -> Iterator[Tensor]:
    while steps > 0:
        yield torch.ones(1, 1)
        steps -= manager.num_participants() == 2
        time.sleep(0.02)


SOURCES = {"starts": start_loaders, "workers": load_for_ever, "together": train_together}


def main() -> None:
    name, source, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore", UserWarning)  # torch finds too few processors for the workers
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    with manager_alone(name, model=model, init_sync=True) as manager:
        ddp = DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), 0.001))
        for batch in SOURCES[source](manager, number):
            optimizer.zero_grad()
            ddp(batch).sum().backward()
            optimizer.step()
            tell(f"step {manager.current_step()} of {manager.num_participants()}")


if __name__ == "__main__":
    main()
