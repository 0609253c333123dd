"""The form of a replica's state: which tensors it has, of which shapes and dtypes, and no values.

Two states that one job trains have the same form. They need not be equal: an optimizer makes its state in
its first step, so a replica that is about to heal lacks what the others have, and what is not there cannot
differ. So a form is a list of *rows*, each the path of a tensor and its description, and two forms are
compared row by row (`first_difference`):

* A tensor that both have is described alike.
* A tensor that one of them lacks is a difference if its path has names only, as that of a parameter has:
  `model.layer2.weight`. It is none if the path has a number, as in `optim.state[0].exp_avg`, since the
  entries of lists, and of optimizers, come and go; nor if the other one has, there or at a beginning of the
  path, what is yet to become a tensor (None, an empty dict): such a row has no description.

A form is bounded (`bounded`), so that it can be sent with a message: the rows with names come first, and a
hash of all of them stays when rows are left out. It is pure, and knows neither torch nor what the paths mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

# The rows of all ranks of a replica group together, when they are sent.
CHARACTERS_MAX = 32 * 1024

_NUMBERED = "["  # begins a part of a path that is no name


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of one rank's state.

    Attributes:
        rows: the description of each tensor by its path, "" for what is no tensor yet.
        digest: a hash of all tensors whose path has names only.
        left_out: how many rows are missing here, for the sake of size.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    digest: bytes = b""
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two forms; a description is "missing" where there is no such tensor."""

    path: str
    own: str
    other: str

    def sentence(self, own: str, other: str) -> str:
        """Describe the difference, with names for the two states, and its cure."""
        cure = "all replicas of a job train the same model"
        if "missing" in (self.own, self.other):
            cure += (
                ", and register their state functions before the first step; what a later step makes is None "
                "in the state, or in an empty dict, until then"
            )
        return f"{self.path or 'the state'} is {self.own} in {own} and {self.other} in {other}: {cure}"


def form_of_rows(rows: Iterable[tuple[str, str]]) -> StateForm:
    """Make a form of paths and descriptions."""
    ordered = sorted(rows, key=lambda row: _NUMBERED in row[0])  # stable: names first, otherwise as they come
    digest = hashlib.blake2b(digest_size=16)
    for path, description in ordered:
        if description and _NUMBERED not in path:
            digest.update(f"{path}\0{description}\0".encode(errors="replace"))
    return StateForm(dict(ordered), digest.digest())


def bounded(form: StateForm, characters: int) -> StateForm:
    """Return the form with as many of its rows as have that many characters together."""
    count = 0
    for path, description in form.rows.items():
        characters -= len(path) + len(description)
        if characters < 0:
            break
        count += 1
    left_out = form.left_out + len(form.rows) - count
    return StateForm(dict(islice(form.rows.items(), count)), form.digest, left_out) if left_out else form


def first_difference(own: StateForm, other: StateForm) -> Difference | None:
    """Return the first difference of two forms, None if one job can train both states.

    Where rows are left out, states with the same rows differ if their hashes do.
    """
    for path, description in own.rows.items():
        theirs = other.rows.get(path)
        if theirs is None and _is_missed(path, description, other):
            return Difference(path, description, "missing")
        if description and theirs and description != theirs:
            return Difference(path, description, theirs)
    for path, description in other.rows.items():
        if path not in own.rows and _is_missed(path, description, own):
            return Difference(path, "missing", description)
    if own.digest != other.digest and (own.left_out or other.left_out):
        count = min(len(own.rows), len(other.rows))
        return Difference("", f"of one form beyond its first {count} tensors", "of another one")
    return None


def _is_missed(path: str, description: str, other: StateForm) -> bool:
    """Return whether a state that lacks this tensor is of another form."""
    if not description or _NUMBERED in path or other.left_out:
        return False
    return not any(other.rows.get(beginning) == "" for beginning in _beginnings(path))


def _beginnings(path: str) -> Iterator[str]:
    yield ""
    end = path.find(".")
    while end >= 0:
        yield path[:end]
        end = path.find(".", end + 1)
