"""What is said arrives once and in its order, over any number of connections that break."""

from __future__ import annotations

from torchft_like.core.conversation import KEPT_MAX, UNCOUNTED_MAX, Conversation


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
