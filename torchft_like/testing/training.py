"""A tiny model that a rank trains by the public API, and a transport whose answers a fault can strike.

The workers of chaos runs and of this project's failure tests are made of it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.testing.relay import Filter, Relay


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
    """

    def __init__(self, name: str, ballast_bytes: int, device: str = "cpu") -> None:
        self._name = name
        self._device = device
        torch.manual_seed(seed_of(name, "parameters"))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.ballast = torch.zeros(ballast_bytes, dtype=torch.uint8, device=device)
        self.taken_over: Callable[[str], object] = str  # called with the digest of a peer's state

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, a function of the rank and the step."""
        generator = torch.Generator().manual_seed(seed_of(self._name, f"step {step}"))
        inputs, targets = (torch.randn(16, width, generator=generator) for width in (8, 4))
        return inputs.to(self._device), targets.to(self._device)

    def digest(self) -> str:
        """Return the SHA-256 of all parameters and of the optimizer's momentum."""
        digest = hashlib.sha256()
        for parameter in self.net.parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            for tensor in (parameter, momentum):
                if tensor is not None:
                    digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

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
        match = re.search(r"://([^/:]+):(\d+)", metadata)
        if match is None:
            raise ValueError(f"no address in {metadata!r}")
        if self._relay is None:
            self._relay = Relay((match[1], int(match[2])), self._open_filter)
        return metadata.replace(match[0], f"://{match[1]}:{self._relay.port}")


def seed_of(*parts: str) -> int:
    """Return a seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:4], "big")
