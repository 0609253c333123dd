"""The names under which torchft's scripts choose a group for Intel GPUs: there is none yet."""

from __future__ import annotations

from torchft_like.errors import NotSupportedError
from torchft_like.process_group.baby.group import ProcessGroupBaby
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup

_ANSWER = "torchft_like has no process group over XCCL yet; ProcessGroupGloo moves CPU tensors"


class ProcessGroupXCCL(ReconfigurableProcessGroup):
    """A placeholder: a script may import the name and choose another group.

    Raises:
        NotSupportedError: always.
    """

    def __init__(self, *_args: object, **_options: object) -> None:
        raise NotSupportedError(_ANSWER)


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """A placeholder, as `ProcessGroupXCCL` is.

    Raises:
        NotSupportedError: always.
    """

    def __init__(self, *_args: object, **_options: object) -> None:
        raise NotSupportedError(_ANSWER)
