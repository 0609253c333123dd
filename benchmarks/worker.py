"""One replica of a training job: the same loop over torchft, torchft_like or plain DDP.

It runs as a script in either package's environment, so it imports nothing of this repository but
the package that it is told to use, by the names that both packages share. It reports in JSON lines
on its standard output.

* Free running: step after step, one record for each. SIGUSR1 makes it stop itself (SIGSTOP) in
  its next step, after the quorum and the forward pass and before it contributes any gradient: its
  peers are then blocked inside a collective.
* In turns (`--turns`): each line {"steps": n} on its standard input is answered, after n steps,
  by one record with their times. Several systems can then be measured in alternation.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_ROWS = 32
BALLAST_FLOATS = 4 * 1024 * 1024  # 16 MiB
LAYER_WIDTHS = {
    "tiny": (32, 32, 32, 10),
    "0.3M": (256, 400, 400, 64),
    "4M": (1024, 1408, 1408, 512),
}


class Trainer(Protocol):
    """A system under which one replica trains."""

    model: nn.Module

    def await_peers(self) -> None:
        """Return once it is settled with whom this step's gradients will be reduced."""
        ...

    def step(self, before_backward: Callable[[], None]) -> dict[str, Any]:
        """Take one step; its record says whether it was committed and by how many participants."""
        ...


def main() -> None:
    options = _options()
    sys.path += options.beside
    if options.own_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[options.rank % len(cores)]})
    # One thread for each process: what is compared is the runtimes, not the schedulers.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(options.model)
    trainer: Trainer = (
        PlainTrainer(model, options) if options.package == "ddp" else ManagedTrainer(model, options)
    )
    report(event="ready", pid=os.getpid())
    if options.turns:
        train_in_turns(trainer)
    else:
        train_freely(trainer, options)


def report(**record: object) -> None:
    """Write one line of JSON in one write: lines are whole even when the process is killed."""
    os.write(sys.stdout.fileno(), (json.dumps({"time": time.time(), **record}) + "\n").encode())


def make_model(size: str) -> nn.Module:
    """Return a ReLU MLP of three layers."""
    widths = LAYER_WIDTHS[size]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A few batches, different on every replica, used in rotation; `workers` processes bring them, if any."""

    def __init__(self, size: str, seed: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        widths = LAYER_WIDTHS[size]
        self._inputs = torch.randn(4, BATCH_ROWS, widths[0], generator=generator)
        self._targets = torch.randn(4, BATCH_ROWS, widths[-1], generator=generator)
        loader = DataLoader(self, batch_size=None, sampler=itertools.count(), num_workers=workers)
        self._coming = iter(loader if workers else map(self.__getitem__, itertools.count()))

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = number % len(self._inputs)
        return self._inputs[chosen], self._targets[chosen]

    def loss(self, model: nn.Module) -> torch.Tensor:
        inputs, targets = next(self._coming)
        return nn.functional.mse_loss(model(inputs), targets)


class PlainTrainer:
    """torch's own DistributedDataParallel over gloo: no fault tolerance."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options.rendezvous}",
            rank=options.rank,
            world_size=options.replicas,
            timeout=timedelta(seconds=options.timeout),
        )
        self.model = model
        self._wrapped = nn.parallel.DistributedDataParallel(model)
        self._optimizer = make_optimizer(model)
        self._batches = Batches(options.model, options.rank, options.loader_workers)
        self._participants = options.replicas

    def await_peers(self) -> None:
        """Return at once: the participants are always the same."""

    def step(self, before_backward: Callable[[], None]) -> dict[str, Any]:
        self._optimizer.zero_grad()
        loss = self._batches.loss(self._wrapped)
        before_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return {"committed": True, "participants": self._participants}


class ManagedTrainer:
    """The package's Manager and Optimizer; gradients through its DDP wrapper or its allreduce."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        package = importlib.import_module(options.package)
        groups = importlib.import_module(f"{options.groups or options.package}.process_group")
        timeout = timedelta(seconds=options.timeout)
        self.model = model
        optimizer = make_optimizer(model)
        self._compute_s = options.compute
        ballast = [nn.Parameter(torch.ones(BALLAST_FLOATS)) for _ in range(options.ballast)]
        if ballast:
            optimizer.add_param_group({"params": ballast})
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.manager = package.Manager(
            pg=groups.ProcessGroupGloo(timeout=timeout),
            state_dict=lambda: {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ballast": {i: parameter.detach() for i, parameter in enumerate(ballast)},
            },
            load_state_dict=lambda state: load(model, optimizer, ballast, state),
            min_replica_size=options.min_replicas,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=options.quorum_timeout),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=options.lighthouse,
            replica_id=options.name,
            hostname="127.0.0.1",
            quorum_retries=options.quorum_retries,
        )
        self._optimizer = package.Optimizer(self.manager, optimizer)
        if options.steps_kept:
            self.manager.register_replay(self._optimizer.replay(), options.steps_kept)
        self._uses_ddp = options.gradients == "ddp"
        self._wrapped = package.DistributedDataParallel(self.manager, model) if self._uses_ddp else model
        self._batches = Batches(options.model, options.rank, options.loader_workers)

    def await_peers(self) -> None:
        self.manager.wait_quorum()

    def step(self, before_backward: Callable[[], None]) -> dict[str, Any]:
        before = self.manager.current_step()
        self._optimizer.zero_grad()
        time.sleep(self._compute_s)
        loss = self._batches.loss(self._wrapped)
        before_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._uses_ddp:
            self._average_gradients()
        self._optimizer.step()
        after = self.manager.current_step()
        return {"step": after, "committed": after > before, "participants": self.manager.num_participants()}

    def _average_gradients(self) -> None:
        works = [self.manager.allreduce(p.grad) for p in self.model.parameters() if p.grad is not None]
        for work in works:
            work.wait()


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, ballast: list[nn.Parameter], state: dict[str, Any]
) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for own, received in zip(ballast, state["ballast"].values(), strict=True):
        own.detach().copy_(received)


def digest(model: nn.Module) -> str:
    """Return a digest that is equal exactly when every parameter is bit-identical."""
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()[:16]


class StopOnRequest:
    """Stops this process where it is called, once, after SIGUSR1 has asked for it.

    Not before the quorum of this step is there: without it the peers would not be in a collective
    with this replica, but still waiting for it to join.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._requested = False
        signal.signal(signal.SIGUSR1, self._request)

    def _request(self, *_: object) -> None:
        self._requested = True

    def __call__(self) -> None:
        if self._requested:
            self._requested = False
            self._trainer.await_peers()
            report(event="stopping")
            os.kill(os.getpid(), signal.SIGSTOP)


def train_freely(trainer: Trainer, options: argparse.Namespace) -> None:
    """Step until killed; a record for each step."""
    stop_on_request = StopOnRequest(trainer)
    while True:
        record = trainer.step(stop_on_request)
        if options.digest:
            record["digest"] = digest(trainer.model)
        report(event="step", **record)
        time.sleep(options.pause)


def train_in_turns(trainer: Trainer) -> None:
    """Take the number of steps that each line of standard input asks for, until its end."""
    for line in sys.stdin:
        records, seconds = [], []
        for _ in range(json.loads(line)["steps"]):
            start = time.perf_counter()
            records.append(trainer.step(_go_on))
            seconds.append(time.perf_counter() - start)
        report(
            event="turn",
            seconds=seconds,
            committed=sum(record["committed"] for record in records),
            participants=records[-1]["participants"],
        )


def _go_on() -> None:
    """Do nothing between forward and backward."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", choices=["torchft", "torchft_like", "ddp"], required=True)
    parser.add_argument("--groups", help="the package of its process group; without it, that of its Manager")
    parser.add_argument("--beside", action="append", default=[], help="folder of modules that come last")
    parser.add_argument("--gradients", choices=["ddp", "allreduce"], default="ddp")
    parser.add_argument("--model", choices=list(LAYER_WIDTHS), default="tiny")
    parser.add_argument("--name", default="replica")
    parser.add_argument(
        "--rank", type=int, default=0, help="rank under plain DDP, seed of the data elsewhere"
    )
    parser.add_argument("--replicas", type=int, default=1, help="world size under plain DDP")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load the batches")
    parser.add_argument("--rendezvous", help="a file that the ranks of plain DDP share")
    parser.add_argument("--lighthouse", help="http://host:port")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60, help="of operations, in seconds")
    parser.add_argument("--quorum-timeout", type=float, default=60, help="in seconds")
    parser.add_argument("--quorum-retries", type=int, default=0)
    parser.add_argument("--own-core", action="store_true", help="keep to the core of the number `rank`")
    parser.add_argument("--digest", action="store_true", help="add a digest of the parameters to each step")
    parser.add_argument("--pause", type=float, default=0, help="seconds between two steps, without turns")
    parser.add_argument(
        "--ballast", type=int, default=0, help="parameters of 16 MiB beside the model, without gradients"
    )
    parser.add_argument(
        "--compute", type=float, default=0, help="seconds that a device would compute in a step"
    )
    parser.add_argument("--steps-kept", type=int, default=0, help="steps that pass while this replica heals")
    parser.add_argument("--turns", action="store_true", help="take steps as standard input asks for them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
