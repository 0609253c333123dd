"""Runtimes that are broken on purpose, in real processes under real faults: the checker objects to each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchft_like.testing.chaos.campaign import Engine, features, make_report
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import draw

pytestmark = [pytest.mark.integration, pytest.mark.slow]
IN_WORKERS = 'import sys\nif "torchft_like.testing.chaos.worker" in sys.orig_argv:\n'
WRONG_AVERAGE = """
    from torchft_like.manager import managed_work
    divide = managed_work.divide
    managed_work.divide = lambda tensors, count: divide(tensors, count + 1)
"""
FAILED_STEP_APPLIED = """
    from torchft_like.optim import OptimizerWrapper
    def step(self, closure=None):
        self.manager.should_commit()
        self.optim.step()
    OptimizerWrapper.step = step
"""
STATE_NOT_LOADED = """
    from torchft_like.manager.state_registry import StateRegistry
    StateRegistry.own = lambda registry: None
    StateRegistry.load = lambda registry, state, own: None
"""


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        pytest.param(WRONG_AVERAGE, "no_zombie", id="averages are divided by one too many"),
        pytest.param(FAILED_STEP_APPLIED, "no_trace", id="a step that failed is applied"),
        pytest.param(STATE_NOT_LOADED, "agreement", id="a peer's state is fetched and not loaded"),
    ],
)
def test_a_broken_runtime_does_not_pass(
    change: str, violation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_WORKERS + change)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    settings = JobSettings(replicas=3, cold=True)
    plan = draw(1, ["kill"], 6, 2, settings.replicas)
    offered = features(settings, network=False)
    run = Engine(settings, tmp_path / "chaos", offered, lambda _: None, seed=1).run(plan, 6)
    report = make_report(run, {})
    assert not report.passed
    found = [text.partition(":")[0] for texts in report.problems.values() for text in texts]
    assert violation in found, report.to_text()
