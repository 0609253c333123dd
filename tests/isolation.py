"""A test in a process of its own, with a limit: a hang, or a crash, ends that test and not the run.

A thread that waits for a device cannot be interrupted: only SIGKILL ends it. So the
process that runs the tests never touches the device. It forks for each test, which sets up every fixture
anew; the fork leads a session, and at the limit all of that session is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from _pytest.runner import runtestprotocol

from torchft_like.testing.forks import end_with
from torchft_like.testing.processes import is_in_session, wait_ended

POLL_S = 0.02
ENDING_S_MAX = 20.0
LAST_WORDS_LINES = 60


def run_isolated(item: pytest.Item, limit_s: float) -> None:
    """Run `item` as pytest does, in a fork, and report its outcome."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run(item, limit_s):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run(item: pytest.Item, limit_s: float) -> list[pytest.TestReport]:
    parent = os.getpid()
    begin = time.monotonic()
    with tempfile.NamedTemporaryFile("w+") as reports, tempfile.TemporaryFile("w+") as output:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the fork never asks for the threads of its parent
            pid = os.fork()
        if pid == 0:
            _be_the_test(item, Path(reports.name), output, parent)
        how = _wait(pid, begin + limit_s)
        output.seek(0)
        last_words = "".join(output.readlines()[-LAST_WORDS_LINES:])
        if how == 0:
            return [_restored(item, json.loads(line), last_words) for line in reports]
        what = f"did not end within {limit_s:g} s" if how is None else f"ended its process with {how}"
        return [_failure(item, f"the test {what}\n{last_words}", time.monotonic() - begin)]


def _restored(item: pytest.Item, data: dict[str, Any], output: str) -> pytest.TestReport:
    report: pytest.TestReport = item.config.hook.pytest_report_from_serializable(
        config=item.config, data=data
    )
    if isinstance(report.longrepr, list):  # where and why the test was skipped: a tuple before it was JSON
        report.longrepr = tuple(report.longrepr)
    if report.failed:
        report.sections.append(("output of the test's process", output))
    return report


def _be_the_test(item: pytest.Item, reports: Path, output: IO[str], parent: int) -> None:
    """Run the test in the fork, which ends here."""
    code = 1
    try:
        os.setsid()
        end_with(parent)
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
            # Everything that the test writes is in `output`, even if the test is killed.
            capture._method = "no"
            capture.start_global_capturing()
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        with reports.open("w") as file:
            for report in runtestprotocol(item, log=False, nextitem=None):
                data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
                file.write(json.dumps(data) + "\n")
        code = 0
    except BaseException:  # noqa: BLE001 - the output tells it to the process that runs the tests
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, deadline: float) -> int | None:
    """Return how the process ended, once its whole session is gone; None if it had to be killed."""
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(POLL_S)
        return None
    finally:
        family = [process for process in psutil.process_iter() if is_in_session(process, pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        wait_ended(family, ENDING_S_MAX)
        with contextlib.suppress(ChildProcessError):  # reaped already
            os.waitpid(pid, os.WNOHANG)


def _failure(item: pytest.Item, text: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when="call",
        duration=seconds,
    )
