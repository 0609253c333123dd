"""The state of the training script: the functions that read it for a peer and load a peer's, and its form.

All of them run on the training thread; other threads may only allow and disallow reading.

The form is that of tensors that can be parameters: those of floating point and complex numbers that have
elements, a DTensor by its whole shape and its placement. Others do not count: a tensor of integers may be a
buffer of tokens, of another length in every step. Nothing here touches a value for it, so the cost is that of
a walk through the containers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lighthouse.core.state_form import CHARACTERS_MAX, StateForm, bounded, first_difference, form_of_rows
from torchft_like.checkpointing.shards import is_dtensor, layout_of, local_part, place, shards_in
from torchft_like.errors import CheckpointError, ConfigError, ForeignStateError
from torchft_like.instances import TensorInstance, name_of_class
from torchft_like.plain_data import DEPTH_MAX, Layout, Shard

LoadFunction = Callable[[Any], object]  # a module returns the keys that do not fit
SaveFunction = Callable[[], Any]


class StateRegistry:
    """Pairs of load and save functions by key, and the permission to read what they save.

    Args:
        load, save: the pair under the key "default", if both are given.

    Attributes:
        form: the form of this rank's state when it was last looked at; None before that.
    """

    def __init__(self, load: LoadFunction | None = None, save: SaveFunction | None = None) -> None:
        self._functions: dict[str, tuple[LoadFunction, SaveFunction]] = {}
        self.form: StateForm | None = None
        self._is_looked_at = self._is_complete = self._is_news = False
        self._reading = threading.Lock()
        self._is_read_allowed = True
        if load is not None and save is not None:
            self.register("default", load, save)

    def register(self, key: str, load: LoadFunction, save: SaveFunction) -> None:
        """Add one part of the state.

        Raises:
            ConfigError: the key is taken, or what is given is no function.
        """
        for name, function in (("load_state_dict", load), ("state_dict", save)):
            if not callable(function):
                what = f"{name} is of type {type(function).__name__}"
                raise ConfigError(f"{what}: pass a function, as model.{name}, without a call")
        if key in self._functions:
            raise ConfigError(f"a state dict is already registered under the key {key!r}; choose another key")
        self._functions[key] = load, save
        self._is_looked_at = self._is_complete = False

    def forget(self) -> None:
        """Keep no function any more, nor the tensors to which it refers; a load that has begun goes on."""
        self._functions = {}

    def look(self, check: Callable[[Any], object], *, has_stepped: bool = False) -> None:
        """Call the functions before the first step, and once after it, and check what they return.

        A state that cannot be read or sent is thus found on the replica that has it, before a peer needs it.
        An optimizer makes its state in its first step. Errors of the functions go to the caller.

        Args:
            check: a function that raises CheckpointFormatError for a state that the transport cannot carry.
            has_stepped: whether a step was committed.
        """
        if self._is_complete or not self._is_read_allowed or (self._is_looked_at and not has_stepped):
            return
        state = self._save()
        check(state)
        if not self._is_looked_at:
            self.form = form_of(state) if state else None
            self._is_looked_at = self._is_news = True
        self._is_complete = has_stepped

    def take_news(self) -> StateForm | None:
        """Return the form of the state once after each look at it, to be told to the others."""
        is_news, self._is_news = self._is_news, False
        return bounded(self.form, CHARACTERS_MAX) if is_news and self.form is not None else None

    def check_form(self, state: Mapping[str, object], source: str) -> None:
        """Check that a state that a peer sent can be loaded here, before any part of it is.

        Raises:
            ForeignStateError: it is of another form than this rank's own state was when that was looked at.
        """
        difference = None if self.form is None else first_difference(self.form, form_of(state))
        if difference is not None:
            raise ForeignStateError(difference.sentence("this replica", f"the state of {source}"))

    def check_registered(self) -> None:
        """Check that there are functions to save and to load a state.

        Raises:
            ConfigError: no function was registered, so that healing would leave a replica with its old state.
        """
        if not self._functions:
            raise ConfigError(
                "a replica has to heal and there is no state to heal with: give the Manager load_state_dict "
                "and state_dict, or call register_state_dict_fn before the first step"
            )

    def allow_read(self) -> None:
        """Let peers be served again."""
        if not self._is_read_allowed:
            self._is_read_allowed = True
            self._reading.release()

    def disallow_read(self) -> None:
        """Wait until no thread reads the state, and keep it from being read until `allow_read`."""
        if self._is_read_allowed:
            self._reading.acquire()
            self._is_read_allowed = False

    @contextmanager
    def reading(self) -> Iterator[dict[str, object]]:
        """Yield the user's whole state, which does not change inside the block.

        Raises:
            CheckpointError: reading is not allowed; this does not wait, because the caller itself may have to
              allow it.
        """
        with self.held() as is_read_allowed:
            if not is_read_allowed:
                raise CheckpointError(
                    "the state cannot be read for a peer at the end of this step: disallow_state_dict_read "
                    "was called, and allow_state_dict_read was not"
                )
            yield self._save()

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Yield whether reading is allowed; `disallow_read` waits for the end of the block."""
        is_read_allowed = self._reading.acquire(blocking=False)
        try:
            yield is_read_allowed
        finally:
            if is_read_allowed:
                self._reading.release()

    def own(self) -> dict[str, object] | None:
        """Return the user's whole state, in which a peer's may arrive; None if it may not be read."""
        return self._save() if self._is_read_allowed else None

    def load(self, state: Mapping[str, object], own: dict[str, object] | None = None) -> None:
        """Pass every part to its load function.

        Args:
            own: what `own` returned, if the state has arrived in it. It is not asked for again: a function
              that keeps tensors to return may write the old values into them.

        Raises:
            CheckpointError: the peer registered other keys, because the replicas do not run the same script.
        """
        if set(state) != set(self._functions):
            raise CheckpointError(
                f"a peer sent the state dicts {sorted(state)}, this replica has {sorted(self._functions)}: "
                "every replica must register the same keys, before its first step"
            )
        if shards_in(dict(state)):
            state = place(dict(state), self._save() if own is None else own)
        for key, (load, _) in self._functions.items():
            load(state[key])

    def _save(self) -> dict[str, object]:
        return {key: save() for key, (_, save) in self._functions.items()}


_DEFAULT_KEY = "default"  # of the functions that the Manager was made with; it would only lengthen the paths


def form_of(state: Mapping[str, object]) -> StateForm:
    """Return the form of a whole state: by key what a registered function returned, or what a peer sent."""
    return form_of_rows(
        row for key, part in state.items() for row in _rows("" if key == _DEFAULT_KEY else key, part)
    )


def _rows(path: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor | TensorInstance | Shard):
        yield path, _description(value)
    elif isinstance(value, dict) and value and depth < DEPTH_MAX:
        for key, item in value.items():
            name = f".{key}" if isinstance(key, str) else f"[{key!r:.100}]"
            yield from _rows(path + name if path else name.removeprefix("."), item, depth + 1)
    elif isinstance(value, list | tuple) and depth < DEPTH_MAX:
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor | TensorInstance | Shard | dict | list | tuple):
                yield from _rows(f"{path}[{index}]", item, depth + 1)
    else:
        yield path, ""


def _description(value: torch.Tensor | TensorInstance | Shard) -> str:
    if isinstance(value, Shard):
        return f"{_kind(value.local)} {_cut(value.layout)}"
    if is_dtensor(value):
        return f"{_kind(local_part(value))} {_cut(layout_of(value))}"
    if not value.shape.numel():
        return ""
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return ""
    return f"{_kind(value)} {list(value.shape)}"


def _kind(value: torch.Tensor | TensorInstance) -> str:
    """Return the dtype of a tensor, or the name of its class if that is a library's own."""
    if isinstance(value, TensorInstance):
        return value.class_name
    if hasattr(value, "__tensor_flatten__"):
        return name_of_class(type(value))
    return str(value.dtype).removeprefix("torch.")


def _cut(layout: Layout) -> str:
    """Describe how a DTensor is cut; the dimensions of its mesh that hold copies may be elastic."""
    cuts = [
        f"{placement} of {size}"
        for placement, size in zip(layout.placements, layout.mesh_shape, strict=True)
        if placement != "R"
    ]
    return f"{list(layout.shape)} placed {', '.join(cuts) or 'whole'}"
