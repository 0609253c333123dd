"""torchft's own tests of several replicas, as they are in its packages."""

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
PLUGINS = Path(__file__).parent / "in_peer"


PYTEST_ALONE = ("-m", "pytest", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-rP")

# Of the others that start replicas, some demand that an answer takes less than 0.4 s, or that no replica is
# 0.1 s behind the others: on a busy machine they fail under torchft's lighthouse, too.
SUITE = "torchft.manager_integ_test"

# That one replica waits in vain is told in other words than torchft's.
OTHER_WORDS = "test_quorum_timeout"


def run(processes: Processes, *command: str | Path, **environment: str) -> str:
    with locked(Path(tempfile.gettempdir(), f"torchft-tests-{os.getuid()}.lock")):  # their ports are fixed
        tests = processes.start(*map(str, command), env=environment)
        code = tests.wait(SUITE_SECONDS_MAX)
    assert code == 0, tests.output
    assert re.search(r"\d+ passed", tests.output)
    return tests.output


def test_torchft_s_own_tests_pass_under_our_lighthouse(processes: Processes, peer: System) -> None:
    tests = *PYTEST_ALONE, "-p", "our_lighthouse", "--pyargs", SUITE
    output = run(
        processes,
        peer.interpreter,
        *tests,
        PYTHONPATH=str(PLUGINS),
        LIGHTHOUSE_PYTHON=sys.executable,
        LIGHTHOUSE_PATH=str(ROOT),
    )
    assert "our lighthouse listens on" in output, "their tests had another lighthouse"


@pytest.mark.parametrize("suite", ["manager_integ_test.py", "local_sgd_integ_test.py"])
def test_torchft_s_own_tests_pass_with_this_package_in_its_place(
    processes: Processes, peer: System, suite: str
) -> None:
    (torchft,) = Path(peer.interpreter).parent.parent.glob("lib/python*/site-packages/torchft")
    tests = *PYTEST_ALONE, "--import-mode=importlib", "-p", "in_torchfts_place", torchft / suite
    output = run(
        processes,
        sys.executable,
        *tests,
        "-k",
        f"not {OTHER_WORDS}",
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, PLUGINS))),
        TORCHFT=str(torchft),
    )
    assert "torchft's Manager is of torchft_like." in output, "their tests tested another package"
