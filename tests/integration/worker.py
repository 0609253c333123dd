"""One rank of a replica group, as the failure tests start it: a tiny model, trained by the public API.

The environment is what torchrun would set. What the worker commits it writes into a journal (see
`invariants.Commit`), and it injects into itself those faults that need an exact place (see `faults`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.options import WorkerOptions
from tests.integration.sharded import ShardedModel, flip_bit
from torchft_like import (
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
    WorldSizeMode,
)
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.shutdown_signals import stop_on_signals
from torchft_like.testing import training
from torchft_like.testing.faults import Faults
from torchft_like.testing.journal import Journal
from torchft_like.testing.relay import at
from torchft_like.testing.training import RelayedTransport, prepare_process
from torchft_like.testing.witness import Witness

STATE_BYTES_BEFORE_FAULT = 1024 * 1024
NATIVE_WORLD = 8


def main() -> None:
    """Train as the options in the only argument say, until the steps are done or SIGTERM comes."""
    prepare_process()
    options = WorkerOptions.from_json(sys.argv[1])
    journal = Journal.of_this_process()
    faults = Faults(options.faults, journal)
    model = ShardedModel(options) if options.reduce == "sharded" else Model(options)
    faults.flip = model.flip
    with make_manager(options, model, faults) as manager, stop_on_signals(manager) as stop:
        model.use(manager)
        if options.slices:
            manager.watch_divergence(fingerprint_of(model, options))
        loop = Loop(options, model, manager, journal, faults)
        while loop.steps_done < options.steps and not stop.requested:
            loop.attempt_step()


class Model(training.Model):
    """The kit's model, which the Manager reduces as the options say, and of which a fault can flip a bit."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(
            f"{options.name}/{os.environ['RANK']}", options.ballast_mb * 1024 * 1024, options.device
        )
        self._reduce = options.reduce

    def use(self, manager: Manager) -> None:
        """Have `manager` reduce the gradients."""
        self._manager = manager
        self._ddp = DistributedDataParallel(manager, self.net) if self._reduce == "ddp" else None

    def backward(self, step: int) -> None:
        """Compute the gradients, and have them reduced."""
        inputs, targets = self.batch(step)
        net = self._ddp or self.net
        nn.functional.mse_loss(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if self._ddp is None:
            for gradient in (parameter.grad for parameter in self.net.parameters()):
                if gradient is not None:
                    self._manager.allreduce(gradient).wait()

    def write(self, journal: Journal, step: int) -> None:
        """Write nothing: the digest says it all."""

    def flip(self, part: str) -> None:
        """Change one bit, as a fault of the memory would."""
        *_, last = self.net.parameters()
        momentum = self.optimizer.state[last]["momentum_buffer"]
        flip_bit({"parameter": last, "optimizer": momentum, "ballast": self.ballast}[part])

    def watched(self) -> list[Tensor]:
        """Return the tensors that are the same in all replicas."""
        return [*self.net.parameters(), self.ballast]


AnyModel = Model | ShardedModel


class Loop:
    """The training loop's body, and what it writes down."""

    def __init__(
        self, options: WorkerOptions, model: AnyModel, manager: Manager, journal: Journal, faults: Faults
    ) -> None:
        self.steps_done = 0
        self._options = options
        self._model = model
        self._manager = manager
        self._journal = journal
        self._faults = faults
        self._optimizer = Optimizer(manager, model.optimizer)
        self._witness = Witness(manager, journal, options.index)
        model.taken_over = self._witness.took_over
        next(model.net.parameters()).register_hook(self._on_last_gradient)  # type: ignore[no-untyped-call]

    def attempt_step(self) -> None:
        """Attempt one step; a committed one is written down."""
        self._faults.visit("step")
        self._optimizer.zero_grad()
        self._journal.write("attempt", step=self._manager.current_step())
        time.sleep(self._options.pause_s)
        self._model.backward(self._manager.current_step())
        self._manager.wait_quorum()
        self._witness.attend(self._manager.current_step(), self._model.digest())
        self._optimizer.step()
        if self._witness.has_committed:
            self.steps_done += 1
            self._witness.testify(self._model.digest())
            self._model.write(self._journal, self._manager.current_step())

    def _on_last_gradient(self, _: Tensor) -> None:
        """Visit the fault `backward` in the middle of the backward pass's end.

        Backward ends with the first layer: with its gradient the bucket is full and can be sent.
        """
        self._faults.visit("backward")


class FaultyProcessGroup(ProcessGroupWrapper):
    """Visits the fault `configure` before the group meets its members."""

    def __init__(self, pg: ProcessGroup, faults: Faults) -> None:
        super().__init__(pg=pg)
        self._faults = faults

    def configure(self, *arguments: Any, **options: Any) -> None:
        self._faults.visit("configure")
        super().configure(*arguments, **options)


BACKENDS: dict[str, Callable[[timedelta], ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "baby-gloo": ProcessGroupBabyGloo,
    "nccl": ProcessGroupNCCL,
    "baby-nccl": ProcessGroupBabyNCCL,
}


def make_group(options: WorkerOptions, faults: Faults, timeout: timedelta) -> dist.ProcessGroup:
    """Return the group that the options ask for."""
    if options.backend != "native-gloo":
        return FaultyProcessGroup(BACKENDS[options.backend](timeout), faults)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", options.store_port, is_master=False, wait_for_workers=False),  # type: ignore[attr-defined]
        rank=options.index,  # of a group that is there once at a time
        world_size=NATIVE_WORLD,
        timeout=timeout,
        enable_reconfigure=True,  # type: ignore[call-arg] # torch has it from 2.14 on
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def make_manager(options: WorkerOptions, model: AnyModel, faults: Faults) -> Manager:
    """Return the Manager that the options ask for; the environment says the rest."""
    timeout = timedelta(seconds=options.timeout_s)

    def visit(data: bytes) -> bytes:
        faults.visit("heal")
        return data

    return Manager(
        pg=make_group(options, faults, timeout),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=options.min_replica_size,
        use_async_quorum=options.use_async_quorum,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=options.quorum_timeout_s),
        connect_timeout=timedelta(seconds=options.connect_timeout_s),
        world_size_mode=WorldSizeMode[options.world_size_mode],
        replica_id=options.name,
        checkpoint_transport=RelayedTransport(lambda: at(STATE_BYTES_BEFORE_FAULT, visit), timeout),
    )


def fingerprint_of(model: AnyModel, options: WorkerOptions) -> StateFingerprint:
    """Return a fingerprint of all that the model has."""
    return StateFingerprint(
        model.watched(),
        [model.optimizer],
        slices=options.slices,
        on_divergence=OnDivergence[options.on_divergence],
    )


if __name__ == "__main__":
    main()
