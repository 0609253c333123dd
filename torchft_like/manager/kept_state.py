"""The state that a process keeps from one try of its training function to the next (`in_process`).

A Manager that ends keeps its state, if it is certain which version that is (`StepProtocol.held`). The one of
the next try, which heals to just that version, takes it instead of a peer's bytes where the peer's checksums
say that it is the same: by `agreement` all of it is, but for what a script lets differ. So two things have to
fail before a wrong state is taken, the version and the checksum.

Tensors of the CPU are kept as they are, and cost no time: between two tries no code should write to them, and
if some does, the sums tell. Those of a device are moved to the CPU. Its memory is what the next try lacks
first, a device that has failed may give nothing back later, and the sums are taken on the CPU anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torchft_like.checkpointing.state_stream import flatten_state
from torchft_like.core.catch_up import Version
from torchft_like.plain_data import Leaf, settled


class KeptState(NamedTuple):
    """A state, as its leaves in the form in which it is sent."""

    version: Version
    leaves: Sequence[Leaf]


class StateKeeper:
    """Keeps one state, that of the last Manager that had any."""

    def __init__(self) -> None:
        self.kept: KeptState | None = None

    def keep(self, version: Version, state: Mapping[str, object]) -> None:
        """Keep a state instead of the one before.

        Raises:
            CheckpointFormatError: the state cannot be sent; nothing is kept then.
        """
        self.kept = None
        _, leaves = flatten_state(state)
        self.kept = KeptState(
            version,
            [settled(leaf.detach()).cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        )


_present: list[StateKeeper] = []  # of the blocks of `keeping`, the innermost last


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Let a Manager that ends in a block keep its state for one that is made later in it."""
    _present.append(StateKeeper())
    try:
        yield
    finally:
        _present.pop()


def present() -> StateKeeper | None:
    """Return the keeper of the present block; None outside of any."""
    return _present[-1] if _present else None
