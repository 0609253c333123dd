"""Live transfer of training state between peers."""

from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.pg_transport import PGTransport
from torchft_like.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]
