"""The script that finds out what holds on a GPU: results whatever happens, and a page that tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tools.gpu import plan, results
from tools.gpu.plan import PROBES, Probe
from tools.gpu.running import run

MACHINE = {"": "a GPU", "torch": "2.11.0", "commit": "abc"}


def probe(name: str, code: str, *, limit_s: float = 60.0, stage: str = "C1") -> Probe:
    """Its process runs `code`."""
    command = ("timeit", "-n", "1", "-r", "1", code)
    return Probe(name, stage, "What?", limit_s, command, command)


def found(status: str = "passed", *, dry: bool = False) -> dict[str, Any]:
    figures = [{"name": "a step", "value": 1.5, "unit": "s", "bar": 1.0}]
    return {
        "status": status,
        "seconds": 1.0,
        "figures": figures,
        "detail": "",
        "dry": dry,
        "machine": MACHINE,
    }


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_page_says_what_the_committed_results_say() -> None:
    """Else: `python tools/gpu_evidence.py --page`."""
    _, _, part = results.PAGE.read_text().partition(results.BEGIN)
    assert results.BEGIN + part == results.generated(results.load(results.COMMITTED))


def test_a_dry_run_never_comes_to_the_page() -> None:
    with pytest.raises(ValueError, match="without a GPU"):
        results.generated({PROBES[0].name: found(dry=True)})


def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path) -> None:
    module = tmp_path / "test_skipped.py"
    module.write_text("import pytest\n@pytest.mark.skip\ndef test_it() -> None: ...\n")
    command = ("pytest", "-q", "-p", "no:cacheprovider", str(module))
    skipped = Probe("skipped", "C1", "What?", 60.0, command, command)
    assert run(skipped, 60.0, tmp_path / "log", dry=True)["status"] == "nothing was tested"


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_a_probe_runs_is_there(probe: Probe) -> None:
    for command in (probe.on_gpu, probe.without):
        if command[0] != "pytest":
            assert (ROOT / command[0].replace(".", "/")).with_suffix(".py").exists()
            continue
        paths = [ROOT / word for word in command if word.startswith("tests/")]
        assert paths
        assert all(path.exists() for path in paths)
        if "-k" in command:
            chosen = plan.part_of_name(command[command.index("-k") + 1])
            assert any(
                chosen in line
                for path in paths
                for line in path.read_text().splitlines()
                if "def test_" in line
            )
