"""Translation of a subprocess's errors to plain data, and back."""

from __future__ import annotations

import builtins
from typing import Any

from torch import distributed as dist

from torchft_like import errors

_OF_TORCH = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError")
_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(getattr(dist, name) for name in _OF_TORCH),
        *(
            kind
            for module in (errors, builtins)
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        ),
    )
}


def answer_for(error: BaseException) -> tuple[Any, ...]:
    """Encode the error: its type, or the nearest base that both sides know, and its text."""
    known = next(kind for kind in type(error).__mro__ if kind.__name__ in _KNOWN or kind is BaseException)
    return known.__name__, str(error)


def error_from(answer: tuple[Any, ...]) -> Exception:
    """Decode an error that `answer_for` has encoded."""
    name, text = answer
    try:
        return _KNOWN.get(name, RuntimeError)(text)
    except TypeError:  # this type is not made of a single text
        return RuntimeError(f"{name}: {text}")
