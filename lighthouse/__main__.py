"""Entry point of `python -m lighthouse`."""

import sys

from lighthouse.cli import main

sys.exit(main())
