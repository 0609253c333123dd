"""Health checks between two tries: callables that raise an error while this rank should not train.

A check takes no arguments, and what it returns does not matter. These are ready-made; any function of the
script's will do.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from lighthouse.address import parse_address
from torchft_like import devices
from torchft_like.core.restarts import pauses_s
from torchft_like.errors import HealthCheckError
from torchft_like.manager.config import LIGHTHOUSE_ENV
from torchft_like.message_queue.memory import available_bytes
from torchft_like.runtime.connecting import connect_tcp
from torchft_like.runtime.durations import seconds_of

_logger = logging.getLogger(__name__)

HealthCheck = Callable[[], object]


def device() -> None:
    """Compute on the accelerator that this process uses, if any, and wait for the result."""
    if devices.is_in_use():
        accelerator = torch.accelerator.current_accelerator()
        total = int(torch.ones(1024, device=accelerator).sum().item())
        if total != 1024:
            raise RuntimeError(f"the device has added 1024 ones to {total}")


def memory(bytes_min: int) -> HealthCheck:
    """Return a check that this process may still take so many bytes, of the machine's and of its cgroups'."""
    return _at_least(bytes_min, available_bytes, "bytes of memory are available")


def disk(path: str | os.PathLike[str], bytes_min: int) -> HealthCheck:
    """Return a check that the file system of `path` can be written to, and has so many bytes left."""

    def free_bytes() -> int:
        with tempfile.NamedTemporaryFile(prefix=".torchft-health-", dir=path) as probe:
            probe.write(b"1")
            probe.flush()
        return shutil.disk_usage(path).free

    return _at_least(bytes_min, free_bytes, f"bytes are free at {os.fspath(path)}")


def lighthouse(address: str | None = None, timeout_s: float = 5.0) -> HealthCheck:
    """Return a check that the lighthouse (TORCHFT_LIGHTHOUSE) takes a connection from this host."""
    limit_s = seconds_of(timeout_s, "timeout_s")

    def check() -> None:
        target = parse_address(
            address or os.environ.get(LIGHTHOUSE_ENV, ""), f"lighthouse ({LIGHTHOUSE_ENV})"
        )
        try:
            connect_tcp(target, limit_s, is_plain=True).close()
        except OSError as error:
            raise ConnectionError(f"the lighthouse at {target} cannot be reached: {error}") from error

    return check


def wait_until_healthy(checks: Sequence[HealthCheck], limit_s: float) -> None:
    """Wait until all checks pass; after a failure they are run again, after longer and longer pauses.

    Raises:
        HealthCheckError: one still failed after `limit_s` seconds; it is the cause.
    """
    deadline = time.monotonic() + limit_s
    for pause_s in pauses_s():
        if (failure := _first_failure(checks)) is None:
            return
        text = f"{type(failure).__name__}: {failure}"
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise HealthCheckError(
                f"a health check has failed for {limit_s:g} s, so this rank does not start again: {text}"
            ) from failure
        _logger.warning("this rank is not healthy, and is checked again in %.1f s: %s", pause_s, text)
        time.sleep(min(pause_s, left_s))


def _first_failure(checks: Sequence[HealthCheck]) -> Exception | None:
    for check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - of the script's own check
            return error.with_traceback(None)
    return None


def _at_least(bytes_min: int, measure: Callable[[], int], what: str) -> HealthCheck:
    def check() -> None:
        if (found := measure()) < bytes_min:
            raise RuntimeError(f"{found} {what}, {bytes_min} are needed")

    return check
