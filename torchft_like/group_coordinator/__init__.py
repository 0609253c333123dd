"""Coordinators, with vLLM's names: all communication of a group of processes as one object.

They are a face of `communicator`, which moves the data, and of message queues. Only `elastic` knows that
members can change, and asks a quorum for them.
"""

from torchft_like.communicator.communicator import CoordinatorOptions
from torchft_like.communicator.handle import Handle
from torchft_like.group_coordinator.coordinator import GraphCaptureContext, GroupCoordinator
from torchft_like.group_coordinator.elastic import Change, ElasticCoordinator, ManagedCoordinator, Membership
from torchft_like.message_queue import MessageQueue

__all__ = [
    "Change",
    "CoordinatorOptions",
    "ElasticCoordinator",
    "GraphCaptureContext",
    "GroupCoordinator",
    "Handle",
    "ManagedCoordinator",
    "Membership",
    "MessageQueue",
]
