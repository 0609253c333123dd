"""Each torchft that is a peer here, in an environment of its own.

A peer is never imported into our own interpreter: benchmarks and interop tests run it as processes
of its environment, so that no package can lend another a dependency. What else is in it is what
constraints.txt pins, the same torch as in ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.environments import Environment

BESIDE = ("torch", "numpy", "pytest", "parameterized", "expecttest")  # the last three are for its own tests


@dataclass(frozen=True)
class Peer:
    """A torchft: what pip knows it by, and the version that it is pinned at."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"

    def python(self) -> Path:
        """The interpreter of the peer's environment, which is made first where it is missing.

        Raises:
            UnavailableError: it cannot be installed here; the message says why.
        """
        return Environment(f"{self.package}-{self.version}", (str(self), *BESIDE)).interpreter()


RELEASE = Peer("torchft", "0.2.0")
NIGHTLY = Peer("torchft-nightly", "2026.10.26")


if __name__ == "__main__":
    for peer in (RELEASE, NIGHTLY):
        print(peer, peer.python())
