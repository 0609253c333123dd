"""Durations, as callers give them."""

from __future__ import annotations

from datetime import timedelta

from torchft_like.errors import ConfigError

SECONDS_MAX = 10 * 365 * 24 * 3600.0  # the system's clocks and timers take no more


def seconds_of(value: timedelta | float, name: str) -> float:
    """Convert a duration to seconds.

    Raises:
        ConfigError: the duration is not a positive number, or more than ten years.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(
            f"{name} is {value!r:.100}: it must be a positive number of seconds or a timedelta, "
            "and not more than ten years"
        )
    return float(seconds)
