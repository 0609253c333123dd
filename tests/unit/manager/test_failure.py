"""What `Manager.errored` returns keeps the error, its traceback, and is an exception like any other."""

from __future__ import annotations

import copy
import traceback

import pytest

from torchft_like.manager import ExceptionWithTraceback


def an_error() -> ValueError:
    with pytest.raises(ValueError, match="no loss") as caught:
        raise ValueError("no loss")
    return caught.value


def test_it_has_torchfts_attributes() -> None:
    error = an_error()
    wrapped = ExceptionWithTraceback(error)
    assert wrapped.original_exception is error
    assert "in an_error" in wrapped.stack_trace
    assert str(wrapped) == "ValueError: no loss"


def test_raised_it_shows_where_the_error_came_from() -> None:
    with pytest.raises(ExceptionWithTraceback) as caught:
        raise ExceptionWithTraceback(an_error())
    assert "in an_error" in "".join(traceback.format_exception(caught.value))


def test_asking_twice_gives_equal_errors_and_another_error_differs() -> None:
    error = an_error()
    assert ExceptionWithTraceback(error) == ExceptionWithTraceback(error)
    assert len({ExceptionWithTraceback(error), ExceptionWithTraceback(error)}) == 1
    assert ExceptionWithTraceback(error) != ExceptionWithTraceback(an_error())


def test_it_travels_between_processes() -> None:
    copied = copy.copy(ExceptionWithTraceback(an_error()))  # by __reduce__, as between processes
    assert str(copied) == "ValueError: no loss"
