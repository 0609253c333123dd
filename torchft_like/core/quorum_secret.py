"""The secret of a quorum, which its members alone know. Pure: a secret in, keys out.

What is shown to others, or is the name of something that others may list, is a key that was derived from the
secret for one purpose: it gives away neither the secret nor any other key.
"""

from __future__ import annotations

import hmac

KEY_CHARACTERS = 32  # 128 bits


class QuorumSecret(bytes):
    """The secret of a quorum, empty where it has none. No text that is made of it holds it."""

    def __repr__(self) -> str:
        return "QuorumSecret(...)" if self else "QuorumSecret()"

    __str__ = __repr__

    def key(self, purpose: str) -> str:
        """Return the key for one purpose in hexadecimal digits; "" where the quorum has no secret."""
        return hmac.digest(self, purpose.encode(), "sha256").hex()[:KEY_CHARACTERS] if self else ""

    @property
    def meeting_key(self) -> str:
        """The key that is in the prefix under which the members meet."""
        return self.key("meeting")


def shared_key(meeting_key: str) -> str:
    """Return the key of the part of the store that users share, whose prefix torch's errors show."""
    return QuorumSecret(meeting_key.encode()).key("shared")


def meeting_keys(secret: QuorumSecret) -> tuple[str, ...]:
    """Return the keys of which one is in each key of a quorum in its store; none where it has no secret."""
    return (secret.meeting_key, shared_key(secret.meeting_key)) if secret else ()
