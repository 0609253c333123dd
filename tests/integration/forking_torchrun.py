"""torchrun whose ranks are forks that have torch loaded: `python -m tests.integration.forking_torchrun`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from torchft_like.testing.forks import Fork


def fork(_: SubprocessHandler, command: Sequence[str], env: Mapping[str, str]) -> Fork:
    """Start `python -u -m MODULE ...` as a fork that writes where torchrun does."""
    assert list(command[:3]) == [sys.executable, "-u", "-m"], command
    return Fork(command[3:], env, [sys.stdout.fileno()])


if __name__ == "__main__":
    SubprocessHandler._popen = fork  # type: ignore[assignment, method-assign]
    run.main()
