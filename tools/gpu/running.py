"""One probe as a process: whatever becomes of it, there is a result."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu.figures import VARIABLE, read_figures
from tools.gpu.plan import Probe
from torchft_like.testing.processes import RunningProcess

TAIL_LINES = 25
LINE_MAX = 240


def run(probe: Probe, limit_s: float, log: Path, *, dry: bool) -> dict[str, Any]:
    """Run a probe to its end or its limit, and return what it found.

    Args:
        limit_s: of this run, at most the probe's own.
        log: everything that it writes is added to this file.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures, output = Path(folder, "figures"), Path(folder, "output")
        command = [sys.executable, "-m", *(probe.without if dry else probe.on_gpu)]
        begin = time.monotonic()
        child = RunningProcess(command, output, {VARIABLE: str(figures), "OMP_NUM_THREADS": "1"})
        try:
            has_ended = child.ends_within(limit_s)
        finally:
            child.kill()
        written = output.read_text(errors="replace")
        with log.open("a") as file:
            file.write(f"===== {probe.name}: {' '.join(command)}\n{written}\n")
        found = read_figures(figures)
        status = _status(child.exit_code if has_ended else None, written, of_tests=probe.is_of_tests)
        return {
            "status": status,
            "seconds": round(time.monotonic() - begin, 1),
            "figures": found,
            "detail": "" if status == "passed" else _last_words(written),
        }


def _status(code: int | None, written: str, *, of_tests: bool) -> str:
    """Return `passed`, or why not. Tests that were all skipped have not passed."""
    if code is None:
        return "killed at its limit"
    if code < 0:
        return f"ended by signal {-code}"
    if code == 0 and of_tests and not re.search(r"\b[1-9]\d* passed", written):
        return "nothing was tested"
    return "passed" if code == 0 else "failed"


def _last_words(written: str) -> str:
    lines = written.splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "\n".join(line[:LINE_MAX] for line in [*named, *lines[-TAIL_LINES:]])
