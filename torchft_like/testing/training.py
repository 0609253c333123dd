"""A tiny model, the loop in which a rank trains it by the public API, and a transport whose answers a fault
can strike.

The workers of chaos runs and of this project's failure tests are made of it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lighthouse.address import parse_address
from torchft_like import DistributedDataParallel, Manager, Optimizer
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.digest import state_digest
from torchft_like.local_sgd import DiLoCo
from torchft_like.optim import GradientReplay
from torchft_like.testing.journal import Journal, Witness
from torchft_like.testing.relay import Filter, Relay

WIDTH = 16  # of the model
DIGITS = 16  # of a digest


def prepare_process() -> None:
    """Make this process print its stacks on SIGUSR2 and when it crashes, and compute on one thread."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)


class Model:
    """A small network, its optimizer and its data; every rank starts with its own parameters.

    Args:
        name: the rank's name; parameters and data are drawn from it.
        ballast_bytes: size of the state beside the network, so that a heal takes a while.
        device: the device of all tensors.
        reduce: "ddp" for DistributedDataParallel, "manager" for an allreduce of each gradient, "none" where
            gradients stay here.
        width: the width of the hidden layer; the same on all ranks of one job.

    Attributes:
        taken_over: called with the digest of a peer's state, once that is loaded.
    """

    def __init__(
        self, name: str, ballast_bytes: int, device: str = "cpu", reduce: str = "ddp", width: int = WIDTH
    ) -> None:
        self._name = name
        self._device = device
        self._reduce = reduce
        torch.manual_seed(seed_of(name, "parameters"))
        self.net: nn.Module = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.ballast: torch.Tensor = torch.zeros(ballast_bytes, dtype=torch.uint8, device=device)
        self.taken_over: Callable[[str], object] = str

    def use(self, manager: Manager) -> None:
        """Have `manager` reduce the gradients; called once, before the first step."""
        self._manager = manager
        self._ddp = DistributedDataParallel(manager, self.net) if self._reduce == "ddp" else None

    def backward(self, step: int) -> None:
        """Compute the gradients, and have them reduced; the data is a function of the rank and the step."""
        generator = torch.Generator().manual_seed(seed_of(self._name, f"step {step}"))
        batch = (torch.randn(16, width, generator=generator) for width in (8, 4))
        inputs, targets = (tensor.to(self._device) for tensor in batch)
        net = self._ddp or self.net
        nn.functional.mse_loss(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if self._reduce == "manager":
            gradients = (parameter.grad for parameter in self.net.parameters())
            for gradient in (gradient for gradient in gradients if gradient is not None):
                self._manager.allreduce(gradient).wait()

    def digest(self) -> str:
        """Return a digest of all parameters and of the optimizer's momentum."""
        momenta = [self.optimizer.state[p].get("momentum_buffer") for p in self.net.parameters()]
        return state_digest({"net": self.net.state_dict(), "momenta": momenta})[:DIGITS]

    def state_dict(self) -> dict[str, object]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ballast": self.ballast,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ballast.copy_(state["ballast"])
        self.taken_over(self.digest())

    def flip(self, part: str) -> None:
        """Change one bit of the parameters, the optimizer's state or the ballast, as a fault of the memory
        would.
        """
        *_, last = self.net.parameters()
        momentum = self.optimizer.state[last].get("momentum_buffer")
        flip_bit({"parameter": last, "optimizer": momentum, "ballast": self.ballast}[part])

    def watched(self) -> list[Tensor]:
        """Return the tensors that are the same in all replicas."""
        return [*self.net.parameters(), self.ballast]


class LocalModel(Model):
    """The same model, trained with DiLoCo: its layers are two fragments, or one, which are synced in turn.

    Args:
        fragments: how many.
        sync: arguments of DiLoCo that are others than SYNC says.

    Attributes:
        diloco: the syncs, once a Manager is used.
    """

    SYNC: Mapping[str, Any] = MappingProxyType(
        {"sync_every": 8, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    )
    diloco: DiLoCo

    def __init__(
        self, name: str, ballast_bytes: int, width: int = WIDTH, fragments: int = 2, **sync: Any
    ) -> None:
        super().__init__(name, ballast_bytes, reduce="none", width=width)
        self._fragments, self._sync = fragments, {**self.SYNC, **sync}

    def use(self, manager: Manager) -> None:
        """Have `manager` sync the fragments; called once, before the first step."""
        super().use(manager)
        layers = [layer for layer in self.net.children() if [*layer.parameters()]]
        fragments = layers if self._fragments == len(layers) else [self.net]
        outers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments
        ]
        self.diloco = DiLoCo(manager, fragments, self.optimizer, outers, **self._sync)

    def digest(self) -> str:
        """Return a digest of all global parameters and of the outer optimizers' states."""
        return state_digest({"fragments": self.diloco.global_states()})[:DIGITS]


class Loop:
    """The body of a training loop, and its records in the rank's journal: an attempt at each step, and the
    commit or the failure with which it ended.

    Args:
        index: the index of the replica group, as a `Witness` takes it.
        pause_s: seconds of work outside of the collectives in each step.
        visit: called at "step", the beginning of each attempt, and at "backward", when the last gradient is
            there and the first bucket of DDP can be sent.
    """

    def __init__(
        self,
        model: Model,
        manager: Manager,
        journal: Journal,
        index: int,
        pause_s: float,
        visit: Callable[[str], object] = str,
    ) -> None:
        model.use(manager)
        self._model, self._manager, self._journal = model, manager, journal
        self._pause_s, self._visit = pause_s, visit
        self._optimizer = Optimizer(manager, model.optimizer)
        self._witness = Witness(manager, journal, index)
        model.taken_over = self._witness.took_over
        first = next(model.net.parameters())  # whose gradient is the last one of a backward pass

        def on_last_gradient(_: Tensor) -> None:  # not of this Loop: torch's reducer would keep it for ever
            visit("backward")

        first.register_hook(on_last_gradient)  # type: ignore[no-untyped-call]

    def replay(self) -> GradientReplay:
        """Return how steps are taken again that passed while this rank caught up."""
        return self._optimizer.replay(lambda: self._witness.took_over(self._model.digest()))

    def attempt_step(self) -> bool:
        """Attempt one step; return whether it was committed."""
        self._visit("step")
        began = time.time()
        step = self._attempt()
        if self._witness.has_committed:
            self._witness.testify(self._model.digest(), began=began)
        else:
            self._journal.write("failed", began=began, step=step)
        return self._witness.has_committed

    def _attempt(self) -> int:
        """Bring an attempt to its verdict; return the step that it was made from."""
        model, manager = self._model, self._manager
        self._optimizer.zero_grad()
        self._journal.write("attempt", step=manager.current_step())
        time.sleep(self._pause_s)
        model.backward(manager.current_step())
        manager.wait_quorum()
        step = manager.current_step()
        self._witness.attend(step, model.digest())
        self._optimizer.step()
        return step


class SyncLoop(Loop):
    """The same loop with DiLoCo: a step of it is a sync, with the inner steps before that."""

    def __init__(self, model: LocalModel, manager: Manager, *arguments: Any) -> None:
        super().__init__(model, manager, *arguments)
        self._local = model
        self._inner_steps, self._attended = 0, -1
        vote = manager.should_commit

        @wraps(vote)
        def attend_and_vote(*arguments: Any, **named: Any) -> bool:
            self._attended = manager.current_step()
            self._witness.attend(self._attended, model.digest())
            return vote(*arguments, **named)

        manager.should_commit = attend_and_vote  # type: ignore[method-assign]

    def _attempt(self) -> int:
        self._journal.write("attempt", step=self._manager.current_step())
        self._attended = -1
        with self._local.diloco:
            while self._attended < 0:
                time.sleep(self._pause_s)
                self._local.optimizer.zero_grad()
                self._local.backward(self._inner_steps)
                self._inner_steps += 1
                self._local.optimizer.step()
        return self._attended


class RelayedTransport(HTTPTransport[Any]):
    """A transport that sends its answers through a relay.

    Args:
        open_filter: makes the filter of each connection, as `Relay` expects it.
        timeout, hostname: as HTTPTransport takes them.
    """

    def __init__(
        self, open_filter: Callable[[], Filter], timeout: timedelta, hostname: str | None = None
    ) -> None:
        super().__init__(timeout=timeout, hostname=hostname)
        self._open_filter = open_filter
        self._relay: Relay | None = None

    def metadata(self) -> str:
        """Return the address of the relay."""
        metadata = super().metadata()
        address = parse_address(metadata)
        if self._relay is None:
            self._relay = Relay((address.host, address.port), self._open_filter)
        return metadata.removesuffix(str(address.port)) + str(self._relay.port)


def flip_bit(tensor: Tensor) -> None:
    """Change the lowest bit of the last element: too little for the training to notice."""
    tensor.detach().reshape(-1)[-1:].view(torch.uint8)[0] ^= 1


def seed_of(*parts: str) -> int:
    """Return a seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:4], "big")
