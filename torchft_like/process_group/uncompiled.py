"""Classes whose methods `torch.compile` does not look into.

While compiled code runs, Dynamo traces every function in Python that is called from what it could not
compile. torch's own groups and works are C++, so it finds none there. In a group of ours it would fail: a
group is an opaque object to Dynamo, and the caller gets an error where a method reads an attribute of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

ClassT = TypeVar("ClassT", bound=type)
_UNTRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the function, and all that it calls


def uncompiled(cls: ClassT) -> ClassT:
    """Have the interpreter run the methods and properties of a class, those of its bases included."""
    for base in cls.__mro__:
        for value in vars(base).values():
            for function in _functions_of(value):
                set_code_exec_strategy(function.__code__, _UNTRACED)
                if function is value:
                    # In code that is traced a call of it ends the graph. torch 2.11, to which a group is
                    # an object like others, reads its name there: a property.
                    function.__dict__["_torchdynamo_disable"] = True
    return cls


def _functions_of(value: object) -> Iterable[FunctionType]:
    accessors = (value.fget, value.fset) if isinstance(value, property) else (value,)
    return (each for each in accessors if isinstance(each, FunctionType))
