"""Replicas that ought to hold the same state and do not: how they are found."""

from torchft_like.divergence.state_fingerprint import OnDivergence, StateFingerprint

__all__ = ["OnDivergence", "StateFingerprint"]
