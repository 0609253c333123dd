"""Who the members of an elastic coordinator are to be, and what a vote about it comes to. Values only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from torchft_like.process_group.store import StoreAddress, parse_store_address

NAME_CHARACTERS_MAX = 200
_SWITCH = "switch"
_ROLL_BACK = "roll back: "


@dataclass(frozen=True)
class Membership:
    """The members of one epoch. All of them, and those who leave, are told the same one.

    Attributes:
        epoch: larger than that of any membership that was tried before.
        store_address: `host:port/prefix` of a TCPStore that all members reach for as long as they change;
            the prefix was never used before. A store on a member dies with it: better, the launcher's.
        members: their names, in the order of their ranks.

    Raises:
        ValueError: there are no members, or two of one name, or a name or the epoch is none.
        AddressError: the address is malformed.
    """

    epoch: int
    store_address: str
    members: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if type(self.epoch) is not int or self.epoch < 1:
            raise ValueError(f"an epoch is a positive number, not {self.epoch!r:.40}")
        if not self.members or len(set(self.members)) < len(self.members):
            raise ValueError(f"members have names, each its own: {list(self.members)!r:.200}")
        if any(type(name) is not str or not 0 < len(name) <= NAME_CHARACTERS_MAX for name in self.members):
            raise ValueError(f"a name has 1 to {NAME_CHARACTERS_MAX} characters: {list(self.members)!r:.200}")
        parse_store_address(self.store_address)

    @property
    def store(self) -> StoreAddress:
        """Where the members meet."""
        return parse_store_address(self.store_address)

    def rank_of(self, name: str) -> int | None:
        """The rank of a member; None if it is not one."""
        return self.members.index(name) if name in self.members else None

    def __str__(self) -> str:
        return f"epoch {self.epoch} ({', '.join(self.members)})"

    @property
    def digest(self) -> str:
        """Of all that the members must have been told alike."""
        told = json.dumps([self.epoch, self.members]).encode()
        return hashlib.blake2b(told, digest_size=16).hexdigest()


class Verdict(NamedTuple):
    """What stands in the store about a change."""

    switches: bool
    reason: str = ""

    @property
    def text(self) -> str:
        """As it is written down."""
        return _SWITCH if self.switches else f"{_ROLL_BACK}{self.reason}"

    @classmethod
    def parse(cls, text: str) -> Verdict:
        """What `text` says; anything but a switch is none."""
        return cls(True) if text == _SWITCH else cls(False, text.removeprefix(_ROLL_BACK))


SWITCH = Verdict(True)


def differing(own: Membership, digests: list[str]) -> str | None:
    """Why the members have not been told the same; None if they have."""
    others = [own.members[rank] for rank, digest in enumerate(digests) if digest != own.digest]
    return f"{', '.join(others)} were told another membership than {own}" if others else None
