"""`python -m tests.stress.servers LIGHTHOUSE`: the servers of a replica group, without a trainer.

A ManagerServer of two ranks and a checkpoint server that offers a state, in one process as in a job;
prints where they are, as JSON, and serves until it is killed.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import timedelta

import torch

from lighthouse.address import LOOPBACK
from tests.stress.beside import STEP
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.manager_server.server import ManagerServer


def main(lighthouse: str) -> None:
    """Serve until the process is killed."""
    manager = ManagerServer(
        "under-stress:1", lighthouse, LOOPBACK, f"{LOOPBACK}:0", f"{LOOPBACK}:1", world_size=2
    )
    transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(
        timedelta(seconds=60), hostname="127.0.0.1"
    )
    transport.send_checkpoint([0], STEP, {"w": torch.arange(1000.0)}, timedelta(seconds=60))
    print(json.dumps({"manager": manager.address(), "checkpoint": transport.metadata()}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
