"""The fingerprint of a rank's state, by which replicas that no longer hold the same state are found.

`core.state_comparison` compares fingerprints; this folder computes them, on the device. It must not know
the Manager or the wire.
"""

from torchft_like.divergence.state_fingerprint import OnDivergence, StateFingerprint

__all__ = ["OnDivergence", "StateFingerprint"]
