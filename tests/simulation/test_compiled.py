"""The simulation in machine code has the same histories as its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import compiled
from tests.simulation.__main__ import main
from tests.simulation.mutants import MUTANTS

MUTANT = next(mutant for mutant in MUTANTS if mutant.name == "forgets rounds")

MISSING = compiled.missing_tools()
has_compiler = pytest.mark.skipif(bool(MISSING), reason=f"nothing can be compiled without {MISSING}")


@pytest.fixture(autouse=True)
def _not_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.OPTIMIZATION_ENV, "0")


@pytest.mark.slow
@has_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "0:200"],
        ["--seed", "11", "--all"],
        ["--seed", str(MUTANT.seed), "--mutant", MUTANT.name],
    ],
    ids=["many seeds", "one history", "a mutant made small"],
)
def test_machine_code_has_the_same_histories(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)
    interpreted = _without_timing(capfd.readouterr().out)
    assert main([*arguments, "--compiled"]) == code
    assert _without_timing(capfd.readouterr().out) == interpreted
    assert interpreted


@pytest.mark.slow
@has_compiler
@pytest.mark.timeout(600)
def test_the_cores_are_machine_code_indeed() -> None:
    folder = compiled.compiled()
    for core in ("lighthouse/core/quorum", "torchft_like/core/replica_group", "torchft_like/core/step"):
        assert list(folder.glob(f"{core}.*.so"))


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "BUILDS", tmp_path)
    monkeypatch.setenv("CC", "a-compiler-of-dreams")
    assert main(["--seeds", "0:1", "--compiled"]) == 2
    assert "'a-compiler-of-dreams' is not there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sources_that_cannot_be_compiled_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "BUILDS", tmp_path)
    monkeypatch.setattr(compiled, "MYPYC", ("-c", "raise SystemExit('no such luck')"))
    assert main(["--seeds", "0:1", "--compiled"]) == 2
    assert "no such luck" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _without_timing(text: str) -> list[str]:
    return [line for line in text.splitlines() if "of CPU each" not in line]
