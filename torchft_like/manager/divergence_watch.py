"""One rank's part in the watch for divergence: it sends fingerprints of its state, and learns which replicas
differ.

All members decide alike, from the quorum, which replicas differ and which heal (`assignment`). This module
reports that, and decides whether this replica can go on. It knows neither threads nor the wire.

In a quorum that stands no fingerprint goes to the lighthouse. Each rank compares its own with those of the
same rank of the other members in an allreduce of two numbers, beside the gradients. It tells only whether
they differ, all members alike: the step is then lost, as after any error, and in the next attempt at it all
ask, with the same fingerprints.
"""

from __future__ import annotations

from torchft_like.core.assignment import QuorumResult
from torchft_like.core.state_comparison import UNKNOWN_RANK, Divergence
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import DivergenceError
from torchft_like.manager.managed_group import Emit

HEALS_IN_VAIN_MAX = 3


class DivergenceWatch:
    """The training thread calls `take`, the coordination loop `quorum`; they share `fingerprint`.

    Attributes:
        fingerprint: the fingerprint of the state; None while nothing is watched, and then nothing is
          computed.
    """

    def __init__(self, emit: Emit) -> None:
        self.fingerprint: StateFingerprint | None = None
        self._has_described = False  # the state, when this rank asked for the last quorum
        self._is_left = False  # a divergence was found, about which nothing is done
        self._emit = emit
        self._last: Divergence | None = None
        self._heals = 0
        self._healed_at = -1

    @property
    def may_go_on(self) -> bool:
        """Whether the next step may be made in a quorum that stands.

        Members that do not watch have told so with their join. Replicas that are left to differ would lose
        every step in which that is found: they ask instead.
        """
        return self.may_stand and self._has_described == (self.fingerprint is not None)

    @property
    def may_stand(self) -> bool:
        """Whether a quorum of this rank may stand."""
        return not self._is_left

    def take(self, step: int) -> PendingFingerprint | None:
        """Begin to compute the fingerprint of the state with which this step begins."""
        return None if self.fingerprint is None else self.fingerprint.take(step)

    def described(self, fingerprint: bytes) -> None:
        """Record what this rank's join says of its state."""
        self._has_described = bool(fingerprint)

    def quorum(self, result: QuorumResult, allow_heal: bool) -> DivergenceError | None:
        """Report the replicas that differ in a new quorum; return the error if this replica cannot go on."""
        self._tell(result.divergence)
        if self.fingerprint is None:
            return None
        if (error := self._undecidable(result, self.fingerprint)) is not None:
            return error
        return self._incurable(result, self.fingerprint) if allow_heal else None

    def _tell(self, divergence: Divergence | None) -> None:
        """Report a divergence; one that nothing is done about is not repeated in every step."""
        last, self._last = self._last, divergence
        if divergence is None or (divergence == last and not divergence.heals):
            return
        self._is_left = not divergence.heals
        self._emit(
            "divergence",
            members=list(divergence.replica_ids),
            ranks=["several" if rank == UNKNOWN_RANK else str(rank) for rank in divergence.group_ranks],
            kept=list(divergence.kept),
            tied=divergence.tied,
            comparable=divergence.comparable,
            heals=divergence.heals,
        )

    def _undecidable(self, result: QuorumResult, fingerprint: StateFingerprint) -> DivergenceError | None:
        divergence = result.divergence
        if divergence is None or not divergence.tied or not divergence.heals:
            return None
        if fingerprint.on_divergence is not OnDivergence.HEAL_UNLESS_TIED:
            return None
        return DivergenceError(
            f"after step {result.max_step} {', '.join(divergence.replica_ids)} and "
            f"{', '.join(divergence.kept)} hold different states, and nobody can know who is right; go back "
            "to a checkpoint, or let OnDivergence.HEAL go on with the state of the latter"
        )

    def _incurable(self, result: QuorumResult, fingerprint: StateFingerprint) -> DivergenceError | None:
        """Return an error for a replica that heals again and again, which costs its peers too much."""
        divergence, own_id = result.divergence, result.replica_ids[result.replica_rank]
        if divergence is None or not divergence.heals or own_id not in divergence.replica_ids:
            return None
        last, self._healed_at = self._healed_at, result.max_step
        if result.max_step == last:  # the step was not committed, and is tried again
            return None
        is_relapse = self._heals > 0 and result.max_step - last <= fingerprint.slices
        self._heals = self._heals + 1 if is_relapse else 1
        if self._heals <= HEALS_IN_VAIN_MAX:
            return None
        return DivergenceError(
            f"{own_id} has taken over its peers' state {HEALS_IN_VAIN_MAX} times, and each time it differed "
            f"again within a round of {fingerprint.slices} steps: either its memory or its device is broken, "
            "or its StateFingerprint watches tensors that the Manager's state dict does not hold"
        )
