"""Messages and descriptors between a process and its forks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from tests.descriptors import left_open_since, open_descriptors
from torchft_like.errors import PlainDataError
from torchft_like.process_group.baby.messages import (
    MESSAGE_BYTES_MAX,
    Channel,
    ChannelClosedError,
    ForeignMessageError,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, Channel.pair())
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_apart_and_in_order(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    messages = [(1, 2, [3.0, None, (True,)], b"five"), (0, -1), (7, 2**40, b"only"), (7, 0, b"")]
    for message in messages:
        left.send(message)
    assert [right.receive()[0] for _ in messages] == messages


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


def test_what_was_sent_before_the_end_is_received_before_the_error(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send((1, 2, "last words"))
    left.close()
    assert right.receive()[0] == (1, 2, "last words")
    with pytest.raises(ChannelClosedError):
        right.receive()
    with pytest.raises(ChannelClosedError):
        right.send((1, 2, "nobody hears"))


def test_what_an_end_said_that_left_a_word_unread_is_received(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    right.send((1, 2, "nobody reads this"))
    left.send((1, 2, "last words"))
    left.close()
    assert right.receive()[0] == (1, 2, "last words")
    with pytest.raises(ChannelClosedError):
        right.receive()


def test_sending_to_who_takes_nothing_ends_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    def fill() -> None:
        while True:
            ends[0].send((1, 2, b"x" * 1000), deadline=time.monotonic() + 0.01)

    with pytest.raises(TimeoutError):
        fill()


def test_sending_ends_with_an_end_that_is_closed_meanwhile(ends: tuple[Channel, Channel]) -> None:
    def fill() -> None:
        while True:
            ends[0].send((1, 2, b"x" * 1000), deadline=time.monotonic() + 60, while_full=ends[0].close)

    with pytest.raises(ChannelClosedError):
        fill()
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
