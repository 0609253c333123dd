"""Transfers of a state of which bits, bytes or the rest are lost or changed on the way; a thousand with
`make stress`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import timedelta

import psutil
import pytest
import torch

from lighthouse.address import LOOPBACK, parse_address
from tests.equality import same
from torchft_like.checkpointing import HTTPTransport
from torchft_like.errors import CheckpointError
from torchft_like.testing.relay import Filter, Relay, at, cut, flip_bit

pytestmark = pytest.mark.heal_is_clean

TRANSFERS = int(os.environ.get("STRESS_TRANSFERS", "150"))
LIMIT = timedelta(seconds=60)
PAUSE = timedelta(milliseconds=100)  # after which a receiver of too few bytes takes its source for dead
MEMORY_BYTES_MAX = 64 << 20
STATE = {
    "w": torch.randn(1 << 18),
    "layers": [torch.ones(1000) for _ in range(40)],
    "step": 5,
    "text": "x" * 900,
}


def test_each_is_refused_with_a_typed_error_in_bounded_memory_and_the_source_goes_on() -> None:
    chance = random.Random(20)
    spoilers: dict[str, Filter] = {
        "cut": cut,
        "a bit": flip_bit,
        "bytes": lambda data: chance.randbytes(min(8, len(data))) + data[8:],
        "fewer": lambda data: data[chance.randint(1, 5) :],
        "more": lambda data: chance.randbytes(chance.randint(1, 5)) + data,
    }
    source: HTTPTransport[object] = HTTPTransport(LIMIT, hostname=LOOPBACK)
    receiver: HTTPTransport[object] = HTTPTransport(LIMIT, 1, hostname=LOOPBACK, stall_timeout=PAUSE)
    source.send_checkpoint([1], 5, STATE, LIMIT)
    address = parse_address(source.metadata())
    place, struck = 0, 0
    spoil: Filter = cut

    def strike(data: bytes) -> bytes:
        nonlocal struck
        struck += 1
        return spoil(data)

    relay = Relay((address.host, address.port), lambda: at(place, strike))
    relayed = f"http://{LOOPBACK}:{relay.port}"
    before = psutil.Process().memory_info().rss
    ends: Counter[str] = Counter()
    for number in range(TRANSFERS):
        spoil = chance.choice(list(spoilers.values()))
        place = chance.randrange(1 << 20) if number % 3 else chance.randrange(4000)
        struck = 0
        try:
            received = receiver.recv_checkpoint(0, relayed, 5, LIMIT)
        except CheckpointError as error:
            ends[type(error).__name__] += 1
        else:
            assert same(received, STATE)
            ends["whole" if struck else "untouched"] += 1
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES_MAX
    assert ends["untouched"] < TRANSFERS / 50, ends
    assert ends["whole"] < TRANSFERS / 10, ends  # the reason phrase of an answer may say anything
    assert same(receiver.recv_checkpoint(0, source.metadata(), 5, LIMIT), STATE)
    print(dict(ends))
    receiver.shutdown()
    source.shutdown()
