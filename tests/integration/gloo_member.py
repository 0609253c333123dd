"""The objects that ranks of test_gloo_abort and others run: a member of a Gloo group, or the host of a
store.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch

from tests.stores import serve_store
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group.store import AbortableStore

LIMIT_S = 60.0


class StoreHost:
    """Serves a store for as long as its process lives."""

    def __init__(self) -> None:
        self._store = serve_store()

    def port(self) -> int:
        return self._store.port


class Member:
    """A member of a Gloo group."""

    def __init__(self) -> None:
        os.environ.pop("TORCHFT_CHECK_COLLECTIVES", None)  # groups do not check, as their argument says
        self.group = ProcessGroupGloo(300, check_collectives=False)

    def configure(self, address: str, rank: int, world_size: int) -> None:
        self.group.configure(address, rank, world_size)

    def receive_and_stop(self, count: int) -> None:
        """Begin to receive so many numbers from rank 0, of which this process reads nothing."""
        self.tensor = torch.zeros(count)
        self.receiving = self.group.recv([self.tensor], 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_once_published(self) -> None:
        """Let the next `configure` stop this process once its address is in the store."""
        original = AbortableStore.wait

        def stop(store: AbortableStore, keys: list[str], timeout: timedelta | None = None) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            original(store, keys, timeout)

        setattr(AbortableStore, "wait", stop)  # noqa: B010 - on purpose
