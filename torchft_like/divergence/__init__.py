"""How replicas that ought to hold the same state, and do not, are found."""

from torchft_like.divergence.state_fingerprint import OnDivergence, StateFingerprint

__all__ = ["OnDivergence", "StateFingerprint"]
