"""A process that offers a state over HTTPTransport; run by test_http_transport.

    python -m tests.integration.checkpoint_source STEP MEGABYTES STOP_AFTER_PIECES

It writes its address, and `stopped in the middle` when a transfer has got as far as it is allowed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch

from torchft_like.checkpointing import HTTPTransport
from torchft_like.checkpointing.state_stream import EncodedState


def make_state(megabytes: int) -> dict[str, object]:
    """Return a state that is the same in every process."""
    generator = torch.Generator().manual_seed(megabytes)
    return {"model": {"w": torch.rand(megabytes * 250_000, generator=generator)}, "step": 5}


def stop_transfers_after(pieces: int) -> None:
    """Let each transfer hang after that many pieces from now on, as on a source that has stopped."""
    whole = EncodedState.part

    def part(self: EncodedState, index: int = 0, count: int = 1) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(whole(self, index, count)):
            if number == pieces:
                sys.stdout.write("stopped in the middle\n")
                threading.Event().wait()
            yield piece

    EncodedState.part = part  # type: ignore[method-assign]


def main() -> None:
    step, megabytes, pieces = map(int, sys.argv[1:])
    transport: HTTPTransport[dict[str, object]] = HTTPTransport(timedelta(seconds=60), hostname="127.0.0.1")
    if pieces:
        stop_transfers_after(pieces)
    transport.send_checkpoint([1], step, make_state(megabytes), timedelta(seconds=60))
    sys.stdout.write(f"offering at {transport.metadata()}\n")
    threading.Event().wait()


if __name__ == "__main__":
    main()
