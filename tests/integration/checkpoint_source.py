"""The object that a rank of test_http_transport has: a source that offers a state over HTTPTransport."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from torchft_like.checkpointing import HTTPTransport
from torchft_like.checkpointing.state_stream import PIECE_BYTES, Snapshot

LIMIT = timedelta(seconds=60)


def make_state(megabytes: int) -> dict[str, object]:
    """Return a state that is the same in every process."""
    generator = torch.Generator().manual_seed(megabytes)
    return {"model": {"w": torch.rand(megabytes * 250_000, generator=generator)}, "step": 5}


class Source:
    """A source, whose transfers hang in the middle where a test wants them to."""

    def __init__(self) -> None:
        self._hangs = threading.Event()

    def offer(self, step: int, megabytes: int, pieces: int | None) -> str:
        """Offer a state, and return the address; each transfer hangs after that many pieces."""
        if pieces is not None:
            self._hang_after(pieces)
        self._transport: HTTPTransport[dict[str, object]] = HTTPTransport(LIMIT, hostname="127.0.0.1")
        self._transport.send_checkpoint([1], step, make_state(megabytes), LIMIT)
        return self._transport.metadata()

    def wait_until_it_hangs(self) -> bool:
        return self._hangs.wait(LIMIT.total_seconds())

    def _hang_after(self, pieces: int) -> None:
        whole, hangs = Snapshot.reading, self._hangs

        def some(self: Snapshot, start: int, stop: int) -> AbstractContextManager[list[memoryview]]:
            if start // PIECE_BYTES >= pieces:
                hangs.set()
                threading.Event().wait()
            return whole(self, start, stop)

        Snapshot.reading = some  # type: ignore[method-assign,assignment]
