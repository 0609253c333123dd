"""Messages and descriptors between a process and its forks."""

from __future__ import annotations

import contextlib
import linecache
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from tests.descriptors import left_open_since, open_descriptors
from tests.faults import raising
from tests.waiting import wait_for
from torchft_like.errors import NotSupportedError, PlainDataError
from torchft_like.plain_data import decode as decode_plain
from torchft_like.process_group.baby import requests
from torchft_like.process_group.baby.heartbeat import LOOK_EVERY_S
from torchft_like.process_group.baby.messages import (
    MESSAGE_BYTES_MAX,
    Channel,
    ChannelClosedError,
    ForeignMessageError,
    Outcome,
    decode,
    decode_call,
    encode,
    encode_call,
)
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.work import FOREVER


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, Channel.pair())
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [MESSAGE_BYTES_MAX - 1, MESSAGE_BYTES_MAX, 5_000_000])
def test_a_message_may_be_of_any_length(ends: tuple[Channel, Channel], size: int) -> None:
    left, right = ends
    before = open_descriptors()
    left.send((1, 2, "long", b"x" * size))
    assert right.receive() == ((1, 2, "long", b"x" * size), [])
    assert not left_open_since(before)


@pytest.mark.parametrize("text", ["short", "long" * MESSAGE_BYTES_MAX])
def test_descriptors_travel_with_their_message(ends: tuple[Channel, Channel], text: str) -> None:
    left, right = ends
    reading, writing = os.pipe()
    left.send((1, 2, text), [reading, writing])
    os.close(reading)
    os.close(writing)
    message, (own_reading, own_writing) = right.receive()
    assert message == (1, 2, text)
    os.write(own_writing, b"through")
    assert os.read(own_reading, 7) == b"through"
    os.close(own_reading)
    os.close(own_writing)


def test_a_message_with_descriptors_waits_no_longer_than_its_deadline(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    reading, writing = os.pipe()
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 100_000:  # the other end takes nothing
            left.send((sent, 0), [reading], time.monotonic() + 0.05)
            sent += 1
    assert 0 < sent < 100_000
    for number in range(sent):
        message, (received,) = right.receive()
        assert message == (number, 0)
        os.close(received)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("unread", [False, True], ids=["", "that left something unread"])
def test_what_was_sent_before_the_end_is_received_before_the_error(
    ends: tuple[Channel, Channel], unread: bool
) -> None:
    left, right = ends
    if unread:
        right.send((1, 2, "nobody reads this"))
    left.send((1, 2, "last words"))
    left.close()
    assert right.receive()[0] == (1, 2, "last words")
    with pytest.raises(ChannelClosedError):
        right.receive()
    with pytest.raises(ChannelClosedError):
        right.send((1, 2, "nobody hears"))


def test_sending_to_who_takes_nothing_ends_at_the_deadline_or_with_its_own_end(
    ends: tuple[Channel, Channel],
) -> None:
    def fill(limit_s: float, while_full: Callable[[], None] | None = None) -> None:
        while True:
            ends[0].send((1, 2, b"x" * 1000), deadline=time.monotonic() + limit_s, while_full=while_full)

    with pytest.raises(TimeoutError):
        fill(0.01)
    with pytest.raises(ChannelClosedError):
        fill(60, ends[0].close)
    assert not ends[0].has_message()


def test_a_part_that_does_not_travel_is_refused_and_nothing_is_sent(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    with pytest.raises(PlainDataError, match=r"\[1\] is a set, which does not travel"):
        left.send((1, 2, "fine", {3}))
    assert not right.has_message()


def test_a_file_that_is_too_long_for_a_message_is_refused_unread(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    file = os.memfd_create("long")
    os.truncate(file, 2**40)
    socket.send_fds(left._socket, [b"\x00"], [file])
    with pytest.raises(ForeignMessageError, match=f"a file of {2**40} bytes"):
        right.receive()
    os.close(file)


# Arguments of collectives as plain data.


TENSORS = [torch.zeros(1), torch.ones(2)]
OPTIONS = [cls for name, cls in vars(c10d).items() if name.endswith("Options") and hasattr(cls, "asyncOp")]


def number_of(tensor: Tensor) -> bytes:
    return bytes([next(i for i, known in enumerate(TENSORS) if known is tensor)])


def through(value: Any) -> Any:
    (plain,) = decode_plain(encode(value, number_of))
    return decode(plain, lambda spec: TENSORS[spec[0]])


@pytest.mark.parametrize("count", [1, 1000])  # which is kept, and which is too long for that
def test_a_call_arrives_with_its_name_and_named_arguments(count: int) -> None:
    for _ in range(2):
        data = encode_call("allreduce", (count * [TENSORS[1]], 7), {"timeout": None, "tag": 3}, number_of)
        name, args, kwargs = decode_call(data)
        assert (name, args, kwargs) == ("allreduce", [count * [b"\x01"], 7], {"timeout": None, "tag": 3})
        decode(args, lambda spec: TENSORS[spec[0]]).clear()  # does not touch what is kept


def test_numbers_that_are_equal_and_of_other_types_are_not_taken_for_each_other() -> None:
    for value in (1, True, 1.0, 0.0, -0.0, False, 0):
        (_, (arrived,), _) = decode_call(encode_call("send", (value,), {}, number_of))
        assert repr(arrived) == repr(value)


@pytest.mark.parametrize(
    "value", [None, True, 7, -1, 2.5, "text", [1, 2], [], timedelta(milliseconds=-1), torch.device("cpu", 0)]
)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    assert through(value) == value


def test_a_reduction_keeps_its_factor() -> None:
    sent = c10d._make_nccl_premul_sum(2.5)
    assert through(sent).__getstate__() == sent.__getstate__()


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_options_keep_every_field(cls: Any) -> None:
    options = cls()
    changes = {
        "timeout": timedelta(seconds=3),
        "rootRank": 2,
        "rootTensor": 1,
        "device_ids": [1, 3],
        "device": torch.device("cpu"),
        "reduceOp": ReduceOp(ReduceOp.MAX),
        "asyncOp": not options.asyncOp,
    }
    fields = [name for name, value in vars(cls).items() if isinstance(value, property)]
    assert set(fields) <= set(changes)
    for name in fields:
        setattr(options, name, changes[name])
    arrived = through(options)
    assert type(arrived) is cls
    assert {name: getattr(arrived, name) for name in fields} == {name: changes[name] for name in fields}


def test_options_that_differ_in_one_field_are_not_taken_for_each_other() -> None:
    variants = []
    for reduce_op in (ReduceOp.SUM, ReduceOp.MAX, *map(c10d._make_nccl_premul_sum, (0.5, 0.25))):
        for timeout in (timedelta(seconds=1), timedelta(seconds=2)):
            options = c10d.AllreduceOptions()
            options.reduceOp, options.timeout = reduce_op, timeout  # type: ignore[assignment] # torch takes either
            variants.append(options)
    for _ in range(2):
        for options in variants:
            arrived = through(options)
            assert arrived.reduceOp.__getstate__() == options.reduceOp.__getstate__()
            assert arrived.timeout == options.timeout


def test_what_no_collective_takes_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="set"):
        encode({1}, number_of)


# Whoever waits reads the answers, for everybody.


LIMIT_S = 60.0


class Correspondence:
    """Requests, and the end of the channel from which they are answered."""

    def __init__(self) -> None:
        near, far = Channel.pair()
        self.far = Channel(far)
        self.near = Channel(near)
        self.silences = threading.Semaphore(0)
        self.pauses = threading.Semaphore(0)
        self.requests = Requests(self.near, self.pauses.release, self.silences.release, lambda: None)

    def answer(self, request: Request, *parts: object) -> None:
        self.far.send((request.number, Outcome.DONE.value, *parts))

    def end(self) -> None:
        self.far.close()
        self.requests.end()
        self.near.close()


@pytest.fixture
def talk() -> Iterator[Correspondence]:
    correspondence = Correspondence()
    yield correspondence
    correspondence.end()


def limit() -> float:
    return time.monotonic() + LIMIT_S


def test_the_end_waits_for_the_one_who_reads_and_not_for_ever(talk: Correspondence) -> None:
    request = talk.requests.add(FOREVER)
    reader = threading.Thread(target=talk.requests.wait, args=(request, limit()))
    reader.start()
    wait_for(lambda: talk.requests._reader is not None)
    end = threading.Thread(target=talk.requests.end, daemon=True)
    end.start()
    end.join(LIMIT_S)
    assert not end.is_alive()
    reader.join(LIMIT_S)
    assert request.outcome is None


def test_an_interrupt_between_any_two_lines_of_the_reader_leaves_nobody_waiting() -> None:
    line = 1
    while was_interrupted_at(line):
        line += 1
    assert line > 20


def was_interrupted_at(line: int) -> bool:
    """Interrupt a thread that reads two answers at a line, while another one waits; return False if the
    thread has ended before. Everybody gets an answer, or hears that the subprocess was ended.
    """
    near, far = map(Channel, Channel.pair())
    settled: list[Request] = []
    of_all = Requests(near, lambda: None, far.close, lambda: None)
    others, own, late = (of_all.add(FOREVER, settled.append) for _ in range(3))
    waiter = threading.Thread(target=of_all.wait, args=(late, limit()), daemon=True)
    lines = 0

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != requests.__file__:
            return None
        if linecache.getline(requests.__file__, frame.f_lineno).lstrip().startswith("with "):
            return trace  # a signal does not come between a lock's acquisition, or release, and the block
        if frame.f_code.co_name == "_read_in_turn" and waiter.ident is None:
            waiter.start()
            wait_for(lambda: of_all._waiters > 0)
        lines += event == "line"
        if event == "line" and lines == line:
            raise KeyboardInterrupt
        return trace

    for request in (others, own):
        far.send((request.number, Outcome.DONE.value))
    before = sys.gettrace()
    try:
        sys.settrace(trace)
        of_all.wait(own, limit())
        is_interrupted = False
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        sys.settrace(before)
    with contextlib.suppress(ChannelClosedError):
        far.send((late.number, Outcome.DONE.value))
    for request in (others, own, late):
        assert of_all.wait(request, limit()), line
        assert request.outcome is Outcome.DONE or of_all.last_words, line
    if waiter.ident is not None:
        waiter.join(LIMIT_S)
        assert not waiter.is_alive(), line
    assert len(set(map(id, settled))) == len(settled), "none is settled twice"
    for end in (of_all.end, near.close, far.close):
        end()
    return is_interrupted


def test_one_who_waits_long_does_not_keep_others_from_their_answers(talk: Correspondence) -> None:
    late, early = talk.requests.add(FOREVER), talk.requests.add(FOREVER)
    with ThreadPoolExecutor(2) as pool:
        long_wait = pool.submit(talk.requests.wait, late, limit())
        short_wait = pool.submit(talk.requests.wait, early, limit())
        talk.answer(early)
        assert short_wait.result(LIMIT_S)
        assert not long_wait.done()
        talk.answer(late)
        assert long_wait.result(LIMIT_S)


def test_a_wait_ends_at_its_deadline_and_the_request_goes_on(talk: Correspondence) -> None:
    request = talk.requests.add(FOREVER)
    assert not talk.requests.wait(request, time.monotonic() + 0.01)
    talk.answer(request)
    assert talk.requests.wait(request, limit())
    assert talk.silences.acquire(blocking=False) is False


def test_the_end_of_the_subprocess_settles_everything_once(talk: Correspondence) -> None:
    settled: list[Request] = []
    requests = [talk.requests.add(FOREVER, settled.append) for _ in range(3)]
    talk.far.close()
    assert all(talk.requests.wait(request, limit()) for request in requests)
    assert sorted(r.number for r in settled) == sorted(r.number for r in requests)
    assert {request.outcome for request in requests} == {None}


def test_a_request_after_the_end_is_settled_at_once(talk: Correspondence) -> None:
    talk.requests.end()
    request = talk.requests.add(FOREVER)
    assert talk.requests.wait(request, limit())
    assert request.outcome is None


def test_a_request_that_is_not_answered_in_time_is_reported_once(
    talk: Correspondence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 0.01)
    request = talk.requests.add(patience_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(talk.requests.wait, request, limit())
        assert talk.silences.acquire(timeout=LIMIT_S)
        assert not talk.silences.acquire(blocking=False)
        talk.answer(request)


@pytest.mark.parametrize("how", ["waits", "looks"])
def test_whether_the_subprocess_runs_is_asked_while_somebody_waits(talk: Correspondence, how: str) -> None:
    request = talk.requests.add(FOREVER)
    assert not talk.pauses.acquire(timeout=2 * LOOK_EVERY_S), "nobody waits"
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(talk.requests.wait, request, limit()) if how == "waits" else None
        paused, end = 0, limit()
        while paused < 2 and time.monotonic() < end:
            paused += talk.pauses.acquire(timeout=0.01)
            if how == "looks":
                talk.requests.look()
        talk.answer(request)
        assert talk.requests.wait(request, limit())
        assert paused == 2
        assert wait is None or wait.result(LIMIT_S)


def test_who_asks_late_finds_the_answer_not_silence(talk: Correspondence) -> None:
    first, second = talk.requests.add(patience_s=0.01), talk.requests.add(patience_s=0.01)
    talk.answer(first)
    talk.answer(second)
    threading.Event().wait(0.05)  # the limit of both passes
    assert talk.requests.wait(second, limit())
    assert not talk.silences.acquire(blocking=False)


def test_every_answer_is_a_sign_of_life(talk: Correspondence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 5.0)
    open_requests = [talk.requests.add(patience_s=0.2) for _ in range(10)]
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(talk.requests.wait, open_requests[-1], limit())
        for request in open_requests:
            threading.Event().wait(0.05)
            talk.answer(request)
        assert wait.result(LIMIT_S)
    assert not talk.silences.acquire(blocking=False)


def test_an_error_in_what_settles_a_request_frees_who_waits(talk: Correspondence) -> None:
    request = talk.requests.add(FOREVER, raising(ValueError("no room for the copy")))
    talk.answer(request)
    assert talk.requests.wait(request, limit())
    assert request.outcome is Outcome.FAILED
    assert request.answer == ("ValueError", "no room for the copy")
