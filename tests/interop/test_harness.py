"""The processes of benchmarks and interop tests: awaited by what they report, always ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run, tables
from benchmarks.processes import Fleet
from benchmarks.systems import System

pytestmark = pytest.mark.integration

PRINT_ORIGINS = """
import json, sys
from importlib.metadata import version
from importlib.util import find_spec
files = [find_spec(name).origin for name in ("torch", "torchft")]
print(json.dumps({"files": files, "version": version(sys.argv[1])}))
"""


@pytest.mark.timeout(900)  # where nobody has asked for the peer yet, it is installed
def test_a_peer_and_its_torch_are_in_an_environment_of_their_own(fleet: Fleet, peer: System) -> None:
    assert peer.peer is not None
    process = fleet.start("peer", [peer.interpreter, "-c", PRINT_ORIGINS, peer.peer.package])
    seen = fleet.record(process)
    assert all(Path(file).is_relative_to(Path(peer.interpreter).parents[1]) for file in seen["files"]), seen
    assert seen["version"] == peer.peer.version


def test_the_readme_shows_the_saved_results() -> None:
    shown = tables.README.read_text()
    assert shown.endswith(tables.generated(run.saved_results())), "run: python -m benchmarks.run --tables"
