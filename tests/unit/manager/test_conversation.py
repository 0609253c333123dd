"""What is said arrives once and in its order, over any number of connections that break."""

from __future__ import annotations

import random
from collections import deque

import pytest

from torchft_like.core.conversation import KEPT_MAX, UNCOUNTED_MAX, Conversation

Sent = tuple[int, int | None]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_said_arrives_once_and_in_order_over_connections_that_break(seed: int) -> None:
    chance = random.Random(seed)
    sides = Conversation[int](), Conversation[int]()
    said, heard = ([0, 0], [list[int](), list[int]()])
    on_their_way: tuple[deque[Sent], deque[Sent]] = (deque(), deque())  # by sender

    def connect() -> None:
        for one in (0, 1):
            on_their_way[one].clear()
            assert sides[one].arrived(sides[1 - one].tell_count())
        for one in (0, 1):
            on_their_way[one].extend((sides[one].tell_count(), message) for message in sides[one].to_repeat)

    def receive(one: int) -> None:
        count, message = on_their_way[1 - one].popleft()
        assert sides[one].arrived(count)
        if message is not None:
            sides[one].hear()
            heard[one].append(message)
        if sides[one].owes_count:
            on_their_way[one].append((sides[one].tell_count(), None))

    for _ in range(600):
        one = chance.randrange(2)
        if chance.random() < 0.05:
            connect()
        elif on_their_way[1 - one] and chance.random() < 0.55:
            receive(one)
        elif said[one] - len(heard[1 - one]) < KEPT_MAX // 2:
            said[one] += 1
            assert sides[one].say(said[one])
            on_their_way[one].append((sides[one].tell_count(), said[one]))
    connect()
    for one in (0, 1):
        while on_their_way[1 - one]:
            receive(one)
        assert heard[one] == list(range(1, said[1 - one] + 1))
    assert min(said) > KEPT_MAX


def test_a_side_that_only_hears_owes_the_count_now_and_then() -> None:
    side = Conversation[int]()
    for _ in range(UNCOUNTED_MAX):
        assert not side.owes_count
        side.hear()
    assert side.owes_count
    assert side.tell_count() == UNCOUNTED_MAX
    assert not side.owes_count


def test_a_conversation_in_which_nothing_arrives_is_over_and_keeps_no_more() -> None:
    side = Conversation[int]()
    assert all(side.say(number) for number in range(KEPT_MAX))
    assert not side.say(KEPT_MAX)
    assert side.is_over
    assert len(side.to_repeat) == KEPT_MAX
    assert not side.arrived(1)  # nothing makes up for what was not kept


def test_a_count_of_messages_that_were_never_said_is_refused() -> None:
    side = Conversation[int]()
    side.say(1)
    assert not side.arrived(2)
    assert side.arrived(1)
    assert side.arrived(0)  # an older count says nothing
    assert side.to_repeat == ()
