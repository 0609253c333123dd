"""One writer, many readers: messages through shared memory, and through a socket to other machines.

docs/message-queue.md says how it works and what it survives. Nothing here knows process groups.
"""

from torchft_like.message_queue.queue import MessageQueue

__all__ = ["MessageQueue"]
