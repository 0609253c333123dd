"""A pytest plugin for torchft's environment: the lighthouses that its own tests start are ours.

Nothing of torchft is changed but the class that its tests import.
"""

from __future__ import annotations

import importlib
import os
import subprocess


class LighthouseServer:
    """torchft's constructor and defaults; our daemon."""

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        settings = {
            "min_replicas": min_replicas,
            "join_timeout_ms": 100 if join_timeout_ms is None else join_timeout_ms,
            "quorum_tick_ms": quorum_tick_ms,
            "heartbeat_timeout_ms": heartbeat_timeout_ms,
        }
        flags = [f"--{name}={value}" for name, value in settings.items() if value is not None]
        self._daemon = subprocess.Popen(
            [os.environ["LIGHTHOUSE_PYTHON"], "-m", "lighthouse", "--bind=127.0.0.1:0", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.environ["LIGHTHOUSE_PATH"]},
        )
        assert self._daemon.stdout is not None
        listening = next(line for line in self._daemon.stdout if "listening on" in line)  # not its page
        self._address = listening.split()[-1]
        print(f"our lighthouse listens on {self._address}", flush=True)

    def address(self) -> str:
        return self._address

    def shutdown(self) -> None:
        self._daemon.kill()
        self._daemon.wait()

    def __del__(self) -> None:
        self.shutdown()


for _module in ("torchft._torchft", "torchft.coordination"):
    importlib.import_module(_module).LighthouseServer = LighthouseServer  # type: ignore[attr-defined]
