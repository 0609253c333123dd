"""Live transfer of training state between peers.

`transport` is the interface; `http_transport`, whose two ends are `http_server` and `http_fetch`, and
`pg_transport` implement it, over `state_stream`. Nothing here knows the Manager, or when a rank heals.
"""

from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.pg_transport import PGTransport
from torchft_like.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]
