"""The simulation in machine code: the same sources, compiled by mypyc, in a folder of their own.

mypyc compiles the parts of the simulation: the cores, the simulated world and the checker. Their
packages are there without what their `__init__` would load, which is torch. The folder is named after
the sources, so it is never older than they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "simulation"
PACKAGES = ("lighthouse", "torchft_like", "tests/simulation")
# Modules that mypyc cannot compile: an enum whose members have attributes, a kind of bytes, errors with two
# bases.
INTERPRETED = (
    "lighthouse/core/decisions.py",
    "lighthouse/errors.py",
    "torchft_like/core/quorum_secret.py",
    "torchft_like/errors.py",
)

# The variable is mypyc's own: 0 compiles in half the time, and the code runs more slowly.
OPTIMIZATION_ENV = "MYPYC_OPT_LEVEL"
MYPYC = ("-m", "mypyc", "--strict", "--follow-imports=silent", "--ignore-missing-imports")
LIST_MODULES = """
import sys
import tests.simulation.report
print(*(module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)), sep="\\n")
"""


class CannotCompileError(Exception):
    """A tool is missing, or mypyc failed. The message says which, and how to go on."""


def run_compiled(arguments: Sequence[str]) -> int:
    """Run the simulation's command line in machine code, and return its exit code.

    Raises:
        CannotCompileError: see there.
    """
    folder = compiled()
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=folder, env=_environment(folder), check=False).returncode


def compiled() -> Path:
    """Return the folder with the compiled simulation; to make it takes up to a minute."""
    folder = BUILDS / _digest()
    if not folder.exists():
        _check_tools()
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as temporary:
            workshop = Path(temporary) / "simulation"
            _copy_sources(workshop)
            _compile(workshop)
            _move(workshop, folder)
        _remove_older(folder)
    return folder


def missing_tools() -> list[str]:
    """Return what has to be installed before anything can be compiled."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(compiler) else [f"a C compiler ({compiler!r} is not there)"]
    return missing if header.exists() else [*missing, f"Python's headers ({header} is not there)"]


def _check_tools() -> None:
    if missing := missing_tools():
        raise CannotCompileError(
            f"To compile the simulation takes {' and '.join(missing)}: install what is missing, "
            f"or leave `--compiled` out, at less than half the speed."
        )


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def _digest() -> str:
    made_with = (sys.version, sysconfig.get_platform(), version("mypy"), os.environ.get(OPTIMIZATION_ENV))
    digest = hashlib.sha256(repr(made_with).encode())
    for source in _sources():
        digest.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _copy_sources(folder: Path) -> None:
    for source in _sources():
        copy = folder / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.name == "__init__.py":
            copy.touch()
        else:
            shutil.copyfile(source, copy)
    (folder / "tests" / "__init__.py").touch()


def _compile(folder: Path) -> None:
    print("compiling the simulation ...", file=sys.stderr, flush=True)
    listed = _run([sys.executable, "-c", LIST_MODULES], folder)
    ours = [file for file in map(Path, listed.splitlines()) if file.is_relative_to(folder)]
    modules = [str(file.relative_to(folder)) for file in ours if file.name != "__init__.py"]
    _run([sys.executable, *MYPYC, *(module for module in modules if module not in INTERPRETED)], folder)


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotCompileError(
            f"mypyc could not compile the simulation; without `--compiled` it runs as it is, at less than "
            f"half the speed.\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


def _move(workshop: Path, folder: Path) -> None:
    """Move the folder to its place, unless another process was faster."""
    try:
        workshop.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _remove_older(folder: Path) -> None:
    for other in BUILDS.iterdir():
        if other != folder and len(other.name) == len(folder.name):  # leaves those that are being made
            shutil.rmtree(other, ignore_errors=True)
