"""The package page and the quickstart, followed to the letter.

The package page begins with an empty environment. The quickstart has the same script, and kills it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import blocks
from tools.environments import Environment, UnavailableError, run_installer
from torchft_like.testing.cluster import Cluster
from torchft_like.testing.processes import Processes

BLOCKS = blocks(ROOT / "docs" / "package-page.md")
(SCRIPT,) = (block.text for block in BLOCKS if block.language == "python")
COMMANDS = [line for block in BLOCKS if not block.language for line in block.text.splitlines()]
TRAINER = "TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py"


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
@pytest.mark.timeout(1200)  # torch is installed, too
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
    assert trainers == [TRAINER] * 2
    job = {**nothing_of_ours, "TORCHFT_LIGHTHOUSE": address}
    replicas = [processes.start(str(python), str(tmp_path / "train.py"), env=job) for _ in trainers]
    for replica in replicas:
        replica.wait_for_output(r"step 20, 2 replicas")
    asked = [str(python.with_name("torchft-like")), "chaos", "--length", "1"]
    refused = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'torchft-like[chaos]'" in refused.stderr, "the core does without psutil"


@pytest.mark.integration
def test_a_replica_of_the_quickstart_is_killed_and_comes_back(tmp_path: Path) -> None:
    script, commands = (
        [block.text for block in blocks(ROOT / "docs" / "quickstart.md") if block.language == language]
        for language in ("python", "")
    )
    assert script == [SCRIPT]
    assert commands[1].splitlines().count(TRAINER) == 3
    (tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(tmp_path, min_replicas=2) as cluster:
        groups = [cluster.launch(name, [str(tmp_path / "train.py")]) for name in "abc"]
        for group in groups:
            group.ranks[0].wait_for_output("3 replicas")
        groups[2].kill()
        groups[0].ranks[0].wait_for_output(r"(?s)3 replicas.*2 replicas")
        again = cluster.launch("c", [str(tmp_path / "train.py")])
        again.ranks[0].wait_for_output("3 replicas")
        assert again.events("heal")
