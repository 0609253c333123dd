"""All tests; what their forks have loaded."""

from torchft_like.testing import forks

forks.preload("tests.integration.worker", "tests.integration.torch_job", "tests.conformance.member")
