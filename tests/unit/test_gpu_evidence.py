"""The script that finds out what holds on a GPU: results whatever happens, and a page that tells them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tools.gpu import evidence, plan, results
from tools.gpu.plan import PROBES, STAGES, Probe
from tools.gpu.running import run
from tools.gpu_evidence import unpacked

FINDS = "from tools.gpu.figures import figure; figure('found', 1.5, 's', bar=2.0); "
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


def test_a_missed_bar_and_a_failure_stand_out() -> None:
    page = results.generated({PROBES[0].name: found(), PROBES[1].name: found("killed at its limit")})
    assert "a step 1.5 s (bar 1: **missed**)" in page
    assert "**killed at its limit**" in page


def test_a_dry_run_never_comes_to_the_page() -> None:
    with pytest.raises(ValueError, match="without a GPU"):
        results.generated({PROBES[0].name: found(dry=True)})


def test_a_probe_that_is_killed_keeps_what_it_had_found(tmp_path: Path) -> None:
    hanging = probe("hangs", FINDS + "import time; time.sleep(600)")
    result = run(hanging, 5.0, tmp_path / "log", dry=True)
    assert result["status"] == "killed at its limit"
    assert [(figure["name"], figure["value"]) for figure in result["figures"]] == [("found", 1.5)]
    assert "found" in (tmp_path / "log").read_text()


def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path) -> None:
    module = tmp_path / "test_skipped.py"
    module.write_text("import pytest\n@pytest.mark.skip\ndef test_it() -> None: ...\n")
    command = ("pytest", "-q", "-p", "no:cacheprovider", str(module))
    skipped = Probe("skipped", "C1", "What?", 60.0, command, command)
    assert run(skipped, 60.0, tmp_path / "log", dry=True)["status"] == "nothing was tested"


def test_a_stage_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write"
    probes = (probe("good", f"{note}('g')"), probe("bad", f"{note}('b'); 1 / 0"))
    monkeypatch.setattr(evidence, "PROBES", probes)
    monkeypatch.setattr(evidence, "_machine", lambda: MACHINE)  # which loads torch to find out

    def stage(*more: str) -> bool:
        path = tmp_path / "results.json"
        arguments = ["gpu_evidence.py", "--stage", "C1", "--dry-run", "--results", str(path), *more]
        monkeypatch.setattr("sys.argv", arguments)
        a_stage = evidence.Stage(evidence._options())
        a_stage.run()
        assert set(json.loads(path.read_text())) <= {"good", "bad"}
        return a_stage.is_complete()

    assert stage("--only", "good")
    assert ran.read_text() == "g"
    assert not stage()
    assert ran.read_text() == "gb"
    assert not stage()
    assert ran.read_text() == "gb"
    assert not stage("--retry")
    assert ran.read_text() == "gbb"


def test_a_stage_begins_nothing_without_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "PROBES", (probe("late", "pass"),))
    monkeypatch.setattr(evidence, "_machine", lambda: MACHINE)
    path = tmp_path / "results.json"
    arguments = ["--stage", "C1", "--dry-run", "--results", str(path), "--minutes", "0.1"]
    monkeypatch.setattr("sys.argv", ["gpu_evidence.py", *arguments])
    evidence.Stage(evidence._options()).run()
    assert not path.exists()


def test_every_probe_has_a_name_of_its_own_and_a_stage() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert {probe.stage for probe in PROBES} == set(STAGES)


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


def test_packages_are_taken_from_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/__init__.py", "")
    assert (unpacked(tmp_path) / "some" / "__init__.py").exists()
    with pytest.raises(SystemExit, match="holds no wheels"):
        unpacked(tmp_path / "elsewhere")
