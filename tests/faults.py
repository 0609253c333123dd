"""What a test puts in the place of a function that is to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises this error, whatever it is given."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail
