"""The value of `Manager.errored`: the error that spoilt a step, in the form that scripts of torchft read."""

from __future__ import annotations

import traceback


class ExceptionWithTraceback(Exception):  # noqa: N818 - torchft's name
    """An error and where it was raised. If it is raised itself, it shows the error as its cause.

    Two instances with the same error are equal, because `errored` makes one at every call.

    Attributes:
        original_exception: the error.
        stack_trace: its traceback as text.
    """

    def __init__(self, e: Exception) -> None:
        super().__init__(e)
        self.original_exception: Exception = e
        self.stack_trace: str = "".join(traceback.format_exception(e))
        self.__cause__ = e

    def __str__(self) -> str:
        return f"{type(self.original_exception).__name__}: {self.original_exception}"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExceptionWithTraceback) and other.original_exception is self.original_exception
        )

    def __hash__(self) -> int:
        return hash(self.original_exception)
