"""Coordinators, with vLLM's names: all communication of a group of processes as one object.

They are a face of `communicator`, which moves the data, and of message queues. Only `elastic` knows that
members can change, and asks a quorum for them.
"""

from torchft_like.communicator.communicator import CoordinatorOptions as CoordinatorOptions
from torchft_like.communicator.handle import Handle as Handle
from torchft_like.group_coordinator.coordinator import GraphCaptureContext as GraphCaptureContext
from torchft_like.group_coordinator.coordinator import GroupCoordinator as GroupCoordinator
from torchft_like.group_coordinator.elastic import Change as Change
from torchft_like.group_coordinator.elastic import ElasticCoordinator as ElasticCoordinator
from torchft_like.group_coordinator.elastic import ManagedCoordinator as ManagedCoordinator
from torchft_like.group_coordinator.elastic import Membership as Membership
from torchft_like.message_queue import MessageQueue as MessageQueue
