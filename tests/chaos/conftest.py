"""A lighthouse on a host of its own, in the network that a test makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.managers import PATIENCE_MS
from torchft_like.testing.chaos.network import Network
from torchft_like.testing.cluster import LIGHTHOUSE, LighthouseProcess


@pytest.fixture
def lighthouse(network: Network) -> Iterator[str]:
    patience = "--min_replicas=1", f"--keepalive_timeout_ms={PATIENCE_MS}"
    bind, variables = f"{network.address(LIGHTHOUSE)}:29510", {"TORCHFT_INSECURE": "1"}
    namespace = network.namespace(LIGHTHOUSE)
    with LighthouseProcess(*patience, bind=bind, variables=variables, namespace=namespace) as process:
        yield process.url
