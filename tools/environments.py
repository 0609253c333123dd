"""Environments and files that benchmarks and tests cannot have in their own interpreter, made once in the
user's cache.

An environment is a virtual one with other packages or versions than ours: another torchft, another project,
another torch. pip makes it, or uv where it is installed, which is quicker and shares files between them.
What an environment does not pin is what constraints.txt pins.

The cache is $XDG_CACHE_HOME/torchft_like (~/.cache/torchft_like). Folders in it are named by what they were
made of, so that clones of several versions share it. Any of them can be removed at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchft_like"
INSTALL_SECONDS_MAX = 900.0


class UnavailableError(RuntimeError):
    """Something cannot be had on this machine; the message says what, with the installer's last words."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        name: what an error says is not available; a folder's name begins with it.
        packages: requirements, installed with their dependencies.
        without_dependencies: requirements whose dependencies are not wanted.
        pins: `name==version`, in place of what constraints.txt has for that name.
        python: "3.13"; the version of this interpreter by default.
    """

    name: str
    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    def interpreter(self) -> Path:
        """Return its interpreter; the environment is made first if it is missing.

        Raises:
            UnavailableError: it cannot be made here.
        """
        return make_once(self.name, repr((self, self._constraints())), self._install) / "bin" / "python"

    def _install(self, folder: Path) -> None:
        constraints = folder / "constraints.txt"
        constraints.write_text(self._constraints())
        base, python, uv = find_python(self.python), str(folder / "bin" / "python"), shutil.which("uv")
        virtual = [uv, "venv", "--quiet", "--allow-existing", "--python"] if uv else []
        run_installer([*virtual, base, *([] if uv else ["-m", "venv"]), str(folder)], self.name)
        install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
        install += ["--quiet", "--no-compile", "--constraint", str(constraints)]
        run_installer([*install, *self.packages], self.name)
        if self.without_dependencies:
            run_installer([*install, "--no-deps", *self.without_dependencies], self.name)

    def _constraints(self) -> str:
        replaced = {pin.partition("==")[0] for pin in self.pins}
        lines = CONSTRAINTS.read_text().splitlines()
        return "\n".join([*(line for line in lines if line.partition("==")[0] not in replaced), *self.pins])


def make_once(name: str, contents: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `make` fills if it is missing.

    Callers in several processes wait for one another; a folder that was left half made is made again.

    Args:
        name: the folder's name begins with it.
        contents: all that the folder is made of; another text is another folder.
        make: called with the empty folder.
    """
    digest = hashlib.sha256(contents.encode()).hexdigest()
    folder = CACHE / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', name)}-{digest[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{folder.name}.lock"):
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / ".ready").touch()  # last, so that whatever interrupts the lines above shows
    return folder


def find_python(version: str) -> str:
    """Return an interpreter of this version: our own, one on the PATH, or one of pyenv's.

    Args:
        version: major and minor, "3.13".

    Raises:
        UnavailableError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    kept = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for candidate in (sys.executable, shutil.which(f"python{version}"), *map(str, kept)):
        if candidate and _version_of(candidate) == version:
            return candidate
    raise UnavailableError(f"no Python {version} is installed: put a python{version} on the PATH")


def run_installer(command: list[str], what: str) -> None:
    """Run a command that makes `what` available.

    Raises:
        UnavailableError: it failed, with the end of what it wrote.
    """
    try:
        subprocess.run(
            command,
            check=True,
            timeout=INSTALL_SECONDS_MAX,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_installer_environment(),
        )
    except subprocess.CalledProcessError as error:
        last_words = " / ".join(error.stdout.strip().splitlines()[-3:])
        raise UnavailableError(f"{what} cannot be installed: {last_words}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{what} cannot be installed: {error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let no other thread or process into a block with this path."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when this process is killed


def _version_of(python: str) -> str | None:
    ask = [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # pyenv leaves commands on the PATH that only say so
        return None


def _installer_environment() -> dict[str, str]:
    """Return the environment for an installer.

    PYTHONPATH would show our packages to pip; uv does not read where pip is told to find wheels.
    """
    ours = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {"UV_FIND_LINKS": ",".join(ours.get("PIP_FIND_LINKS", "").split()), **ours}
