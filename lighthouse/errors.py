"""The errors of the coordination layer.

Every message names the culprit and says what to do about it; the CLI prints it as its one line.
"""

from __future__ import annotations


class CoordinationError(Exception):
    """Base of every error that the lighthouse and its clients raise on purpose."""


class AddressError(CoordinationError, ValueError):
    """An address cannot be read as host:port."""


class ConfigError(CoordinationError, ValueError):
    """A setting is out of range or not of its type."""


class BindError(CoordinationError, OSError):
    """A server cannot listen where it was told to."""


class ForkError(CoordinationError, RuntimeError):
    """A forked process would use gRPC, which its parent has used: the call would wait forever."""
