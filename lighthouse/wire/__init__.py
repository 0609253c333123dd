"""The wire contract as Python: messages generated from proto/torchft.proto, and the names of its services."""

from __future__ import annotations

from typing import Final

QUORUM: Final = "/torchft.LighthouseService/Quorum"
HEARTBEAT: Final = "/torchft.LighthouseService/Heartbeat"
SESSION: Final = "/torchft.LighthouseService/Session"
OFFER_SPARE: Final = "/torchft.LighthouseService/OfferSpare"
FILL_VACANCY: Final = "/torchft.LighthouseService/FillVacancy"

MANAGER_QUORUM: Final = "/torchft.ManagerService/Quorum"
CHECKPOINT_METADATA: Final = "/torchft.ManagerService/CheckpointMetadata"
SHOULD_COMMIT: Final = "/torchft.ManagerService/ShouldCommit"
KILL: Final = "/torchft.ManagerService/Kill"
RANK_SESSION: Final = "/torchft.ManagerService/Session"
