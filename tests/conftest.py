"""Fixtures for all tests. Above all `processes`: every process that a test starts through it ends with the
test.

Process groups check their collectives (docs/checking-collectives.md), here and in every process that a
test starts, as their operator says. A test that is about groups with another choice, such as
`check_collectives=False`, has no such operator: it uses the fixture `no_operator`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from torchft_like.testing.processes import Processes

ROOT = Path(__file__).parents[1]
WAIT_LIMIT_S = 60.0
CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
os.environ.setdefault(CHECK_ENV, "1")
# torch's TCPStore, client and server, asks the name server about each connection (`::ffff:127.0.0.1` is in no
# list of hosts). The C library waits 5 s for an answer that is lost, and then asks again.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
hypothesis.settings.register_profile("no deadline", deadline=None)  # Time is measured in benchmarks.
hypothesis.settings.load_profile("no deadline")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # A shell makes its background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _first_square_root() -> None:
    """Take the process's first square root: if two threads take it at once, one can get it wrong by 1 in
    14,000.

    Torch does that by itself, in 1 or 2 of 4,000 fresh processes with two threads on two busy cores (2.13,
    x86). Threads that stand for replicas would diverge in their first step with Adam.
    """
    torch.ones(3).sqrt()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Yield a starter of processes that are killed, with their descendants, when the test ends."""
    with Processes(ROOT, {"PYTHONPATH": str(ROOT)}) as starter:
        yield starter


@pytest.fixture
def no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups check their collectives only where their argument says so."""
    monkeypatch.delenv(CHECK_ENV, raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Show what the processes of a failed test wrote."""
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    starter = getattr(item, "funcargs", {}).get("processes")
    if report.failed and isinstance(starter, Processes):
        report.sections += [
            (f"output of process {process.pid}: {' '.join(process.command)}", process.output)
            for process in starter.started
        ]
    return report  # type: ignore[return-value]
