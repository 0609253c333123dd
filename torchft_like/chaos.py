"""`python -m torchft_like.chaos`: the command `torchft-like` where the package is not installed."""

import sys

from torchft_like.cli import main

if __name__ == "__main__":
    sys.exit(main())
