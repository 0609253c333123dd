"""`python -m torchft_like.chaos`: the command of torchft_like/testing/chaos under its short name."""

import sys

from torchft_like.testing.chaos.cli import main

if __name__ == "__main__":
    sys.exit(main())
