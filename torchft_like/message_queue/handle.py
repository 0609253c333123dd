"""The handle of a queue, with which a reader joins it: plain data, for any channel that the processes have.

A process that has the handle can read the queue: it holds the secrets that the writer asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from torchft_like.message_queue.ring import SLOT_BYTES_MIN, Geometry

T = TypeVar("T")
VERSION = 1
TOKEN_BYTES = 32
SLOTS_MAX = 2**20
SLOT_BYTES_MAX = 2**40
READERS_MAX = 4096
RANK_MAX = 2**31 - 1


@dataclass(frozen=True)
class RemoteHandle:
    """The address to which remote readers connect, and the key of the encrypted connection."""

    address: str
    server_key: bytes = field(repr=False)


@dataclass(frozen=True)
class QueueHandle:
    """The description of one queue. `local_ranks` read shared memory, `n_remote` others the socket."""

    name: str
    token: bytes = field(repr=False)
    geometry: Geometry
    local_ranks: tuple[int, ...]
    n_remote: int
    remote: RemoteHandle | None

    def to_plain(self) -> dict[str, object]:
        """Return the handle as plain data."""
        return {
            "version": VERSION,
            "name": self.name,
            "token": self.token,
            "slots": self.geometry.slots,
            "slot_bytes": self.geometry.slot_bytes,
            "local_ranks": list(self.local_ranks),
            "n_remote": self.n_remote,
            "address": self.remote.address if self.remote else None,
            "server_key": self.remote.server_key if self.remote else None,
        }

    @classmethod
    def from_plain(cls, value: object) -> QueueHandle:
        """Return the handle from which `to_plain` made the value.

        Raises:
            ValueError: this is not one.
        """
        if not isinstance(value, dict) or value.get("version") != VERSION:
            raise ValueError(
                f"this is no handle of a message queue, or one of another version, but a "
                f"{type(value).__name__}: pass what the writer's export_handle() returns"
            )
        geometry = Geometry(
            _int(value, "slots", 1, SLOTS_MAX), _int(value, "slot_bytes", SLOT_BYTES_MIN, SLOT_BYTES_MAX)
        )
        remote = None
        if value.get("address") is not None:
            remote = RemoteHandle(_typed(value, "address", str), _typed(value, "server_key", bytes))
        return cls(
            _typed(value, "name", str),
            _typed(value, "token", bytes),
            geometry,
            _ranks(_typed(value, "local_ranks", list)),
            _int(value, "n_remote", 0, READERS_MAX),
            remote,
        )


def is_rank(value: object) -> TypeGuard[int]:
    """Return whether a reader can have this rank."""
    return type(value) is int and 0 <= value <= RANK_MAX


def _typed(value: dict[str, object], key: str, kind: type[T]) -> T:
    found = value.get(key)
    if type(found) is not kind:
        raise ValueError(f"{key!r} of a queue's handle is a {type(found).__name__}, not a {kind.__name__}")
    return found


def _int(value: dict[str, object], key: str, least: int, most: int) -> int:
    found = _typed(value, key, int)
    if not least <= found <= most:
        raise ValueError(f"{key!r} of a queue's handle is {found}, not within [{least}, {most}]")
    return found


def _ranks(values: list[object]) -> tuple[int, ...]:
    ranks = tuple(rank for rank in values if is_rank(rank))
    if len(set(ranks)) != len(values) or len(values) > READERS_MAX:
        raise ValueError("'local_ranks' of a queue's handle are not distinct ranks")
    return ranks
