"""Environments are made once, made again when left half made, and refused with the reason."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tools import environments
from tools.environments import Environment, UnavailableError, find_python, make_once, run_installer

OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def _an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")


def test_a_folder_is_made_once_and_again_when_it_was_left_half_made() -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "content").touch()
        made.append(folder)

    folder = make_once("a name: with/signs", "1", make)
    assert make_once("a name: with/signs", "1", make) == folder
    assert len(made) == 1
    (folder / ".ready").unlink()
    assert make_once("a name: with/signs", "1", make) == folder
    assert len(made) == 2
    assert make_once("a name: with/signs", "2", make) != folder


def test_a_folder_whose_making_fails_is_not_taken_for_made() -> None:
    def fail(_: Path) -> None:
        raise UnavailableError("no paper")

    for _ in range(2):
        with pytest.raises(UnavailableError, match="no paper"):
            make_once("x", "", fail)


def test_pins_replace_constraints_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "CONSTRAINTS", tmp_path / "constraints.txt")
    (tmp_path / "constraints.txt").write_text("# why\ntorch==1\ntorchdata==1\n")
    environment = Environment("x", ("torch",), pins=("torch==2",))
    assert environment._constraints().splitlines() == ["# why", "torchdata==1", "torch==2"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_environment_has_the_python_asked_for(monkeypatch: pytest.MonkeyPatch, installer: str) -> None:
    if installer == "pip":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    elif not shutil.which("uv"):
        pytest.skip("uv is not installed")
    commands: list[list[str]] = []
    real = run_installer

    def without_packages(command: list[str], what: str) -> None:
        commands.append(command)
        if "install" not in command:  # nor an installer, which takes longest
            real([*command, "--without-pip"] if "venv" in command else command, what)

    monkeypatch.setattr(environments, "run_installer", without_packages)
    interpreter = Environment("x", ("torch",), ("ray",), python=OURS).interpreter()
    assert environments._version_of(str(interpreter)) == OURS
    assert interpreter.is_relative_to(environments.CACHE)
    assert [command[-1] for command in commands[1:]] == ["torch", "ray"]
    assert ["--no-deps" in command for command in commands] == [False, False, True]


def test_what_only_says_it_is_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"no Python 3\.99"):
        find_python("3.99")
    kept = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    kept.parent.mkdir(parents=True)
    kept.write_text("#!/bin/sh\necho 3.99\n")
    kept.chmod(0o755)
    assert find_python("3.99") == str(kept)


def test_a_failed_installation_is_told_with_its_reason() -> None:
    with pytest.raises(UnavailableError, match=r"it cannot be installed: .*no such index"):
        run_installer([sys.executable, "-c", "import sys; sys.exit('no such index')"], "it")
