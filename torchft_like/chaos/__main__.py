"""`python -m torchft_like.chaos`."""

import sys

from torchft_like.chaos.cli import main

if __name__ == "__main__":
    sys.exit(main())
