"""What an import brings along."""

import subprocess
import sys

import torchft_like


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in torchft_like.__all__ if getattr(torchft_like, name, None) is None] == []


def test_the_alias_is_the_wrapper_not_torchs_optimizer() -> None:
    assert torchft_like.Optimizer is torchft_like.OptimizerWrapper


def test_process_groups_load_no_grpc() -> None:
    program = "import sys, torchft_like.process_group; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(torchft_like, "Nothing")
