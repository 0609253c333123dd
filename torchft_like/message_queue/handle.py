"""The handle of a queue, with which a reader joins it: plain data, for any channel that the processes have.

A process that has the handle can read the queue: it holds the secrets that the writer asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torchft_like.message_queue.ring import SLOT_BYTES_MIN, Geometry

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
        """Return the handle from which `to_plain` made the value."""
        if not isinstance(value, dict) or value.get("version") != VERSION:
            raise ValueError(
                f"this is no handle of a message queue, or one of another version, but a "
                f"{type(value).__name__}: pass what the writer's export_handle() returns"
            )
        name, token, slots, slot_bytes, local_ranks, n_remote = (
            _field(value, key, kind, most) for key, kind, most in _FIELDS
        )
        if slots < 1 or slot_bytes < SLOT_BYTES_MIN:
            raise ValueError(f"a queue's handle has {slots} slots of {slot_bytes} bytes")
        remote = None
        if value.get("address") is not None:
            remote = RemoteHandle(_field(value, "address", str), _field(value, "server_key", bytes))
        if not all(map(is_rank, local_ranks)) or len({*local_ranks}) < len(local_ranks):
            raise ValueError("'local_ranks' of a queue's handle are not distinct ranks")
        return cls(name, token, Geometry(slots, slot_bytes), tuple(local_ranks), n_remote, remote)


# The fields of a handle, their types, and the largest number, or the greatest length of a list.
_FIELDS: tuple[tuple[str, type, int | None], ...] = (
    ("name", str, None),
    ("token", bytes, None),
    ("slots", int, SLOTS_MAX),
    ("slot_bytes", int, SLOT_BYTES_MAX),
    ("local_ranks", list, READERS_MAX),
    ("n_remote", int, READERS_MAX),
)


def is_rank(value: object) -> TypeGuard[int]:
    """Return whether a reader can have this rank."""
    return type(value) is int and 0 <= value <= RANK_MAX


def _field(value: dict[str, Any], key: str, kind: type, most: int | None = None) -> Any:
    found = value.get(key)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{key!r} of a queue's handle is a {type(found).__name__}, not a {kind.__name__}")
    number: Any = len(found) if isinstance(found, list) else found
    if most is not None and not 0 <= number <= most:
        raise ValueError(f"{key!r} of a queue's handle is {number}, not within [0, {most}]")
    return found
