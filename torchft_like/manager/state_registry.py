"""The state of the training script: how to read it for a peer, how to load a peer's.

All of it happens on the training thread; other threads may only say whether it may be read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchft_like.checkpointing.shards import place, shards_in
from torchft_like.errors import CheckpointError, ConfigError

LoadFunction = Callable[[Any], None]
SaveFunction = Callable[[], Any]


class StateRegistry:
    """Pairs of load and save functions by key, and the right to read what they save."""

    def __init__(self) -> None:
        self._functions: dict[str, tuple[LoadFunction, SaveFunction]] = {}
        self._is_looked_at = False
        self._reading = threading.Lock()
        self._is_read_allowed = True

    def register(self, key: str, load: LoadFunction, save: SaveFunction) -> None:
        """Add one part of the state.

        Raises:
            ConfigError: the key is taken.
        """
        if key in self._functions:
            raise ConfigError(f"a state dict is already registered under the key {key!r}; choose another key")
        self._functions[key] = load, save
        self._is_looked_at = False

    def look(self, check: Callable[[Any], object]) -> None:
        """Before the first step: call the functions and look at what they return.

        A state that cannot be read, or can never travel, is thus found on the replica whose state it is and
        while nobody needs it. What the functions raise goes to the caller.

        Args:
            check: raises CheckpointFormatError for a state that the transport cannot carry.
        """
        if not self._is_looked_at and self._is_read_allowed:
            check(self._save())
            self._is_looked_at = True

    def check_registered(self) -> None:
        """Is there anything to save and to load?

        Raises:
            ConfigError: nothing was registered, so that healing would leave a replica with its old state.
        """
        if not self._functions:
            raise ConfigError(
                "a replica has to heal and there is no state to heal with: give the Manager load_state_dict "
                "and state_dict, or call register_state_dict_fn before the first step"
            )

    def allow_read(self) -> None:
        """Peers may be served again."""
        if not self._is_read_allowed:
            self._is_read_allowed = True
            self._reading.release()

    def disallow_read(self) -> None:
        """Wait until nobody reads the state, and keep others from it until `allow_read`."""
        if self._is_read_allowed:
            self._reading.acquire()
            self._is_read_allowed = False

    @contextmanager
    def reading(self) -> Iterator[dict[str, object]]:
        """The user's whole state, which stays as it is inside the block.

        Raises:
            CheckpointError: reading is not allowed; waiting could be for what the caller itself has to do.
        """
        if not self._reading.acquire(blocking=False):
            raise CheckpointError(
                "the state cannot be read for a peer at the end of this step: disallow_state_dict_read was "
                "called, and allow_state_dict_read was not"
            )
        try:
            yield self._save()
        finally:
            self._reading.release()

    def load(self, state: Mapping[str, object]) -> None:
        """Hand every part to its load function.

        Raises:
            CheckpointError: the peer registered other keys; the replicas do not run the same script.
        """
        if set(state) != set(self._functions):
            raise CheckpointError(
                f"a peer sent the state dicts {sorted(state)}, this replica has {sorted(self._functions)}: "
                "every replica must register the same keys"
            )
        if next(shards_in(dict(state)), None) is not None:
            state = place(dict(state), self._save())
        for key, (load, _) in self._functions.items():
            load(state[key])

    def _save(self) -> dict[str, object]:
        return {key: save() for key, (_, save) in self._functions.items()}
