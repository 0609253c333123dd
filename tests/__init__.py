"""All tests; what their forks have loaded."""

from torchft_like.testing import forks

forks.preload(
    *(f"tests.integration.{job}" for job in ("worker", "torch_job", "elastic_job", "restart_job")),
    "tests.conformance.member",
)
