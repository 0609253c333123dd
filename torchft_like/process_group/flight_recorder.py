"""NCCL's flight recorder: torch keeps a record of a process's last collectives, and writes it when asked."""

from __future__ import annotations

import logging
import os
from pathlib import Path

TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
TORCHFT_TRIGGER_FR_ON_ABORT = "TORCHFT_TRIGGER_FR_ON_ABORT"
TORCH_FR_DUMP_TEMP_FILE_ENV = "TORCH_FR_DUMP_TEMP_FILE"

_logger = logging.getLogger(__name__)


def trigger_nccl_fr_trace_through_pipe(rank: int) -> bool:
    """Ask torch's monitor for a trace, through the pipe of the rank; do not wait until it is written.

    Returns:
        Whether a monitor reads that pipe: torch makes it if TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set.
    """
    prefix = os.environ.get(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
    if not prefix:
        _logger.info("no flight recorder trace: %s is not set", TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
        return False
    pipe = f"{prefix}{rank}.pipe"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails if no monitor reads the pipe
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        _logger.warning("no flight recorder trace through %s: %s", pipe, error.strerror)
        return False
    _logger.info("asked for a flight recorder trace through %s", pipe)
    return True


def is_wanted_on_abort() -> bool:
    """Return whether the operator wants a trace whenever a group is aborted."""
    return os.environ.get(TORCHFT_TRIGGER_FR_ON_ABORT, "").lower() in ("1", "true")


class DumpPath:
    """The place where torch writes traces: one folder for each quorum, if TORCH_FR_DUMP_TEMP_FILE is set."""

    def __init__(self) -> None:
        self._prefix = os.environ.get(TORCH_FR_DUMP_TEMP_FILE_ENV)

    def follow(self, quorum_id: int | None, rank: int) -> None:
        """Send later traces to PREFIX_quorum_ID/RANK; log a folder that cannot be made."""
        if not self._prefix or quorum_id is None:
            return
        folder = Path(f"{self._prefix}_quorum_{quorum_id}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning("traces stay where they are: %s: %s", folder, error.strerror)
            return
        os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] = str(folder / str(rank))
