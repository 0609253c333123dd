"""An environment of its own for each torchft that is a peer here, made once by the ordinary pip.

A peer is never imported into our own interpreter: benchmarks and interop tests run it as processes
of its environment, so that no package can lend another a dependency. What else is in it is what
constraints.txt pins, the same torch as in ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".cache"
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_SECONDS_MAX = 600.0
BESIDE = ("torch", "numpy", "pytest", "parameterized", "expecttest")  # the last three are for its own tests


class PeerUnavailableError(RuntimeError):
    """torchft could not be installed; the message has pip's last words."""


@dataclass(frozen=True)
class Peer:
    """A torchft: what pip knows it by, and the version that it is pinned at."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def environment(self) -> Path:
        """The folder of its environment, which `python` makes."""
        return ENVIRONMENTS / f"{self.package}-{self.version}"

    def python(self) -> Path:
        """The interpreter of the peer's environment, which is made first where it is missing.

        Callers in several processes wait for one another; an environment that was left half made, or
        was made for other versions, is made again.

        Raises:
            PeerUnavailableError: it cannot be installed here; the message says why.
        """
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        with locked(ENVIRONMENTS / f"{self.environment.name}.lock"):
            if not self._is_complete():
                self._install()
        return self._interpreter

    @property
    def _interpreter(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def _ready_file(self) -> Path:
        return self.environment / ".ready"

    @property
    def _fingerprint(self) -> str:
        python = f"python {sys.version_info.major}.{sys.version_info.minor}"
        return "\n".join([str(self), *BESIDE, python, CONSTRAINTS.read_text()])

    def _is_complete(self) -> bool:
        ready = self._ready_file
        return ready.exists() and ready.read_text() == self._fingerprint and self._interpreter.exists()

    def _install(self) -> None:
        self._ready_file.unlink(missing_ok=True)  # first: a removal that is interrupted must show
        shutil.rmtree(self.environment, ignore_errors=True)
        python = str(self._interpreter)
        run_installer([sys.executable, "-m", "venv", str(self.environment)], str(self))
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
        run_installer([*pip, str(self), *BESIDE], str(self))
        run_installer([python, "-c", "import torchft"], str(self))
        # Last, so that whatever interrupts the lines above leaves no environment that looks complete.
        self._ready_file.write_text(self._fingerprint)


RELEASE = Peer("torchft", "0.2.0")
NIGHTLY = Peer("torchft-nightly", "2026.10.26")


def run_installer(command: list[str], what: str) -> None:
    """Run a command that makes `what` available.

    Raises:
        PeerUnavailableError: it failed, with the end of what it wrote.
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
            env=_environment_without_ours(),
        )
    except subprocess.CalledProcessError as error:
        last_words = " / ".join(error.stdout.strip().splitlines()[-3:])
        raise PeerUnavailableError(f"{what} cannot be installed: {last_words}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"{what} cannot be installed: {error}") from error


def _environment_without_ours() -> dict[str, str]:
    """PYTHONPATH would show our packages to pip, and to the check that the peer imports alone."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else is in a block with this path, in no other process either."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when this process is killed


if __name__ == "__main__":
    for peer in (RELEASE, NIGHTLY):
        print(peer, peer.python())
