"""Bytes that come from peers: states, store values, the checking of collectives, the channel to a child."""

from __future__ import annotations

import json
import marshal
import os
import socket
import struct
import zlib
from datetime import timedelta

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lighthouse.address import Address
from tests.stress.fuzzing import damaged, fuzz, json_values, parse_or_refuse
from torchft_like.checkpointing.state_stream import dump_state, load_state
from torchft_like.errors import CheckpointFormatError, ProcessGroupError
from torchft_like.process_group import exchange
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.baby.channel import (
    Channel,
    ChannelClosedError,
    ForeignMessageError,
    Message,
)
from torchft_like.process_group.baby.requests import Requests
from torchft_like.process_group.checking import messages
from torchft_like.process_group.checking.link import _read_referee
from torchft_like.process_group.checking.referee import Missing
from torchft_like.process_group.checking.rules import Description, Disagreement
from torchft_like.process_group.store import StoreAddress

DEEP = b"[" * 200_000
STATE = dump_state({"w": torch.arange(6.0), "steps": [1, 2.5, "x", None, (True, b"b")], "d": torch.float16})
CALL = Description("allreduce", "same", ("float32[4]",) * 3, ("float32[4]",), 0, "SUM", None, None)


def framed(header: bytes) -> bytes:
    """A header with everything right around it."""
    return struct.pack("<8sIII", b"TFTSTATE", 1, len(header), zlib.crc32(header)) + header


# -- state


@fuzz
@given(
    st.one_of(
        st.binary(max_size=60), damaged(STATE), json_values.map(lambda v: framed(json.dumps(v).encode()))
    )
)
@example(framed(DEEP))
@example(framed(b'{"buffers":[4611686018427387903],"tree":null}'))
@example(framed(b'{"buffers":[],"tree":["tensor",0,"float32",[9223372036854775807,9223372036854775807]]}'))
@example(framed(b'{"buffers":[],"tree":["dict",[[["list",[]],1]]]}'))
@example(framed(b'{"buffers":[],"tree":["device","cuda:99999999999999"]}'))
@example(framed(b'{"buffers":[0],"tree":["array",0,"<f0",[0]]}'))
@example(b"TFTSTATE\x01\x00\x00\x00\xff\xff\xff\x03\x00\x00\x00\x00")  # announces 64 MB and sends none
def test_bytes_are_a_state_or_refused(data: bytes) -> None:
    parse_or_refuse(load_state, data, refusals=CheckpointFormatError)


trees = st.recursive(
    st.none()
    | st.integers()
    | st.sampled_from(
        ["int", "float", "tensor", "array", "dict", "device", "dtype", "size", "scalar", "0x1", "<f4"]
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


@fuzz
@given(trees, st.lists(st.integers(0, 64), max_size=3))
def test_a_well_framed_tree_is_a_state_or_refused(tree: object, sizes: list[int]) -> None:
    payload = b"".join(bytes(size) + bytes(-size % 64) for size in sizes)
    body = payload + struct.pack("<I", zlib.crc32(payload)) if payload else b""
    data = framed(json.dumps({"buffers": sizes, "tree": tree}).encode()) + body
    parse_or_refuse(load_state, data, refusals=CheckpointFormatError)


# -- the store


@fuzz
@given(st.one_of(st.binary(max_size=60), damaged(exchange._encode({"a": b"1", "b/c": b"", "0": b"x" * 30}))))
@example(struct.pack("=I", 1) + b"\xff" + struct.pack("=I", 0))  # a key that is not UTF-8
@example(struct.pack("=I", 2**32 - 1))
def test_bytes_are_what_a_member_said_or_refused(data: bytes) -> None:
    said = parse_or_refuse(exchange._decode, data, refusals=ProcessGroupError)
    assert said is None or all(isinstance(key, str) for key in said)


def test_a_long_list_of_what_a_member_said_is_read_once() -> None:
    """Each part was cut off by copying all the rest: two hours for as much as a store lets through."""
    assert parse_or_refuse(exchange._decode, bytes(2_000_000), refusals=()) == {"": b""}


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
    parse_or_refuse(_read_referee, data, refusals=ProcessGroupError)


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
    store._wire._socket = ours
    ours.setblocking(False)
    with theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        ask = getattr(store, question)
        given_arguments = arguments.get(question, ("a", "b", "c") if question == "compare_set" else ("a",))
        parse_or_refuse(ask, *given_arguments, refusals=(ProcessGroupError, TimeoutError))
    store.close()


# -- the checking of collectives

REQUESTS = messages.Request(messages.CALL, 7, 1.5, messages.encode_description(CALL)).encode()


@fuzz
@given(st.lists(st.one_of(st.binary(max_size=30), damaged(REQUESTS)), max_size=4))
@example([struct.pack("<BQdI", messages.CALL, 1, float("nan"), 0)])
@example([struct.pack("<BQdI", messages.CALL, 1, 1.0, 2**32 - 1)])
def test_bytes_are_requests_to_the_referee_or_refused(parts: list[bytes]) -> None:
    buffer = bytearray(b"".join(parts))
    size = len(buffer)
    while size:
        request = parse_or_refuse(messages.take_request, buffer, refusals=ValueError)
        if request is None:
            return
        assert len(buffer) < size
        size = len(buffer)


@fuzz
@given(
    st.one_of(
        json_values.map(lambda v: json.dumps(v).encode()),
        damaged(messages.encode_description(CALL)),
        st.binary(),
    )
)
@example(DEEP)  # a RecursionError, which ended the thread that reads
@example(json.dumps(["a", "b", [["s", 10**9]], [], None, None, None, None]).encode())
@example(json.dumps(["a", "b", [["s", True]], [], None, None, None, None]).encode())
def test_bytes_describe_a_call_or_are_refused(body: bytes) -> None:
    call = parse_or_refuse(messages.decode_description, body, refusals=ValueError)
    assert call is None or isinstance(call, Description)


PROBLEM = messages.encode_problem(Disagreement("shape", {0: "a", 1: "b"}))


@fuzz
@given(st.one_of(json_values.map(lambda v: json.dumps(v).encode()), damaged(PROBLEM), st.binary()))
@example(DEEP)
@example(b'["missing", [null], {}, true, 1.0]')  # a TypeError
@example(b'["missing", [1e999], {}, true, 1.0]')  # an OverflowError
@example(b'["missing", [0], {"0": 5}, true, 1.0]')
@example(b'["disagreement", "x", {"y": 1}]')
def test_bytes_say_what_the_referee_found_or_are_refused(body: bytes) -> None:
    found = parse_or_refuse(messages.decode_problem, body, refusals=ValueError)
    assert found is None or isinstance(found, Disagreement | Missing)


def test_long_descriptions_are_not_remembered() -> None:
    before = messages._remembered.cache_info().currsize
    for number in range(3):
        specs = [[f"{number}/{i} of a list without two alike", 1] for i in range(1000)]
        messages.decode_description(json.dumps(["a", "b", specs, [], None, None, None, None]).encode())
    assert messages._remembered.cache_info().currsize == before


# -- the child of a Baby group

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


@fuzz
@given(st.one_of(plain.map(marshal.dumps), plain.map(lambda v: marshal.dumps(v)[:-1]).filter(bool)))
@example(marshal.dumps(None))  # announces a file, and brings none
@example(marshal.dumps({}))
@example(b"\xff")
def test_bytes_are_a_message_on_a_channel_or_refused(data: bytes) -> None:
    ours, theirs = Channel.pair()
    with theirs:
        theirs.send(data)
        channel = Channel(ours)
        found = parse_or_refuse(channel.receive, refusals=(ForeignMessageError, ChannelClosedError))
        assert found is None or type(found[0]) is tuple
        channel.close()


@fuzz
@given(st.lists(plain, max_size=4).map(tuple))
@example((1, 99))  # a ValueError of an enumeration, on whichever thread read it
@example((1, 1))
@example((0, 0))
@example(("1", 0))
@example(([], 0))
@example(())
def test_an_answer_settles_a_request_or_ends_the_child(message: Message) -> None:
    ours, theirs = Channel.pair()
    child = Channel(theirs)
    ended: list[str] = []

    def end() -> None:
        ended.append("ended")
        child.close()

    channel = Channel(ours)
    requests = Requests(channel, end, lambda: None)
    request = requests.add(patience_s=60.0)
    assert request.number == 1
    child.send(message)
    child.send((1, 0))
    assert parse_or_refuse(lambda: requests.wait(request, float("inf")), refusals=())
    assert (request.outcome is None) == bool(ended)
    requests.end()
    child.close()
    channel.close()


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    ours, theirs = Channel.pair()
    child, channel = Channel(theirs), Channel(ours)
    requests = Requests(channel, lambda: None, lambda: None)
    request = requests.add(patience_s=60.0)
    before = len(os.listdir("/proc/self/fd"))
    child.send((1, 0), [child.fileno(), child.fileno()])
    assert requests.wait(request, float("inf"))
    assert len(os.listdir("/proc/self/fd")) == before
    socket.send_fds(theirs, [b"\xff"], [child.fileno()])
    with pytest.raises(ForeignMessageError):
        channel.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    child.close()
    channel.close()
