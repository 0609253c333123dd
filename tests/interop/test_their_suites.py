"""torchft's own tests of several replicas, as they are in its packages, under our lighthouse."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.systems import System
from tests.conftest import ROOT
from tools.environments import locked
from torchft_like.testing.processes import Processes

# The first test of a machine installs the peer, which takes longer than a test may.
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(1500)]

SUITE_SECONDS_MAX = 300.0
PLUGIN = Path(__file__).parent / "in_peer"


# Of the others that start replicas, some demand that an answer takes less than 0.4 s, or that no replica is
# 0.1 s behind the others: on a busy machine they fail under torchft's lighthouse, too.
SUITE = "torchft.manager_integ_test"


def test_torchft_s_own_tests_pass_under_our_lighthouse(processes: Processes, peer: System) -> None:
    pytest_alone = ("-m", "pytest", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-rP")
    environment = {
        "PYTHONPATH": str(PLUGIN),
        "LIGHTHOUSE_PYTHON": sys.executable,
        "LIGHTHOUSE_PATH": str(ROOT),
    }
    with locked(Path(tempfile.gettempdir(), f"torchft-tests-{os.getuid()}.lock")):  # their ports are fixed
        tests = processes.start(
            peer.interpreter, *pytest_alone, *("-p", "our_lighthouse", "--pyargs", SUITE), env=environment
        )
        code = tests.wait(SUITE_SECONDS_MAX)
    assert code == 0, tests.output
    assert re.search(r"\d+ passed", tests.output)
    assert "our lighthouse listens on" in tests.output, "their tests had another lighthouse"
