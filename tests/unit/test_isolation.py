"""Tests in processes of their own: a hang and a crash end one test, and what it has started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import ROOT

LIMIT_S = 60.0
CONFTEST = """
import pytest
from tests.isolation import run_isolated

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    run_isolated(item, 3.0 if "hangs" in item.name else 60.0)
    return True
"""
TESTS = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def made():
    yield os.getpid()
    Path("made").open("a").write("torn down\\n")

def test_hangs_in_native_code():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child").write_text(str(child.pid))
    print("the last words", flush=True)
    ctypes.PyDLL(None).sleep(600)  # with the GIL held: no thread of Python's can end it

def test_crashes():
    os.abort()

def test_fails(made):
    print("what it wrote")
    assert made == 0, "it is not"

def test_passes(made):
    assert made == os.getpid()

@pytest.mark.skip(reason="no such device")
def test_is_skipped():
    raise AssertionError
"""


def test_a_hang_ends_one_test_and_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", "-v", "test_some.py"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "3 failed, 1 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    for words in ("did not end within 3 s", "the last words", "ended its process with -6", "what it wrote"):
        assert words in ran.stdout
    assert (tmp_path / "made").read_text() == "torn down\n" * 2
    with contextlib.suppress(psutil.NoSuchProcess):  # or it is dead, and init has yet to take note of it
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE
