"""The package page, followed to the letter: install into an empty environment, and take the first step."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.environments import Environment, UnavailableError, run_installer
from torchft_like.testing.processes import Processes

PAGE = (ROOT / "docs" / "package-page.md").read_text()
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", PAGE)
(SCRIPT,) = (text for language, text in BLOCKS if language == "python")
COMMANDS = [line for language, text in BLOCKS if not language for line in text.splitlines()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree: a build leaves folders in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("torchft_like", "lighthouse"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tree" / "docs").mkdir()
    for name in ("pyproject.toml", "LICENSE", "docs/package-page.md"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    try:
        run_installer([*build, str(folder / "tree")], "a wheel of this tree")
    except UnavailableError as error:
        pytest.skip(f"needs a package index for what builds a wheel: {error}")
    return next(folder.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.integration
def test_the_page_leads_from_an_empty_environment_to_a_step(
    wheel: Path, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.environments.CACHE", tmp_path / "environments")
    try:
        python = Environment("first-step", (str(wheel),)).interpreter()
    except UnavailableError as error:
        pytest.skip(f"needs a package index for what the wheel requires: {error}")
    (tmp_path / "train.py").write_text(SCRIPT)
    nothing_of_ours = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    lighthouse, *trainers = (command for command in COMMANDS if "pip" not in command)
    assert lighthouse.startswith("python -m lighthouse --bind 127.0.0.1:29510 ")
    words = lighthouse.replace(":29510", ":0").split()[1:]
    server = processes.start(str(python), *words, env=nothing_of_ours)
    address = server.wait_for_output(r"listening on (http://\S+)")[1]
    assert trainers == ["TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py"] * 2
    job = {**nothing_of_ours, "TORCHFT_LIGHTHOUSE": address}
    replicas = [processes.start(str(python), str(tmp_path / "train.py"), env=job) for _ in trainers]
    for replica in replicas:
        replica.wait_for_output(r"step 100 with 2 replicas")
        assert replica.wait() == 0
    asked = [str(python.with_name("torchft-like")), "chaos", "--length", "1"]
    refused = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'torchft-like[chaos]'" in refused.stderr, "the core does without psutil"
