"""The lighthouse: who is in the quorum, over gRPC."""

from pathlib import Path

from lighthouse.grpc_forks import turn_off_handlers_of_forks

__version__ = "0.1.0"
DISTRIBUTION = "torchft-like"  # by which torchft_like knows that this lighthouse is its own


def _refuse_a_mixture() -> None:
    """Another project on the package index is called lighthouse, and installs into this very folder.

    Raises:
        ImportError: both are installed here, so that neither is whole.
    """
    here = Path(__file__).parent
    if others := [found.name for found in here.parent.glob("lighthouse-*.dist-info")]:
        raise ImportError(
            f"{here} holds files of two projects, of {DISTRIBUTION} and of the load balancer 'lighthouse' "
            f"({others[0]}): pip uninstall lighthouse, then pip install --force-reinstall {DISTRIBUTION}"
        )


_refuse_a_mixture()
turn_off_handlers_of_forks()
