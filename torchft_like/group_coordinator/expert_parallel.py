"""Tokens to the experts and back: an all-gather there, a reduce-scatter home.

Each rank has some tokens and some of the experts. `dispatch` brings all tokens to all ranks; each rank
then adds up what its own experts make of each token, zero where it has none to ask; `combine` adds the
ranks' results and gives every rank the rows of its own tokens. With experts that return their input,
each of the n ranks contributes x, so `combine(dispatch(x))` is n * x.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchft_like.group_coordinator.arguments import Terms
from torchft_like.group_coordinator.transport import Transport
from torchft_like.group_coordinator.variable import Sizes, all_gatherv, reduce_scatterv


@dataclass(frozen=True)
class Dispatched:
    """What `combine` must know of the dispatch before it.

    Attributes:
        sizes: the tokens of each rank.
        is_sequence_parallel: as it was passed.
        among: the ranks that have the tokens.
    """

    sizes: Sizes
    is_sequence_parallel: bool
    among: Transport


def dispatch(
    transport: Transport,
    hidden_states: Tensor,
    router_logits: Tensor,
    extra_tensors: Sequence[Tensor] | None,
    is_sequence_parallel: bool,
) -> tuple[list[Tensor], Dispatched]:
    """The rows of all ranks, in the order of ranks, of tensors that have a row for each token."""

    def tensors() -> Sequence[Tensor]:
        if not (extra_tensors is None or isinstance(extra_tensors, list | tuple)):
            raise TypeError(f"extra_tensors is a list of tensors, not a {type(extra_tensors).__name__}")
        return [hidden_states, router_logits, *(extra_tensors or ())]

    terms = functools.partial(_terms, is_sequence_parallel)
    gathered, sizes = all_gatherv(transport, tensors, 0, None, "dispatch", terms)
    return gathered, Dispatched(sizes, bool(is_sequence_parallel), transport)


def combine(
    transport: Transport, hidden_states: Tensor, dispatched: Dispatched | None, is_sequence_parallel: bool
) -> Tensor:
    """The caller's rows of the sum over all ranks."""

    def sizes() -> Sizes:
        if dispatched is None:
            raise ValueError("combine comes after dispatch: there was none")
        if dispatched.is_sequence_parallel != bool(is_sequence_parallel):
            raise ValueError(
                f"is_sequence_parallel is {is_sequence_parallel}: it was "
                f"{dispatched.is_sequence_parallel} in dispatch"
            )
        return dispatched.sizes

    terms = functools.partial(_terms, is_sequence_parallel)
    (combined,) = reduce_scatterv(transport, [hidden_states], 0, sizes, "combine", terms)
    return combined


def _terms(is_sequence_parallel: bool) -> Terms:
    return (("is_sequence_parallel", str(bool(is_sequence_parallel))),)
