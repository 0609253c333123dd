"""The Manager and what it is made of.

`step`, `group` and `assignment` decide and are pure; `manager`, `server` and the links act.
"""

from torchft_like.manager.manager import Manager
from torchft_like.manager.step import WorldSizeMode

__all__ = ["Manager", "WorldSizeMode"]
