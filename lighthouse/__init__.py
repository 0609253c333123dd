"""The lighthouse decides which replicas are in the quorum, and tells the replicas over gRPC."""

import os
from pathlib import Path

from lighthouse.grpc_forks import turn_off_handlers_of_forks

__version__ = "0.1.0"
DISTRIBUTION = "torchft-like"  # torchft_like recognizes its own lighthouse by this name


def _refuse_a_mixture() -> None:
    """Refuse to be imported beside another project called lighthouse, which installs into this very folder.

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
# Else any client that reaches a port could fill a log: gRPC writes a line for each connection that is no TLS.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
turn_off_handlers_of_forks()
