"""A trainer whose subprocess is killed while the trainer's stream waits for it."""

from __future__ import annotations

import os

import torch

from tests.gpu.ipc_child import Child

CYCLES = 20_000_000_000  # about ten seconds of a GPU


def main() -> None:
    child = Child.start()
    tensor = torch.zeros(1000, device="cuda")
    done = child.add(tensor, 1.0, CYCLES)
    child.done_events.wait(done, torch.cuda.current_stream())
    assert not child.done_events.is_over(done)
    print("the stream waits", flush=True)
    child.kill()
    torch.cuda.current_stream().synchronize()
    print("the stream has gone on", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
