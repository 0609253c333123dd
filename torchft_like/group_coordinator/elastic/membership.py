"""A value that names the members of an elastic coordinator."""

from __future__ import annotations

from typing import NamedTuple


class Membership(NamedTuple):
    """The members of one epoch, the same on all of them.

    Attributes:
        epoch: the id of their quorum; later ones are larger.
        store_address: `host:port/prefix` in the store of one of them, where they met.
        members: their names, in the order of their ranks.
    """

    epoch: int
    store_address: str
    members: tuple[str, ...]

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a member; None if nobody of that name is one."""
        return self.members.index(name) if name in self.members else None

    def __str__(self) -> str:
        return f"epoch {self.epoch} ({', '.join(self.members)})"
