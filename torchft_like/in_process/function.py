"""`restartable`: a training function that is run again in the same process after an error, and the end of
each of its tries.

A step that fails is tried again by the Manager. This is for what no step survives: a rank of the replica
group is gone, too many steps in a row have failed, a device has. A new process would take seconds to import
torch, make a CUDA context and compile what this one has. What cannot be mended here, such as a broken context
or a process that was killed, ends as it does without: with the error, for the launcher.

At the end of a try what it has made is ended, and what its function held is freed. A traceback refers to the
frames of all functions that the error has passed, and these to their variables: the model, its gradients, the
process groups. So the frames are cleared, and what refers to itself is collected, before anybody counts on a
port or on memory. What was there before the second try is frozen (`gc.freeze`): it is not looked through, and
not collected. With torch that is 300,000 objects, and was most of the time between two tries. What later ones
leave outside of the function is looked through: the next may put something else in its place.

Python cannot end a thread. A try ends as a process does: it waits for its threads that are not daemons, and
leaves the daemons alone. The workers of an executor are Python's, which waits for their work, not for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import thread as executors
from datetime import timedelta
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchft_like.core.restarts import (
    OF_THE_RUN,
    RETURNED,
    SPARE_ENV,
    Ending,
    Restart,
    RestartBudget,
    Told,
    all_start_again,
    ending_of,
    why_not,
)
from torchft_like.errors import ConfigError, HealthCheckError
from torchft_like.in_process.health import HealthCheck, device, wait_until_healthy
from torchft_like.in_process.meeting import RestartGroup
from torchft_like.in_process.spare import Place, SpareDesk, is_spare, lighthouse_of, take_place, warm_up
from torchft_like.manager import kept_state
from torchft_like.manager.config import OF_TORCHRUN, place_in_group
from torchft_like.runtime import resources
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.numbers import whole_number

P = ParamSpec("P")
T = TypeVar("T")

OF_DEVICES = (torch.AcceleratorError, torch.OutOfMemoryError, dist.DistBackendError)
CONNECT_S = 60.0  # for which a spare looks for its lighthouse, once
NOTICE_S = 600.0  # far above the time in which a rank notices that another one has ended its try
THREADS_END_S = 1.0
FREEZES = 2  # the second one takes in what the first try has imported
_OF_FSDP = "torch.distributed.fsdp._fully_shard"
_caches: weakref.WeakSet[functools._lru_cache_wrapper[Any]] = weakref.WeakSet()  # torch's

_logger = logging.getLogger(__name__)


class SpareOptions(TypedDict, total=False):
    """What a script may say of spares for its ranks."""

    # How long the others wait for a spare, where a rank has died and none is there; by default not at all.
    spare_wait: timedelta | float
    # The names of environment variables that a spare takes over from the group whose place it takes.
    handed_over: Sequence[str]  # REPLICA_GROUP_ID and NUM_REPLICA_GROUPS by default


class RestartOptions(SpareOptions, total=False):
    """What a script may say of its restarts; all of it may be left out."""

    # Errors after which to start again, beside MaxRetriesError, DivergenceError, GroupLostError,
    # QuorumTimeoutError and those of devices. ForeignMemberError and ConfigError never are among them.
    restart_on: Sequence[type[Exception]]
    max_restarts: int  # how often; 3 by default
    window: timedelta | float | None  # the time after which a restart no longer counts; all do by default
    # One or more functions that raise an error while this rank should not train: `health.device` by default.
    # After a failure they are called again, after longer and longer pauses.
    health_check: HealthCheck | Sequence[HealthCheck]
    health_timeout: timedelta | float  # how long they may fail; 300 s by default
    # Whether a try that ends leaves its state to the next one, which need not fetch it where no other replica
    # group has gone on; it is in memory twice until then. Not by default.
    keep_state: bool


@overload
def restartable(main: Callable[P, T], /, **options: Unpack[RestartOptions]) -> Callable[P, T]: ...
@overload
def restartable(
    main: None = None, /, **options: Unpack[RestartOptions]
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def restartable(main: Callable[..., Any] | None = None, /, **options: Unpack[RestartOptions]) -> Any:
    """Run a training function again, in this process, after an error that no step survives.

        @restartable(max_restarts=3, health_check=[health.device, health.disk("/checkpoints", 10**10)])
        def main(args, restart: Restart | None = None):
            with Manager(...) as manager:
                ...

    Between two tries everything of this package that the function has made is ended, torch's default group is
    destroyed, and what the function's variables held is freed. All ranks of a replica group start again
    together, or none does; for one that has died a spare may take the place, which is the same script with
    TORCHFT_SPARE=rank. docs/in-process-restart.md says what stays.

    Args:
        main: the training function. If it has a parameter `restart`, it gets a `Restart` there.
        options: as `RestartOptions` lists them.

    Raises:
        ConfigError: an option is wrong; from the function: torch's default group was there before it.
        HealthCheckError: from the function: a check has failed for `health_timeout`.
        GroupLostError: from the function: another rank of the replica group did not come to begin.
        ConnectError: from the function: this process is a spare, and finds no lighthouse.
    """
    if unknown := options.keys() - RestartOptions.__annotations__.keys():
        there_are = ", ".join(sorted(RestartOptions.__annotations__))
        raise ConfigError(f"restartable has no option {', '.join(sorted(unknown))}; there are {there_are}")
    _Tries(**options)  # checks them at once

    def decorate(main: Callable[P, T]) -> Callable[P, T]:
        takes_restart = "restart" in inspect.signature(main).parameters

        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            def attempt(restart: Restart) -> T:
                given: dict[str, Any] = {**kwargs, "restart": restart} if takes_restart else kwargs
                return main(*args, **given)

            return _Tries(**options).run(attempt)  # type: ignore[no-any-return]

        return run

    return decorate if main is None else decorate(main)


class _Tries:
    """The tries of a function, one after the other, by the options of `restartable`."""

    def __init__(
        self,
        restart_on: Sequence[type[Exception]] = (),
        max_restarts: int = 3,
        window: timedelta | float | None = None,
        health_check: HealthCheck | Sequence[HealthCheck] = device,
        health_timeout: timedelta | float = 300.0,
        keep_state: bool = False,
        **of_spares: Unpack[SpareOptions],
    ) -> None:
        for each in restart_on:
            if not (isinstance(each, type) and issubclass(each, Exception)):
                raise ConfigError(f"restart_on has {each!r:.100}: it takes classes of exceptions")
        self._restart_on = (*restart_on, *OF_THE_RUN, *OF_DEVICES)
        most = whole_number(max_restarts, "max_restarts")
        self._budget = RestartBudget(most, None if window is None else seconds_of(window, "window"))
        self._checks = (health_check,) if callable(health_check) else tuple(health_check)
        self._health_s = seconds_of(health_timeout, "health_timeout")
        self._keeping = kept_state.keeping if keep_state else contextlib.nullcontext
        self._desk = SpareDesk(**of_spares)

    def run(self, main: Callable[[Restart], Any]) -> Any:
        """Return what the function returns in the first try that no error ends."""
        if dist.is_initialized():
            raise ConfigError("torch's default group has to end with each try: start it in the function")
        restart = Restart()
        limit_s = self._health_s + NOTICE_S
        if is_spare(os.environ):
            group, restart = self._wait_for_place(limit_s)
        else:
            group = RestartGroup.meet(place_in_group(os.environ), limit_s, self._desk)
        with group, frozen(), self._keeping():
            numbers = itertools.count()
            while True:
                this_try = Try(freezes=next(numbers) < FREEZES)
                try:
                    with group.begin(restart.attempt):
                        result = main(restart)
                except BaseException as error:  # noqa: BLE001 - it is raised again, unless all start again
                    failure = error
                else:
                    group.say(restart.attempt, RETURNED)
                    return result
                restart = self._next(restart.attempt, group, this_try, failure)
                del failure, this_try

    def _wait_for_place(self, limit_s: float) -> tuple[RestartGroup, Restart]:
        """Wait until this process, a spare, has taken the place of a rank."""
        wait_until_healthy(self._checks, self._health_s)
        warm_up()

        def take(place: Place) -> tuple[RestartGroup, int, Place]:
            return *RestartGroup.as_spare(place, limit_s, self._desk), place

        group, attempt, place = take_place(lighthouse_of(os.environ), CONNECT_S, take)
        del os.environ[SPARE_ENV]
        names = {*OF_TORCHRUN, *self._desk.handed_over}
        for name in names:  # what the group has not, its other ranks have not either
            os.environ.pop(name, None)
        os.environ.update({n: value for n, value in place.environment.items() if n in names})
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
        reason = f"this process has taken the place of rank {place.rank}"
        _logger.warning("%s: try %d of its group begins", reason, attempt)
        return group, Restart(attempt, reason=reason, is_replacement=True)

    def _next(self, attempt: int, group: RestartGroup, ended: Try, failure: BaseException) -> Restart:
        """Return the next try; raise the error that has ended the last one, if there is none."""
        reason = f"{type(failure).__name__}: {failure}"
        ending = ending_of(failure, self._restart_on)
        if ending is Ending.UNKNOWN and group.is_alone:
            ending = Ending.LAST
        if ending is not Ending.LAST and self._budget.is_spent(time.monotonic()):
            ending = Ending.SPENT
        has_returned = isinstance(failure, SystemExit) and not failure.code
        told = RETURNED if has_returned else Told(ending, reason)
        if ending is Ending.LAST:
            group.say(attempt, told)
            raise failure
        trace = "".join(traceback.format_exception(failure))
        ended.end(failure)
        try:
            wait_until_healthy((ended.check_threads, *self._checks), self._health_s)
        except HealthCheckError as error:
            group.say(attempt, Told(Ending.UNFIT, str(error)))
            raise error from failure
        attempt, everybody = group.agree(attempt, told)
        if not all_start_again(everybody):
            # A rank that looks later sees this in place of what this rank said before.
            why = why_not(everybody)
            group.say(attempt, Told(Ending.LAST, why))
            failure.add_note(f"not run again in this process: {why}")
            raise failure
        if all(each.ending is not Ending.REPLACED for each in everybody):
            self._budget.count(time.monotonic())
        _logger.warning("another try begins in this process, number %d: %s", attempt, reason)
        return Restart(attempt, type(failure), reason, trace)


class Try:
    """What the process has while a try begins; the rest is the try's.

    Args:
        freezes: whether none of that is looked through until the function has ended.
    """

    def __init__(self, *, freezes: bool) -> None:
        self._made_until = resources.mark()
        self._threads = frozenset(threading.enumerate())
        _note_caches(gc.get_objects())
        if freezes:
            gc.collect()  # what threads of the last try have let go of since its end
            gc.freeze()

    def end(self, error: BaseException) -> None:
        """End what this try has made, and free what its function held; what fails is logged."""
        resources.end_since(self._made_until)
        if dist.is_initialized():
            _destroy_torchs_groups()
        # torch names groups by their number, and counts a default group that could not be made.
        dist.distributed_c10d._world.group_count = 0
        for each in _with_causes(error):
            traceback.clear_frames(each.__traceback__)
        # The loop's thread says that something has ended a moment before it lets go of it.
        coordination_loop().run(asyncio.sleep(0))
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.cuda.empty_cache()
            except RuntimeError as failure:  # a health check finds out whether it is of use
                _logger.warning("the device's cache could not be emptied: %s", failure)

    def check_threads(self) -> None:
        """Raise an error while a thread of this try runs for which a process would wait at its end."""
        deadline = time.monotonic() + THREADS_END_S
        for each in threading.enumerate():
            if each in self._threads or each.daemon or each in executors._threads_queues:
                continue
            each.join(max(0.0, deadline - time.monotonic()))
            if each.is_alive():
                raise RuntimeError(f"thread {each.name!r} of the last try does not end: {_place_of(each)}")


def _destroy_torchs_groups() -> None:
    """Let torch forget its groups, whose connections are closed once nobody keeps them.

    torch's caches of DTensor operations keep meshes, and each mesh its groups. A later try would also compute
    with what is cached for the mesh of an earlier one, which equals its own. After an error in a forward or
    backward pass FSDP and the graph of autograd keep each other, where the collector cannot see it.
    """
    try:
        dist.destroy_process_group()
    except Exception:  # of a backend that is broken
        _logger.exception("torch's process groups could not be destroyed in good order")
    made = gc.get_objects()
    _note_caches(made)
    for cache in _caches:
        cache.cache_clear()
    for each in made:
        kind = type(each)
        if issubclass(kind, DeviceMesh):
            vars(each).get("_pg_registry", {}).clear()
        elif str(kind.__module__).startswith(_OF_FSDP) and not issubclass(kind, torch.nn.Module):
            getattr(each, "__dict__", {}).clear()
    planners = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", {})
    planners.clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _note_caches(objects: Iterable[object]) -> None:
    for each in objects:  # to ask one for more than its type would wake torch's deprecated names
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed"):
            _caches.add(each)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Undo at the end of a block what tries have frozen in it."""
    is_the_scripts = gc.get_freeze_count() > 0
    gc.unfreeze()  # what is frozen is not listed, and there may be caches of torch's
    try:
        yield
    finally:
        if not is_the_scripts:
            gc.unfreeze()


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _place_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
