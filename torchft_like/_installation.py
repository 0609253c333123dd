"""The version that is installed, and whether the package `lighthouse` is the one that came with it.

Another project on the package index has that name, too. torchft_like imports this module before any other.
"""

from __future__ import annotations

import lighthouse

if getattr(lighthouse, "DISTRIBUTION", None) != "torchft-like":
    raise ImportError(
        f"{lighthouse.__file__} is of another project called lighthouse, not the one that torchft_like "
        "installs: pip uninstall lighthouse, then pip install --force-reinstall torchft-like"
    )
__version__ = lighthouse.__version__
