"""An environment of its own for torchft 0.2.0, made once by the ordinary pip.

The peer is never imported into our own interpreter: benchmarks and interop tests run it as
processes of this environment, so that neither package can lend the other a dependency. The torch
and numpy in it are the ones that constraints.txt pins, the same as in ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PEER = "torchft==0.2.0"
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".cache" / "torchft-0.2.0"
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_SECONDS_MAX = 600.0


class PeerUnavailableError(RuntimeError):
    """torchft could not be installed; the message has pip's last words."""


def peer_python() -> Path:
    """The interpreter of the peer's environment, which is made first where it is missing.

    Callers in several processes wait for one another; an environment that was left half made, or
    was made for other versions, is made again.

    Raises:
        PeerUnavailableError: it cannot be installed here; the message says why.
    """
    ENVIRONMENT.parent.mkdir(parents=True, exist_ok=True)
    with locked(ENVIRONMENT.with_name(ENVIRONMENT.name + ".lock")):
        if not _is_complete():
            _install()
    return _interpreter()


def _is_complete() -> bool:
    ready = _ready_file()
    return ready.exists() and ready.read_text() == _fingerprint() and _interpreter().exists()


def _install() -> None:
    _ready_file().unlink(missing_ok=True)  # first: a removal that is interrupted must show
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    run_installer([sys.executable, "-m", "venv", str(ENVIRONMENT)], PEER)
    pip = [str(_interpreter()), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    run_installer([*pip, PEER, "torch", "numpy"], PEER)
    run_installer([str(_interpreter()), "-c", "import torchft"], PEER)
    # Last, so that whatever interrupts the lines above leaves no environment that looks complete.
    _ready_file().write_text(_fingerprint())


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


def _interpreter() -> Path:
    return ENVIRONMENT / "bin" / "python"


def _ready_file() -> Path:
    return ENVIRONMENT / ".ready"


def _fingerprint() -> str:
    return f"{PEER}\npython {sys.version_info.major}.{sys.version_info.minor}\n{CONSTRAINTS.read_text()}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else is in a block with this path, in no other process either."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when this process is killed


if __name__ == "__main__":
    print(peer_python())
