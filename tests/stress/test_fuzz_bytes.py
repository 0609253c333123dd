"""Bytes that come from peers: states, store values, the checking of collectives, the channel to a child."""

from __future__ import annotations

import io
import json
import socket
import struct
from datetime import timedelta

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lighthouse.address import Address
from tests.descriptors import left_open_since, open_descriptors
from tests.stress.fuzzing import assert_parsed_or_refused, damaged, fuzz, json_values
from tests.unit.checkpointing.states import dump_state, forged, load_state
from torchft_like.checkpointing.state_stream import Expectation, IncomingState, read_header
from torchft_like.core.agreement import statements
from torchft_like.core.agreement.referee import Missing
from torchft_like.core.agreement.rules import Disagreement
from torchft_like.core.agreement.statements import Statement
from torchft_like.errors import CheckpointFormatError, ProcessGroupError
from torchft_like.plain_data import LEAF_TENSOR, LIST, LONG, MAGIC, ORDERED_DICT, TUPLE, encode
from torchft_like.process_group import store as group_store
from torchft_like.process_group.baby.messages import Channel, ChannelClosedError, ForeignMessageError, Message
from torchft_like.process_group.baby.requests import Requests
from torchft_like.process_group.checking import link
from torchft_like.process_group.checking.link import _read_referee
from torchft_like.process_group.store import AbortableStore, StoreAddress

DEEP = b"[" * 200_000
STATE = dump_state({"w": torch.arange(6.0), "steps": [1, 2.5, "x", None, (True, b"b")], "d": torch.float16})
CALL = Statement("allreduce", "same", ("float32[4]",) * 3, ("float32[4]",), 0, "SUM", None, None)


# -- state

STRUCTURE = read_header(io.BytesIO(STATE))
PAYLOAD = bytes(64)
HEAD = struct.pack("<II", MAGIC, 0)


def of_leaves(count: int) -> bytes:
    """A structure of 4 bytes for each of its tensors, which are empty."""
    spec = struct.pack("<BBBQ", 1, 0, 1, 0)
    return (
        struct.pack("<II", MAGIC, count)
        + count * spec
        + struct.pack("<BI", LIST, count)
        + count * bytes([LEAF_TENSOR])
    )


@fuzz
@given(
    st.one_of(
        st.binary(max_size=60),
        damaged(STATE),
        damaged(STRUCTURE).map(lambda structure: forged(structure, PAYLOAD)),
        st.binary(max_size=60).map(lambda value: forged(HEAD + value)),
    )
)
@example(forged(HEAD + struct.pack("<BI", LIST, 1) * 200_000))
@example(forged(HEAD + struct.pack("<BI", LIST, 200_000) + b"\x00" * 200_000))
@example(forged(HEAD + struct.pack("<BI", LIST, 100_000) + struct.pack("<BI", ORDERED_DICT, 0) * 100_000))
@example(forged(HEAD + struct.pack("<BI", LONG, 2_000_000) + b"\x7f" * 2_000_000))
@example(forged(of_leaves(20_000)))
@example(b"TFTSTATE\x02\x00\x00\x00\xff\xff\xff\x03\x00\x00\x00\x00")  # announces 64 MB and sends none
def test_bytes_are_a_state_or_refused(data: bytes) -> None:
    assert_parsed_or_refused(load_state, data, refusals=CheckpointFormatError)


EXPECTED = Expectation()
EXPECTED.learn({"w": torch.zeros(10_000)})


@fuzz
@given(damaged(STRUCTURE))
@example(HEAD + struct.pack("<BI", LIST, 200_000) + struct.pack("<BI", ORDERED_DICT, 0) * 200_000)
@example(of_leaves(1_000_000))
@example(of_leaves(16_000))
def test_a_small_state_is_healed_with_little(structure: bytes) -> None:
    """Of a header of 57 MB the healer of 40 KB made objects of 1 GB, in half a minute."""

    def heal() -> object:
        source = io.BytesIO(forged(structure))
        incoming = IncomingState(read_header(source, EXPECTED.limits), EXPECTED.limits)
        incoming.outline()
        return incoming.read_all(source)

    assert_parsed_or_refused(heal, refusals=CheckpointFormatError)


# -- the store


@fuzz
@given(st.one_of(st.binary(max_size=60), damaged(encode([{"a": b"1", "b/c": b"", "0": b"x" * 30}]))))
@example(struct.pack("=I", 1) + b"\xff" + struct.pack("=I", 0))  # a key that is not UTF-8
@example(struct.pack("=I", 2**32 - 1))
def test_bytes_are_what_a_member_said_or_refused(data: bytes) -> None:
    said = assert_parsed_or_refused(group_store._values_in, data, refusals=ProcessGroupError)
    assert said is None or all(isinstance(key, str) for key in said)


@fuzz
@given(st.one_of(st.binary(max_size=60), json_values.map(lambda v: json.dumps(v).encode())))
@example(json.dumps(["127.0.0.1", 70000, "00" * 16]).encode())  # an OverflowError of the socket
@example(json.dumps(["127.0.0.1", -1, "00" * 16]).encode())
@example(json.dumps(["a..b", 1, "00" * 16]).encode())
@example(json.dumps(["127.0.0.1", 1, "xyz"]).encode())
@example(json.dumps(["127.0.0.1", 1, "00"]).encode())
@example(DEEP)
@example(b"\xff")
def test_bytes_say_where_the_referee_is_or_are_refused(data: bytes) -> None:
    assert_parsed_or_refused(_read_referee, data, refusals=ProcessGroupError)


ASKED = ("get", "multi_get", "add", "check", "wait", "delete_key", "compare_set")


@fuzz
@given(st.sampled_from(ASKED), st.binary(max_size=40))
@example("get", b"\x00" + struct.pack("=Q", 2**63))
@example("multi_get", struct.pack("=Q", 2**64 - 1))
@example("add", b"\xff" * 7)
def test_the_answers_of_a_store_are_values_or_refused(question: str, answer: bytes) -> None:
    arguments = {"multi_get": (["a", "b"],), "check": (["a"],), "wait": (["a"],), "add": ("a", 1)}
    ours, theirs = socket.socketpair()
    store = AbortableStore(StoreAddress(Address("127.0.0.1", 1), "p"), timedelta(seconds=20))
    store._socket = ours
    ours.setblocking(False)
    with theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        ask = getattr(store, question)
        given_arguments = arguments.get(question, ("a", "b", "c") if question == "compare_set" else ("a",))
        assert_parsed_or_refused(ask, *given_arguments, refusals=(ProcessGroupError, TimeoutError))
    store.close()


# -- the checking of collectives

REQUESTS = link.Request(link.CALL, 7, 3, 1.5, statements.encode(CALL)).encode()


@fuzz
@given(st.lists(st.one_of(st.binary(max_size=30), damaged(REQUESTS)), max_size=4))
@example([struct.pack("<BQQdI", link.CALL, 1, 1, float("nan"), 0)])
@example([struct.pack("<BQQdI", link.CALL, 1, 1, 1.0, 2**32 - 1)])
def test_bytes_are_requests_to_the_referee_or_refused(parts: list[bytes]) -> None:
    buffer = bytearray(b"".join(parts))
    size = len(buffer)
    while size:
        request = assert_parsed_or_refused(link.take_request, buffer, refusals=ValueError)
        if request is None:
            return
        assert len(buffer) < size
        size = len(buffer)


@fuzz
@given(
    st.one_of(
        json_values.map(lambda v: json.dumps(v).encode()), damaged(statements.encode(CALL)), st.binary()
    )
)
@example(DEEP)  # a RecursionError, which ended the thread that reads
@example(json.dumps(["a", "b", [["s", 10**9]], [], None, None, None, None]).encode())
@example(json.dumps(["a", "b", [["s", True]], [], None, None, None, None]).encode())
def test_bytes_describe_a_call_or_are_refused(body: bytes) -> None:
    call = assert_parsed_or_refused(statements.decode, body, refusals=ValueError)
    assert call is None or isinstance(call, Statement)


PROBLEM = link.encode_problem(Disagreement("shape", {0: "a", 1: "b"}))


@fuzz
@given(st.one_of(json_values.map(lambda v: json.dumps(v).encode()), damaged(PROBLEM), st.binary()))
@example(DEEP)
@example(b'["missing", [null], {}, true, 1.0]')  # a TypeError
@example(b'["missing", [1e999], {}, true, 1.0]')  # an OverflowError
@example(b'["missing", [0], {"0": 5}, true, 1.0]')
@example(b'["disagreement", "x", {"y": 1}]')
def test_bytes_say_what_the_referee_found_or_are_refused(body: bytes) -> None:
    found = assert_parsed_or_refused(link.decode_problem, body, refusals=ValueError)
    assert found is None or isinstance(found, Disagreement | Missing)


def test_long_statements_are_not_remembered() -> None:
    before = statements._remembered.cache_info().currsize
    for number in range(3):
        specs = [[f"{number}/{i} of a list without two alike", 1] for i in range(1000)]
        statements.decode(json.dumps(["a", "b", specs, [], None, None, None, None, [], None]).encode())
    assert statements._remembered.cache_info().currsize == before


# -- the child of a Baby group

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)
whole = st.integers(-(2**63), 2**63 - 1)
WORDS = struct.pack("<qqB", 3, 7, 2) + encode([b"a call" * 20, ["device", 7, None, {"a": 1.5}]])


@fuzz
@given(st.one_of(damaged(WORDS).filter(bool), st.binary(min_size=1, max_size=60)))
@example(b"\x00")  # announces a file, and brings none
@example(struct.pack("<qqB", 1, 2, 1) + struct.pack("<BI", TUPLE, 2**31 - 1))  # for which marshal made 16 GB
@example(struct.pack("<qqB", 1, 2, 1) + struct.pack("<BI", LIST, 1) * 10_000)
@example(struct.pack("<qqB", 1, 2, 254))
def test_bytes_are_a_message_on_a_channel_or_refused(data: bytes) -> None:
    ours, theirs = Channel.pair()
    with theirs:
        theirs.send(data)
        channel = Channel(ours)
        found = assert_parsed_or_refused(channel.receive, refusals=(ForeignMessageError, ChannelClosedError))
        assert found is None or type(found[0]) is tuple
        channel.close()


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
