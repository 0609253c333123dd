"""What strangers send to a process takes none of its memory or descriptors for longer than it is read."""

from __future__ import annotations

import json
import socket

import pytest

from tests.descriptors import left_open_since, open_descriptors
from torchft_like.core.agreement import statements
from torchft_like.process_group.baby.messages import Channel, ForeignMessageError
from torchft_like.process_group.baby.requests import Requests


def test_long_statements_are_not_remembered() -> None:
    before = statements._remembered.cache_info().currsize
    for number in range(3):
        specs = [[f"{number}/{i} of a list without two alike", 1] for i in range(1000)]
        statements.decode(json.dumps(["a", "b", specs, [], None, None, None, None, [], None]).encode())
    assert statements._remembered.cache_info().currsize == before


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
