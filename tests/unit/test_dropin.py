"""The harness of the drop-in tests: what it concludes from records, and what its observer writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.dropin.evidence import Record, common_steps, differences, incarnation, names
from tests.dropin.run import run_script
from tests.dropin.scripts import SCRIPTS, Script
from tests.dropin.table import PAGE, page
from tools import environments
from torchft_like.testing.processes import Processes

STAGE = ROOT / "tests/dropin/stage/sitecustomize.py"
SCRIPT = """
import runpy, sys, torch
stage = runpy.run_path(sys.argv[1])
act = lambda module: stage["observe"](sys.modules["torch.optim.optimizer"])
sys.meta_path.insert(0, stage["AfterImport"]({"tabnanny": act}))
import tabnanny

class Manager:
    step = 0
    def current_step(self): return self.step
    def replica_id(self): return "a:1"

manager = Manager()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
optimizer = torch.optim.SGD([weight], lr=1.0)
optimizer.step()
manager.step = 1
optimizer.step()
torch.optim.Adam([weight]).step()
"""


def record(replica: str, step: int, digest: str = "d", rank: int = 0) -> Record:
    return Record(float(step), 1, rank, replica, step, digest)


def test_only_steps_of_every_rank_of_all_replicas_are_common() -> None:
    records = [
        record(replica, step, rank=rank) for replica in ("a:1", "b:2") for step in (1, 2) for rank in (0, 1)
    ]
    records += [record("a:1", 3, rank=0), record("a:1", 3, rank=1), record("b:2", 3, rank=0)]
    assert common_steps(records, ["a:1", "b:2"], ranks=2) == [1, 2]


def test_an_incarnation_is_the_one_that_wrote_last() -> None:
    records = [record("a:9", 1), record("a:1", 4), record("b:2", 2)]
    assert names(records) == ["a", "b"]
    assert incarnation(records, "a") == "a:1"
    assert incarnation(records, "c") is None


def test_ranks_of_one_number_must_agree_and_others_need_not() -> None:
    agreed = [record("a:1", 1, "x", rank=0), record("a:1", 1, "y", rank=1), record("b:2", 1, "x", rank=0)]
    assert differences(agreed) == []
    assert differences([*agreed, record("b:2", 1, "x", rank=1)]) == [
        "rank 1 after step 1: {'a:1': 'y', 'b:2': 'x'}"
    ]


def test_of_several_optimizers_in_a_step_the_last_record_counts() -> None:
    assert differences([record("a:1", 1, "early"), record("a:1", 1, "x"), record("b:2", 1, "x")]) == []


def test_the_observer_writes_one_record_for_each_step_of_the_optimizer_after_a_commit(
    tmp_path: Path, processes: Processes
) -> None:
    """In a fork, which has torch loaded: another module stands for the one that is waited for."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    environment = {"DROPIN_RECORDS": str(tmp_path), "DROPIN_OPTIMIZER": "SGD"}
    process = processes.fork(str(script), str(STAGE), env=environment)
    assert process.wait() == 0, process.output
    (path,) = tmp_path.glob("*.jsonl")
    (line,) = path.read_text().splitlines()
    assert {"replica": "a:1", "step": 1, "rank": 0}.items() <= json.loads(line).items()


def test_a_script_is_run_or_says_why_not() -> None:
    assert [script.name for script in SCRIPTS if bool(script.command) is bool(script.not_run)] == []


def test_what_cannot_be_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: list[str], what: str) -> None:
        raise environments.UnavailableError(f"{what} cannot be installed: no such index")

    monkeypatch.setattr(environments, "CACHE", tmp_path)
    monkeypatch.setattr(environments, "run_installer", fail)
    outcome = run_script(Script("x", "x==1", ("no-such-package==1",), ("-c", "pass")), seconds_left=60.0)
    assert "x cannot be installed" in outcome.not_run
    assert not outcome.failed


def test_a_script_for_which_no_time_is_left_fails() -> None:
    assert run_script(Script("x", "x==1", command=("-c", "pass")), seconds_left=0.0).failed


def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text() == page(), "run `make dropin` with --save, or tests.dropin.table.page"
