"""Durations, as callers give them."""

from __future__ import annotations

from datetime import timedelta

from torchft_like.errors import ConfigError

SECONDS_MAX = 10 * 365 * 24 * 3600.0  # the system's clocks and timers take no more


def seconds_of(value: timedelta | float, name: str = "timeout", *, may_be_0: bool = False) -> float:
    """Convert a duration to seconds.

    Args:
        name: of the argument, for the error.
        may_be_0: whether 0 is one, too, as for a wait that may end at once.

    Raises:
        ConfigError: the duration is not a positive number, or more than ten years.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= SECONDS_MAX or not (seconds or may_be_0):
        raise ConfigError(
            f"{name} is {value!r:.100}: it must be a {'' if may_be_0 else 'positive '}number of seconds or a "
            f"timedelta, {'not negative ' if may_be_0 else ''}and not more than ten years"
        )
    return float(seconds)


def as_timedelta(value: timedelta | float, name: str = "timeout") -> timedelta:
    """Convert a limit to a timedelta of a millisecond at the least, as backends take 0 of them for no limit.

    Raises:
        ConfigError: as from `seconds_of`.
    """
    return timedelta(seconds=max(seconds_of(value, name), 0.001))
