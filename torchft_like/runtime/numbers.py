"""Whole numbers, as callers give them."""

from __future__ import annotations

import math
import operator

from torchft_like.errors import ConfigError


def whole_number(value: int, name: str, least: int = 0, most: float = math.inf) -> int:
    """Return a number that an argument gives.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigError: it is no whole number, or not from `least` to `most`.
    """
    number = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if number is None or not least <= number <= most:
        limits = f"{least} or more" if most == math.inf else f"in [{least}, {most}]"
        raise ConfigError(f"{name} is {value!r:.100}: it must be a whole number, {limits}")
    return number
