"""Classes whose methods, and functions that, `torch.compile` does not look into.

While compiled code runs, Dynamo traces every function in Python that is called from what it could not
compile. torch's own groups and works are C++, so it finds none there. In a group of ours it would fail: a
group is an opaque object to Dynamo, and the caller gets an error where a method reads an attribute of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

ClassT = TypeVar("ClassT", bound=type)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_UNTRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the function, and all that it calls


def uncompiled(cls: ClassT) -> ClassT:
    """Have the interpreter run the methods and properties of a class, those of its bases included."""
    for base in cls.__mro__:
        for value in vars(base).values():
            for function in _functions_of(value):
                set_code_exec_strategy(function.__code__, _UNTRACED)
                if function is value:
                    # torch 2.11, to which a group is an object like others, reads its name in traced code: a
                    # property.
                    uncompiled_function(function)
    return cls


def uncompiled_function(function: FunctionT) -> FunctionT:
    """Have the interpreter run a function, and all that it calls; in traced code it ends the graph."""
    set_code_exec_strategy(function.__code__, _UNTRACED)
    function.__dict__["_torchdynamo_disable"] = True
    return function


def _functions_of(value: object) -> Iterable[FunctionType]:
    accessors = (value.fget, value.fset) if isinstance(value, property) else (value,)
    return (each for each in accessors if isinstance(each, FunctionType))
