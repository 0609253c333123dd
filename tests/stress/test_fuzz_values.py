"""Values that are well formed and make no sense: a queue's handle, what the child of a Baby group says."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.descriptors import left_open_since, open_descriptors
from tests.stress.fuzzing import assert_parsed_or_refused, fuzz
from torchft_like.core.agreement import statements
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.process_group.baby.messages import Channel, ForeignMessageError, Message
from torchft_like.process_group.baby.requests import Requests


def test_long_statements_are_not_remembered() -> None:
    before = statements._remembered.cache_info().currsize
    for number in range(3):
        specs = [[f"{number}/{i} of a list without two alike", 1] for i in range(1000)]
        statements.decode(json.dumps(["a", "b", specs, [], None, None, None, None, [], None]).encode())
    assert statements._remembered.cache_info().currsize == before


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)
whole = st.integers(-(2**63), 2**63 - 1)

KEYS = st.sampled_from(
    ["version", "name", "token", "slots", "slot_bytes", "local_ranks", "n_remote", "address", "server_key"]
)
HANDLE = QueueHandle("name", bytes(32), 4, 256, (0, 1), 0).to_plain()


@fuzz
@given(st.one_of(plain, st.dictionaries(KEYS, plain).map(lambda changes: {**HANDLE, **changes})))
def test_a_handle_is_read_or_refused(value: object) -> None:
    assert_parsed_or_refused(QueueHandle.from_plain, value, refusals=ValueError)


@fuzz
@given(st.tuples(whole, whole, st.lists(plain, max_size=4)).map(lambda parts: (*parts[:2], *parts[2])))
@example((1, 99))  # a ValueError of an enumeration, on whichever thread read it
@example((1, 1))
@example((0, 0))
def test_an_answer_settles_a_request_or_ends_the_child(message: Message) -> None:
    ours, theirs = Channel.pair()
    child = Channel(theirs)
    ended: list[str] = []

    def end() -> None:
        ended.append("ended")
        child.close()

    channel = Channel(ours)
    requests = Requests(channel, lambda: None, end, lambda: None)
    request = requests.add(patience_s=60.0)
    assert request.number == 1
    child.send(message)
    child.send((1, 0))
    assert assert_parsed_or_refused(lambda: requests.wait(request, float("inf")), refusals=())
    assert (request.outcome is None) == bool(ended)
    requests.end()
    child.close()
    channel.close()


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    ours, theirs = Channel.pair()
    child, channel = Channel(theirs), Channel(ours)
    requests = Requests(channel, lambda: None, lambda: None, lambda: None)
    request = requests.add(patience_s=60.0)
    before = open_descriptors()
    child.send((1, 0), [child.fileno(), child.fileno()])
    assert requests.wait(request, float("inf"))
    assert not left_open_since(before)
    socket.send_fds(theirs, [b"\xff"], [child.fileno()])
    with pytest.raises(ForeignMessageError):
        channel.receive()
    assert not left_open_since(before)
    child.close()
    channel.close()
