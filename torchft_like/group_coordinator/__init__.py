"""One object for all that a group of processes says to each other: tensors, objects, dicts of both."""

from torchft_like.group_coordinator.coordinator import GroupCoordinator
from torchft_like.group_coordinator.graph import GraphCaptureContext
from torchft_like.group_coordinator.handle import Handle
from torchft_like.group_coordinator.options import CoordinatorOptions

__all__ = ["CoordinatorOptions", "GraphCaptureContext", "GroupCoordinator", "Handle"]
