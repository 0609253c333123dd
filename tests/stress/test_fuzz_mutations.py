"""Every parser of bytes and texts that come from outside: good ones, changed.

Each row of PARSERS goes the way that the bytes go in a job, through the handlers of the real servers where
there are any. Messages that are well formed and make no sense are in test_fuzz_messages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest
import torch
import uvicorn
import zmq
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lighthouse import codec, keys
from lighthouse import server as lighthouse_server
from lighthouse.address import LOOPBACK, Address, parse_address, parse_host
from lighthouse.cli import _parse as parse_flags
from lighthouse.core.config import MESSAGE_BYTES_MAX as MESSAGE_BYTES_ON_THE_WIRE_MAX
from lighthouse.core.trust import Role, make_texts, parse_trust
from lighthouse.errors import AddressError, ConfigError
from lighthouse.events import Event, read_events
from lighthouse.page.cli import lines_of, status_in
from lighthouse.page.server import Page
from lighthouse.tls import FILES
from lighthouse.tls import _read as read_identity
from lighthouse.wire import torchft_pb2 as pb
from tests.stress.mutation import Parser, assert_all_are_taken_or_refused
from tests.unit.checkpointing.library_types import KINDS, quantized
from tests.unit.checkpointing.states import dump_state, forged, load_state
from torchft_like import coordination
from torchft_like.checkpointing import PGTransport
from torchft_like.checkpointing.http_fetch import _Line, _Source
from torchft_like.checkpointing.http_server import CheckpointServer, Offer, ServerLimits, _Connection
from torchft_like.checkpointing.state_stream import Expectation, IncomingState, Snapshot, read_header
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.core.agreement import statements
from torchft_like.core.agreement.referee import Disagreement, Missing
from torchft_like.core.agreement.statements import Statement
from torchft_like.core.conversation import Conversation
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.core.replica_group import RankJoin, RankQuorum, ReplicaGroup
from torchft_like.core.restarts import Record, StoreLostError
from torchft_like.core.store import (
    MESSAGE_BYTES_MAX,
    VALIDATION_MAGIC,
    KeyValueStore,
    Query,
    Request,
    RequestReader,
    StoreRequestError,
)
from torchft_like.core.store import Client as StoreClient
from torchft_like.errors import (
    CheckpointError,
    CheckpointFormatError,
    GroupLostError,
    PlainDataError,
    ProcessGroupError,
    QueueCorruptError,
    QueueError,
)
from torchft_like.group_coordinator.creation import _ranks_in
from torchft_like.in_process.spare import _place_of
from torchft_like.manager.config import ManagerArguments, resolve
from torchft_like.manager_server.duplex import MalformedMessageError
from torchft_like.manager_server.rank_link import (
    SessionLink,
    quorum_result_from_wire,
    quorum_result_to_wire,
    verdict_from_wire,
)
from torchft_like.manager_server.server import LighthouseLink, ManagerServer, rank_join
from torchft_like.manager_server.suspicion import counterpart
from torchft_like.message_queue import remote
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.message_queue.leaves import assembled, reading_ring
from torchft_like.message_queue.remote import RemoteReader, RemoteReaders
from torchft_like.message_queue.ring import INLINE, PAGE_BYTES, Geometry, RingReader, RingWriter
from torchft_like.plain_data import (
    DEVICE,
    DICT,
    DTYPE,
    LEAF_BYTES,
    LEAF_TENSOR,
    LIST,
    LONG,
    MAGIC,
    MESSAGES,
    ORDERED_DICT,
    SAME_TENSOR,
    SCALAR,
    SHARD,
    STR,
    TUPLE,
    Structure,
    TensorLeaves,
    as_tensor,
    decode,
    dissect,
    encode,
)
from torchft_like.process_group import ProcessGroup, checking
from torchft_like.process_group import store as group_store
from torchft_like.process_group.baby.messages import (
    Channel,
    ChannelClosedError,
    ForeignMessageError,
    decode_call,
    encode_call,
)
from torchft_like.process_group.baby.requests import Requests
from torchft_like.process_group.handles import Handle, parse_handle
from torchft_like.process_group.store import AbortableStore, StoreAddress, parse_store_address

MUTATIONS = int(os.environ.get("MUTATIONS", "40000"))
LIMIT = timedelta(seconds=20)
PART = b"\xfe|\xfd"  # between the messages of one input
DEEP = b"[" * 200_000
IN_SOCKET_MAX = 100_000  # bytes that a pair of sockets takes before somebody reads them


def parts_of(data: bytes, most: int = 8) -> list[bytes]:
    return data.split(PART)[:most]


# -- states, and how they travel

torch.serialization.add_safe_globals(KINDS)  # for as long as this process tries inputs
STATE = {
    "w": torch.arange(6.0),
    "steps": [1, 2.5, "x", None, (True, b"b")],
    "d": torch.float16,
    "quantized": quantized(),
}
STREAM = dump_state(STATE)
STRUCTURE = read_header(io.BytesIO(STREAM))
HEAD = struct.pack("<II", MAGIC, 0)
EXPECTED = Expectation()
EXPECTED.learn({"w": torch.zeros(10_000)})


def of_leaves(count: int) -> bytes:
    """A structure of 4 bytes for each of its tensors, which are empty."""
    spec = struct.pack("<BBBQ", 1, 0, 1, 0)
    head = struct.pack("<II", MAGIC, count) + count * spec
    return head + struct.pack("<BI", LIST, count) + count * bytes([LEAF_TENSOR])


def of_leaf(dtype: int, shape: Sequence[int], value: bytes) -> bytes:
    """A structure of one tensor."""
    spec = struct.pack(f"<BBB{len(shape)}Q", dtype, 0, len(shape), *shape)
    return struct.pack("<II", MAGIC, 1) + spec + value


FORGED = [
    b"",
    HEAD,
    HEAD + struct.pack("<BI", LIST, 1) * 200_000,
    HEAD + struct.pack("<BI", LIST, 4_000_001) + bytes(4_000_001),
    HEAD + struct.pack("<BI", LIST, 100_000) + struct.pack("<BI", ORDERED_DICT, 0) * 100_000,
    HEAD + struct.pack("<BI", DICT, 2) + 2 * (struct.pack("<BI", STR, 1) + b"a" + b"\x00"),
    HEAD + struct.pack("<BI", DICT, 1) + struct.pack("<BI", LIST, 0) + b"\x00",
    HEAD + struct.pack("<BI", DEVICE, 11) + b"gpu of mine",
    HEAD + struct.pack("<BI", SHARD, 2) + b"\x00\x00",
    HEAD + struct.pack("<BI", SHARD, 6) + bytes(6),
    HEAD + struct.pack("<BB", SCALAR, 3) + b"|O8" + bytes(8),
    HEAD + struct.pack("<BB", DTYPE, 200),
    HEAD + bytes([LEAF_TENSOR]),
    HEAD + struct.pack("<BI", SAME_TENSOR, 0),
    of_leaf(16, [0], struct.pack("<BBI", LEAF_BYTES, SAME_TENSOR, 0)),
    of_leaf(16, [0], b"\x00"),
    of_leaf(1, [0, 2**62, 2**62], bytes([LEAF_TENSOR])),
    of_leaf(1, [2**61], bytes([LEAF_TENSOR])),
    of_leaf(1, 65 * [1], bytes([LEAF_TENSOR])),
    struct.pack("<II", MAGIC, 2**32 - 1) + bytes(100),
]


def heal(structure: bytes) -> object:
    """A rank with a small state takes a peer's header; of one of 57 MB it once made 1 GB."""
    source = io.BytesIO(forged(structure, bytes(64)))
    incoming = IncomingState(read_header(source, EXPECTED.limits), EXPECTED.limits)
    return incoming.read_all(source)


class OverGroup:
    """What `PGTransport` needs of a process group, which sends into bytes, or receives from them."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def send(self, tensors: list[torch.Tensor], *_: int) -> OverGroup:
        self.data += tensors[0].view(torch.uint8).numpy().tobytes()
        return self

    def recv(self, tensors: list[torch.Tensor], *_: int) -> OverGroup:
        place = tensors[0].view(torch.uint8)
        if not self.data:
            raise RuntimeError("the sender has sent all, and its group has ended")
        came, self.data = bytearray(self.data[: len(place)]), self.data[len(place) :]
        place[: len(came)].copy_(torch.frombuffer(came, dtype=torch.uint8))
        return self

    def wait(self, _: timedelta) -> bool:
        return True


def sent_over_group() -> list[bytes]:
    group = OverGroup()
    PGTransport[object](cast(ProcessGroup, group), LIMIT, "cpu").send_checkpoint([1], 5, STATE)
    return [group.data]


def received_over_group(data: bytes) -> object:
    transport = PGTransport[object](cast(ProcessGroup, OverGroup(data)), LIMIT, "cpu")
    own = {**STATE, "w": torch.zeros(6)}
    transport.check_state(own)
    return transport.recv_checkpoint_from([Source(0, "")], 5, LIMIT, Destination(own))


class Impatient(CheckpointServer):
    """A source that lets nobody wait for a later step."""

    def wait_for_offer(self, step: int, wait_s: float, key: str = "") -> Offer | None:
        return super().wait_for_offer(step, 0.0, key)


@functools.cache
def source() -> Impatient:
    server = Impatient(Address(LOOPBACK, 0), ServerLimits())
    server.offer(7, Snapshot(STATE).fill())
    return server


def ask_source(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[:IN_SOCKET_MAX])
        theirs.shutdown(socket.SHUT_WR)
        connection = source()._connections[ours] = _Connection(source(), ours)
        connection._run()


class OneAnswer:
    """A fetch whose source has answered once, and is gone."""

    step = 7

    def request(self, _: _Source, what: str) -> bytes:
        return f"GET /checkpoint/7/{what} HTTP/1.1\r\n\r\n".encode()

    def asks_again(self, *_: object) -> None:
        raise CheckpointError("it would ask again")

    connect = asks_again


def hear_source(data: bytes) -> int:
    line = _Line(cast(Any, OneAnswer()), _Source(0, Address(LOOPBACK, 1), is_first=True))
    ours, theirs = socket.socketpair()
    with theirs, ours:
        theirs.sendall(data[:IN_SOCKET_MAX])
        theirs.shutdown(socket.SHUT_WR)
        line.socket = ours
        line.ask("header")
        while line.readinto(memoryview(bytearray(4096))):
            pass
    return 0 if line._answer is None else line._answer.length or 0


ANSWERS = [
    b"HTTP/1.1 200 \r\nContent-Length: 9\r\nCheckpoint-Step: 7\r\nCheckpoint-Id: 0a\r\n\r\n123456789",
    b"HTTP/1.1 200 x\r\nContent-Length: 0\r\nCheckpoint-Step: 7\r\n\r\n",
]

# -- plain data, queues

MESSAGE, MESSAGE_LEAVES = dissect(
    {
        "plain": [1, 2**70, 2.5, None, True, "text", b"bytes", ("tuple", {1: [], (1, "x"): {}})],
        "tensor": torch.ones(3, 2),
        "array": np.ones((2, 2), np.float32),
        "long": b"x" * 5000,
    }
)
SHORT, _ = dissect([1, 2**70, 2.5, "text", b"bytes", ("tuple", {1: [], (1, "x"): {}}), torch.ones(2)])
GEOMETRY = Geometry(4, 256)


def read_plain(structure: bytes) -> object:
    known = Structure(structure, MESSAGES)
    tensors = list(map(as_tensor, MESSAGE_LEAVES))
    return known.value(TensorLeaves(tensors)) if len(known.specs) <= len(tensors) else None


def ring() -> bytes:
    """The words of a ring, and its slots with two messages."""
    memory = bytearray(GEOMETRY.memory_bytes)
    writer = RingWriter(memoryview(memory), GEOMETRY)
    for value, leaves in ((torch.ones(30), [b"\x00" * 120]), ({"a": [1]}, [])):
        parts = [dissect(value)[0], *leaves]
        nbytes = sum(map(len, parts))
        writer.write(INLINE, parts, nbytes, GEOMETRY.slots_for(nbytes))
    return bytes(memory[:24] + memory[PAGE_BYTES:])


def read_ring(data: bytes) -> object:
    memory = bytearray(GEOMETRY.memory_bytes)
    slots = len(memory) - PAGE_BYTES
    memory[:24] = data[:24].ljust(24, b"\x00")
    memory[PAGE_BYTES:] = data[24:].ljust(slots, b"\x00")[:slots]
    reader = RingReader(memoryview(memory), GEOMETRY)
    place, nbytes, structure_bytes, *_ = reader.next_record()
    structure = reader.read(place, structure_bytes)
    return assembled(structure, nbytes - structure_bytes, reading_ring(reader, place + structure_bytes))


HANDLE = QueueHandle("name", bytes(32), *GEOMETRY, (0, 1), 1, "tcp://127.0.0.1:1", b"k" * 40)


def said_by_readers(data: bytes) -> None:
    """The writer of a queue hears the readers a, and b, which has not joined."""
    writer = RemoteReaders.__new__(RemoteReaders)
    vars(writer).update(n_readers=2, lost=[], left=[], _token=bytes(32), _taken={0}, _joined=1, _sent=5)
    vars(writer).update(_is_closing=False)
    vars(writer).update(_readers={b"a": remote._Reader(1, 2)}, _router=SimpleNamespace(send_multipart=len_of))
    for number, body in enumerate(parts_of(data)):
        writer._hear(b"ab"[number % 2 :][:1], body)


def len_of(message: Sequence[bytes], *_: object, **__: object) -> int:
    return len(message)


def said_by_writer(data: bytes) -> object:
    reader = RemoteReader.__new__(RemoteReader)
    vars(reader).update(_number=5, _rank=1, _has_left=False, is_closing=False, _tell=len)
    return reader._read([zmq.Frame(part) for part in parts_of(data)])


READERS_SAY = PART.join(
    [
        remote.NUMBERED.pack(remote.TAG_READ, 3),
        remote.HELLO.pack(remote.TAG_HELLO, bytes(32), 4),
        remote.TAG_LEAVE,
        remote.NUMBERED.pack(remote.TAG_READ, 5),
    ]
)
WRITER_SAYS = PART.join([remote.NUMBERED.pack(remote.TAG_DATA, 5), SHORT, torch.ones(2).numpy().tobytes()])

# -- the store, and the check of collectives

ASKED = ("get", "multi_get", "add", "check", "wait", "delete_key", "compare_set")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "multi_get": (["a", "b"],),
    "check": (["a"],),
    "wait": (["a"],),
    "add": ("a", 1),
    "compare_set": ("a", "b", "c"),
}


def answer_of_store(data: bytes) -> object:
    """A store's answer to the question that the first byte says."""
    ours, theirs = socket.socketpair()
    store = AbortableStore(StoreAddress(Address(LOOPBACK, 1), "p"), LIMIT)
    store._socket = ours
    with theirs:
        theirs.sendall(data[1:IN_SOCKET_MAX])
        theirs.shutdown(socket.SHUT_WR)
        question = ASKED[data[0] % len(ASKED) if data else 0]
        try:
            return getattr(store, question)(*ARGUMENTS.get(question, ("a",)))
        finally:
            store.close()


def word(text: bytes) -> bytes:
    return struct.pack("=Q", len(text)) + text


def asked_of_store(*keys: bytes) -> bytes:
    """What clients ask of a store: each request, with these keys."""
    said = [b"\0" + struct.pack("=I", VALIDATION_MAGIC), b"\x0d" + struct.pack("=I", 7)]
    for key in keys:
        said += [b"\1" + word(key) + word(b"value"), b"\4" + word(key + b"n") + struct.pack("=q", -3)]
        said += [b"\2" + word(key) + word(b"value") + word(b"another"), b"\3" + word(key)]
        said += [b"\x09" + word(key) + word(b"more"), b"\x08" + word(key)]
    many = struct.pack("=Q", len(keys)) + b"".join(map(word, keys))
    said += [bytes([query]) + many for query in (5, 10, 6)]
    said.append(b"\x0b" + struct.pack("=Q", len(keys)) + b"".join(word(key) + word(b"v") for key in keys))
    return b"".join([*said, b"\x0c"])


def ask_store(data: bytes) -> None:
    """Ask a store of quorums, one of which has a secret, for what a client says; another client waits."""
    store, client, waits, reader = (
        KeyValueStore(awaits_quorums=True),
        StoreClient(),
        StoreClient(),
        RequestReader(),
    )
    store.announce(7, QuorumSecret())
    store.announce(8, QUORUM_SECRET)
    reader.bytes_max = MESSAGE_BYTES_MAX
    assert store.admits(waits, OPEN_KEYS[0])
    store.perform(waits, Request(Query.WAIT, OPEN_KEYS))
    for at in range(0, len(data), 100):
        reader.feed(data[at : at + 100])
        while (request := reader.next()) is not None:
            if not all(store.admits(client, key) for key in request.keys):
                raise StoreRequestError("not admitted")
            store.perform(client, request)
            store.take_answers()


OPEN_KEYS = (b"/torchft/7/0/a", b"/torchft/7/0/b")
QUORUM_SECRET = QuorumSecret(bytes(32))
SECRET_KEY = f"/torchft/8/0/secret={QUORUM_SECRET.meeting_key}/a".encode()
STORE_ASKED = asked_of_store(*OPEN_KEYS), asked_of_store(SECRET_KEY)


CALL = Statement("allreduce", "same", ("float32[4]",) * 3, ("float32[4]",), 0, "SUM", None, None)
REQUEST = checking.Request(checking.CALL, 7, 3, 1.5, statements.encode(CALL)).encode()
PROBLEMS = (Disagreement("shape", {0: "a", 1: "b"}), Missing((1,), {0: ("a()",)}, True, 1.5))
RECORD = Record("spent", "an error", "127.0.0.1:1", "host", 3)
ADDRESSES = [
    b"http://host-1.example:29510/x",
    b"127.0.0.1:1/a",
    b"[::1]:65535/b/c",
    b"host:29500/torchft/0a1b",
]
MEETING_HANDLE = Handle("0a1b", "127.0.0.1:29500/torchft/x", 3)


def take_requests(data: bytes) -> None:
    buffer = bytearray(data)
    while (size := len(buffer)) and checking.take_request(buffer) is not None:
        assert len(buffer) < size


def read_record(data: bytes) -> object:
    return statements.decode(statements.unpack(data).call)


def address_of_store(data: bytes) -> object:
    return parse_store_address(text_of(data))


# -- the child of a Baby group

WORDS = struct.pack("<qqB", 3, 7, 2) + encode([b"a call" * 20, ["device", 7, None, {"a": 1.5}]])
BABY_CALL = encode_call("allreduce", [[1.5, None], 3], {"flag": True}, lambda _: b"")


def on_channel(data: bytes) -> object:
    ours, theirs = Channel.pair()
    channel = Channel(ours)
    with theirs:
        theirs.send(data[:IN_SOCKET_MAX] or b"\0")
        try:
            return channel.receive()
        finally:
            channel.close()


def answered(data: bytes) -> None:
    """Each message of the child settles the request, or ends the child; the next one settles it at last."""
    ours, theirs = Channel.pair()
    channel, child = Channel(ours), Channel(theirs)
    ended: list[str] = []

    def end() -> None:
        ended.append("ended")
        child.close()

    requests = Requests(channel, lambda: None, end, lambda: None)
    request = requests.add(patience_s=60.0)
    theirs.send(data[:IN_SOCKET_MAX] or b"\0")
    child.send((request.number, 0))
    assert requests.wait(request, float("inf"))
    assert (request.outcome is None) == bool(ended)
    requests.end()
    child.close()
    channel.close()


ANSWERS_OF_CHILD = [struct.pack("<qqB", 1, kind, 0) for kind in (0, 1)]

# -- the protocol

MEMBER = pb.QuorumMember(
    replica_id="a:1",
    address="http://h:1",
    store_address="h:2",
    step=3,
    world_size=2,
    may_stand=True,
    data="{}",
)
REGISTER = pb.Register(
    replica_id="a:1", address="http://h:1", store_address="h:2", last_quorum_replica_ids=["a", "b"]
)
FORM = pb.StateForm(digest=b"d" * 16, paths=["w"], descriptions=["float32[4]"])
VACANCY = pb.Vacancy(
    group_id="g", group_rank=1, world_size=2, store_address="127.0.0.1:1", host="h", attempt=3
)
TO_LIGHTHOUSE = [
    pb.SessionRequest(join=MEMBER),
    pb.SessionRequest(broken_links=pb.BrokenLinks(unreachable_replica_ids=["b", "c"])),
    pb.SessionRequest(holds=pb.Holds(quorum_id=7, step=3)),
    pb.SessionRequest(identity=pb.Identity(job_id="j", first_quorum_id=7, forms=[FORM, pb.StateForm()])),
    pb.SessionRequest(progress=pb.Progress(step=4, waits_for="allreduce", waiting_permille=3)),
    pb.SessionRequest(leave=pb.Leave(reason="done", step=4)),
]
CALLS: list[tuple[str, list[Any]]] = [
    ("Session", [pb.SessionRequest(register=REGISTER), *TO_LIGHTHOUSE]),
    ("Quorum", [pb.LighthouseQuorumRequest(requester=MEMBER)]),
    ("Heartbeat", [pb.LighthouseHeartbeatRequest(replica_id="a:1")]),
    (
        "OfferSpare",
        [
            pb.SpareRequest(register=pb.SpareRegister(spare_id="s", host="h")),
            pb.SpareRequest(declined=pb.Declined(reason="it is taken")),
            pb.SpareRequest(taken=pb.Taken()),
        ],
    ),
    ("FillVacancy", [pb.FillVacancyRequest(vacancy=VACANCY, waits=True)]),
]
CALL_SAMPLES = [
    bytes([number]) + PART.join(message.SerializeToString() for message in messages)
    for number, (_, messages) in enumerate(CALLS)
]


@functools.cache
def lighthouse() -> coordination.LighthouseServer:
    return coordination.LighthouseServer(replicas_max=64)


class RefusedCallError(Exception):
    """The lighthouse ends a call with a status."""


class Call:
    """The server's end of a call, through which messages come that are there already."""

    def __init__(self, messages: Sequence[object]) -> None:
        self._messages = list(messages)

    def peer(self) -> str:
        return "ipv4:10.0.0.7:40000"

    async def read(self) -> object:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF  # type: ignore[attr-defined]

    async def write(self, message: object) -> None:
        assert type(message) is bytes

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise RefusedCallError(f"{code.name}: {text}")


def call_lighthouse(data: bytes) -> None:
    method, _ = CALLS[data[0] % len(CALLS) if data else 0]
    server = lighthouse()

    async def serve() -> None:
        handlers: Any = lighthouse_server._handlers(server._lighthouse)
        details: Any = SimpleNamespace(method=f"/torchft.LighthouseService/{method}", invocation_metadata=())
        handler = handlers.service(details)
        messages = [handler.request_deserializer(part) for part in parts_of(data[1:])]
        if handler.request_streaming:
            await handler.stream_stream((), Call(messages))
            return
        answering = asyncio.ensure_future(handler.unary_unary(messages[0], Call([])))
        for _ in range(3):  # what is to be awaited is of no interest
            await asyncio.sleep(0)
        answering.cancel()
        await asyncio.wait([answering])
        if not answering.cancelled():
            answering.result()

    server._loop.run(serve())


def said_by_rank(data: bytes) -> None:
    """Rank 0 of a replica group hears rank 1, while all that the group said to it can still be repeated."""
    group, conversation = ReplicaGroup("me", 2), Conversation[pb.RankSessionResponse]()
    group.rank_joined(RankJoin(0, 1, "http://127.0.0.1:1"))
    for part in parts_of(data):
        request = codec.reader(pb.RankSessionRequest)(part)
        if request is None or not conversation.arrived(request.received):
            return
        match request.WhichOneof("request"):
            case "join":
                group.rank_joined(rank_join(request.join, 1))
            case "vote":
                group.rank_voted(1, verdict_from_wire(request.vote))
            case "holds":
                group.rank_holds(1, request.holds.quorum_id, request.holds.step)
            case "leave":
                group.rank_left(1, request.leave.reason)


RANK_SAYS = PART.join(
    message.SerializeToString()
    for message in (
        pb.RankSessionRequest(
            join=pb.ManagerQuorumRequest(group_rank=1, step=1, checkpoint_metadata="x", form=FORM)
        ),
        pb.RankSessionRequest(vote=pb.ShouldCommitRequest(group_rank=1, step=1, should_commit=True)),
        pb.RankSessionRequest(holds=pb.Holds(quorum_id=7, step=2)),
        pb.RankSessionRequest(leave=pb.Leave(reason="done", step=2)),
    )
)


def said_by_lighthouse(data: bytes) -> None:
    """A ManagerServer whose rank 0 has joined hears the lighthouse."""
    server, to_lighthouse = ManagerServer.__new__(ManagerServer), LighthouseLink.__new__(LighthouseLink)
    vars(server).update(
        group=ReplicaGroup("me", 1),
        _perform=answer_rank,
        _on_quorum=lambda quorum_id, secret: None,
        _hosts={"b": [(8, "h:3")]},
    )
    to_lighthouse._listener = server
    server.group.rank_joined(RankJoin(0, 1, "http://127.0.0.1:1"))
    for part in parts_of(data):
        response = codec.reader(pb.SessionResponse)(part)
        if response is None:
            return
        to_lighthouse._dispatch(response)
        assert all(isinstance(counterpart(of, 9, "h:1"), str) for of in server._hosts.values())


def answer_rank(effects: Sequence[object]) -> None:
    for effect in effects:
        if isinstance(effect, RankQuorum):
            result = quorum_result_to_wire(effect.result)
            assert quorum_result_from_wire(result) == effect.result


LIGHTHOUSE_SAYS = PART.join(
    message.SerializeToString()
    for message in (
        pb.SessionResponse(
            config_changed=pb.JobConfig(min_replicas=1, join_timeout_ms=5, standing_lease_ms=9)
        ),
        pb.SessionResponse(
            quorum=pb.Quorum(
                quorum_id=7,
                stands=True,
                participants=[
                    pb.QuorumMember(
                        replica_id="me",
                        step=1,
                        rank_addresses=[pb.RankAddress(group_rank=8, address="h:4")],
                    ),
                    MEMBER,
                ],
            )
        ),
        pb.SessionResponse(hold=pb.HoldQuorum(quorum_id=7)),
        pb.SessionResponse(release=pb.ReleaseQuorum(quorum_id=7, ask_at=3)),
        pb.SessionResponse(member_lost=pb.MemberLost(quorum_id=7, replica_id="a:1", reason="gone")),
        pb.SessionResponse(left_out=pb.LeftOut(quorum_id=8, replica_id="me", unreachable_replica_ids=["b"])),
    )
)


class Hears:
    """A rank that does nothing about what it is told."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def said_to_rank(data: bytes) -> None:
    rank = SessionLink.__new__(SessionLink)
    vars(rank).update(_listener=Hears(), _closing=False, _group_rank=1, _begin=lambda order: order.probe)
    for part in parts_of(data):
        if (response := codec.reader(pb.RankSessionResponse)(part)) is None:
            return
        rank._dispatch(response)


RANK_HEARS = PART.join(
    message.SerializeToString()
    for message in (
        pb.RankSessionResponse(
            quorum=pb.ManagerQuorumResponse(
                quorum_id=7,
                replica_rank=1,
                replica_ids=["a", "b"],
                recover_dst_replica_ranks=[0],
                max_replica_rank=1,
            )
        ),
        pb.RankSessionResponse(vote=pb.ShouldCommitResponse(should_commit=True)),
        pb.RankSessionResponse(release=pb.ReleaseQuorum(quorum_id=7, ask_at=3)),
        pb.RankSessionResponse(
            probe=pb.ProbePeers(number=1, replica_ids=["b", "c"], addresses=["h:3", "h:5"], must_listen=["b"])
        ),
        pb.RankSessionResponse(group_lost=pb.GroupLost(reason="gone")),
    )
)


def said_to_spare(data: bytes) -> object:
    response = codec.reader(pb.SpareResponse)(data)
    return response and _place_of(response.vacancy)


def data_of_member(data: bytes) -> object:
    return coordination._data_of(pb.QuorumMember(replica_id="a", data=data.decode(errors="replace")))


# -- the page, tokens, certificates, files


@functools.cache
def of_page() -> uvicorn.Config:
    page = Page(lighthouse()._lighthouse)
    config = uvicorn.Config(page, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    return config


def ask_page(data: bytes) -> None:
    """A request through uvicorn's own parser."""

    async def serve() -> bytes:
        state, transport = ServerState(), Transport()
        protocol = H11Protocol(of_page(), state, {}, asyncio.get_running_loop())
        protocol.connection_made(transport)
        protocol.data_received(data or b"\r")  # as a loop gives no empty bytes
        while state.tasks:
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return bytes(transport.written)

    of_page()
    assert b"HTTP/1.1 500" not in lighthouse()._loop.run(serve())


class Transport(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self._closes = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closes

    def close(self) -> None:
        self._closes = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def page_request(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost:29511", *headers, "", ""]).encode()


REQUESTS = [
    page_request("GET /status", "Accept-Encoding: gzip", 'If-None-Match: "0a"', "Authorization: Bearer abc"),
    page_request("POST /replica/nobody%3A1/kill", "X-Torchft-Kill: yes", "Content-Length: 0"),
    page_request("GET /metrics", "Authorization: Basic YTpi") + page_request("GET /"),
]


@functools.cache
def statuses() -> list[bytes]:
    """Two documents, one with a member that heals."""
    heal = {"source": "b:2", "from_step": 1, "to_step": 9}
    row: dict[str, object]
    row = {"id": "a:1", "state": "member", "trouble": "", "address": "http://h:1", "waits_for": "allreduce"}
    row |= {"step": 3, "steps_per_s": 2.5, "waiting_permille": 30, "heal": None}
    job = {
        "state": "stands",
        "members": 2,
        "gone": 0,
        "step": 3,
        "steps_per_s": 2.5,
        "why_no_quorum": "",
        "straggler": "a:1",
    }
    recoveries = [{"lost": ["c:3"], "quorum_s": 0.5}]
    whole = {"schema": 1, "lighthouse": {"address": "h:1"}, "job": job, "recoveries": recoveries}
    first = {**whole, "replicas": [row, {**row, "id": "b", "step": None, "heal": heal}]}
    second = {
        **whole,
        "recoveries": [],
        "replicas": [],
        "job": {**job, "state": "none", "why_no_quorum": "nobody"},
    }
    return [json.dumps(document).encode() for document in (first, second)]


TOKENS = make_texts()
TRUST = parse_trust(TOKENS[Role.OPERATE], "a test")


def read_tokens(path: Path) -> object:
    return parse_trust(path.read_bytes().decode(errors="replace"), "a file")


def role_of_header(data: bytes) -> object:
    return TRUST.role_of_header(data.decode("latin-1"))


@functools.cache
def certificates() -> dict[str, str]:
    return keys.certify([], days=1)


def certificate(name: str) -> list[bytes]:
    return [certificates()[name].encode()]


def read_certificates(path: Path) -> object:
    for name, text in certificates().items():
        if name != path.name and not (path.parent / name).exists():
            (path.parent / name).write_text(text)
    return read_identity(path.parent)


# -- what the job's starter says, and what is logged


def text_of(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def read_address(data: bytes) -> None:
    address = parse_address(text_of(data))
    assert parse_address(str(address)) == address == parse_address(address.url)
    assert 0 <= address.port <= 65535
    take_host(address.host)


def read_host(data: bytes) -> None:
    parse_host(text_of(data))
    take_host(text_of(data))


def take_host(host: str) -> None:
    """Check that the resolver takes a host, without asking anybody."""
    with contextlib.suppress(socket.gaierror):
        socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)


def read_environment(data: bytes) -> None:
    """Lines of NAME=VALUE are the variables of a trainer."""
    variables = dict(line.split("=", 1) for line in text_of(data).split("\n") if "=" in line)
    config = resolve(ManagerArguments(), {"TORCHFT_LIGHTHOUSE": "127.0.0.1:29510", **variables})
    timedelta(seconds=config.timeout_s + config.quorum_timeout_s + config.connect_timeout_s)
    assert 0 <= config.port <= 65535
    assert 0 <= config.group_rank < config.group_world_size


ENVIRONMENT = b"""RANK=1
WORLD_SIZE=2
MASTER_ADDR=127.0.0.1
MASTER_PORT=29500
TORCHFT_TIMEOUT_SEC=2.5
TORCHFT_QUORUM_TIMEOUT_SEC=30
TORCHFT_CONNECT_TIMEOUT_SEC=1e1
TORCHFT_MANAGER_PORT=29512
TORCHFT_QUORUM_RETRIES=3
TORCHELASTIC_RUN_ID=run"""
BAD_VARIABLES = (
    b"TORCHFT_TIMEOUT_SEC=1e308",  # an OverflowError, later, of a timedelta
    b"TORCHFT_TIMEOUT_SEC=nan",
    b"TORCHFT_MANAGER_PORT=99999",  # an OverflowError, later, of a socket
    b"MASTER_ADDR=a..b\nMASTER_PORT=1",
    b"MASTER_ADDR=a\nMASTER_PORT=-1",
    b"RANK=" + b"1" * 5000,
)


def read_flags(data: bytes) -> None:
    """Lines are the values of these flags of the lighthouse."""
    values = zip(("--bind", "--min_replicas", "--replicas_max"), text_of(data).split("\n"), strict=False)
    config = parse_flags([f"{flag}={value}" for flag, value in values]).config
    assert config.replicas_max * config.member_bytes_max <= MESSAGE_BYTES_ON_THE_WIRE_MAX
    assert config.member_bytes_max >= 512


def log_it(data: bytes) -> None:
    """A replica's id and a reason are one line that moves no cursor."""
    replica_id, _, reason = text_of(data).partition("|")
    for kind in ("leave", "shutdown", "error", "loss"):
        event = Event(kind, "lighthouse", 0.0, replica_id, fields={"reason": reason, "member": replica_id})
        assert event.to_text().isprintable()
        assert "\n" not in event.to_json()
        assert json.loads(event.to_json())["reason"] == reason


BAD_HOSTS = ("a..b", "a" * 64, "[a..b]", "a\0b", "h\u00e9", "x" * 5000)  # to Python's resolver, for instance
EVENTS = b"\n".join(
    Event(kind, "lighthouse", 0.0, "a:1", fields={"step": 3}).to_json().encode() for kind in ("join", "loss")
)
NESTED = b"\xa3\x06" * 100_000  # the start of a group, in a group, in a group, ...

PARSERS = [
    Parser(
        "a state",
        [STREAM],
        load_state,
        (CheckpointFormatError,),
        [
            *map(forged, FORGED),
            b"TFTSTATE\x02\x00\x00\x00\xff\xff\xff\x03\x00\x00\x00\x00",  # announces 64 MB and sends none
        ],
        [
            forged(HEAD + struct.pack("<BI", LIST, 200_000) + b"\x00" * 200_000),
            forged(HEAD + struct.pack("<BI", LONG, 2_000_000) + b"\x7f" * 2_000_000),
            forged(of_leaves(20_000)),
        ],
    ),
    Parser(
        "the description of a state, with the checksums of a liar",
        [STRUCTURE],
        lambda data: load_state(forged(data, bytes(192))),
        (CheckpointFormatError,),
    ),
    Parser(
        "the same for a rank with a small state",
        [read_header(io.BytesIO(dump_state({"w": torch.zeros(16)})))],
        heal,
        (CheckpointFormatError,),
        [
            HEAD + struct.pack("<BI", LIST, 200_000) + struct.pack("<BI", ORDERED_DICT, 0) * 200_000,
            of_leaves(1_000_000),
        ],
        [of_leaves(16_000)],
    ),
    Parser("a state over a process group", sent_over_group, received_over_group, (CheckpointError,)),
    Parser(
        "a request for a state",
        [
            b"GET /checkpoint/7/header?wait_ms=9 HTTP/1.1\r\nHost: h:1\r\nAuthorization: Bearer x\r\n\r\n",
            b"GET /checkpoint/7/payload?from=0&to=9 HTTP/1.1\r\nHost: h:1\r\nCheckpoint-Fetch: 0a 9\r\n\r\n",
            b"GET /checkpoint/7/done HTTP/1.1\r\nHost: h:1\r\nCheckpoint-Fetch: 0a 0\r\n\r\n",
        ],
        ask_source,
    ),
    Parser("a source's answer", ANSWERS, hear_source, (CheckpointError, OSError)),
    Parser(
        "plain data",
        [MESSAGE],
        read_plain,
        (PlainDataError,),
        [
            HEAD + struct.pack("<BI", LIST, 1) * 200_000,  # lists in lists
            HEAD + struct.pack("<BI", LIST, 4_000_000) + b"\x00" * 4_000_000,
        ],
        [struct.pack("<II", MAGIC, 65_536) + b"\x00" * 3 * 65_536 + b"\x00"],
    ),
    Parser("a ring of a queue", [ring()], read_ring, (QueueCorruptError, PlainDataError)),
    Parser(
        "a queue's handle",
        [encode([HANDLE.to_plain()])],
        lambda data: QueueHandle.from_plain(*decode(data)),
        (ValueError,),
    ),
    Parser("what remote readers of a queue say", [READERS_SAY], said_by_readers),
    Parser("what a queue's writer says", [WRITER_SAYS], said_by_writer, (PlainDataError, QueueError)),
    Parser(
        "a store's answer",
        [
            b"\0\0" + word(b"abc"),
            b"\1" + word(b"a") + word(b"bc"),
            b"\2" + bytes(8),
            b"\3\0",
            b"\4\0",
            b"\5" + struct.pack("=q", 1),
            b"\6" + word(b"c"),
        ],
        answer_of_store,
        (ProcessGroupError, TimeoutError),
        [
            b"\0\0" + struct.pack("=Q", 2**63),
            b"\1" + struct.pack("=Q", 2**64 - 1),
            b"\2" + b"\xff" * 7,
        ],
    ),
    Parser(
        "what a member wrote into the store",
        [encode([{"a": b"1", "b/c": b"", "0": b"x" * 30}])],
        group_store._values_in,
        (ProcessGroupError,),
        [struct.pack("=I", 1) + b"\xff" + struct.pack("=I", 0), struct.pack("=I", 2**32 - 1)],
    ),
    Parser(
        "the address of a store",
        ADDRESSES,
        address_of_store,
        (AddressError,),
        [b"a..b:1", b"a" * 64 + b":1", b"a\0b:1", b"\xff"],
    ),
    Parser(
        "requests to a store",
        list(STORE_ASKED),
        ask_store,
        (StoreRequestError,),
        [
            b"\1" + struct.pack("=Q", 2**63),
            b"\x0a" + struct.pack("=Q", 2**32) + bytes(100),
        ],
        [b"\x0b" + bytes(8)],
    ),
    Parser(
        "the handle of a group",
        [json.dumps(MEETING_HANDLE._asdict()).encode()],
        lambda data: parse_handle(text_of(data)),
        (ProcessGroupError, AddressError),
        [DEEP, b'{"id": "a", "store": 5}'],
    ),
    Parser(
        "what a rank says where its group meets",
        [RECORD.text().encode()],
        Record.read,
        (StoreLostError,),
        [DEEP, b"{}", b"\xff", b'{"ending":"x","reason":"","address":"","host":"","since":0}'],
    ),
    Parser("which ranks are missing", [b"[]", b"[1, 20]"], _ranks_in, (ValueError,), [DEEP, b"[null]"]),
    Parser(
        "where the referee is",
        [json.dumps(["127.0.0.1", 29500, "0a" * checking.TOKEN_BYTES, True]).encode()],
        checking._read_referee,
        (ProcessGroupError,),
        [
            json.dumps(["127.0.0.1", 70000, "00" * 16, True]).encode(),  # an OverflowError of the socket
            json.dumps(["127.0.0.1", -1, "00" * 16, True]).encode(),
            json.dumps(["a..b", 1, "00" * 16, True]).encode(),
            json.dumps(["127.0.0.1", 1, "xyz", True]).encode(),
            DEEP,
            b"\xff",
        ],
    ),
    Parser(
        "requests to the referee",
        [REQUEST, REQUEST + checking.Request(checking.PASSED, 8, 4).encode()],
        take_requests,
        (ValueError,),
        [
            checking.REQUEST.pack(kind, 0, 1, timeout_s, length)
            for kind, timeout_s, length in (
                (9, 0.0, 0),
                *((checking.CALL, timeout_s, 0) for timeout_s in (math.nan, math.inf, -1.0)),
                *((checking.CALL, 1.0, length) for length in (checking.BODY_BYTES_MAX + 1, 2**32 - 1)),
            )
        ],
    ),
    Parser(
        "a statement",
        [statements.encode(CALL)],
        statements.decode,
        (ValueError,),
        [
            DEEP,  # a RecursionError, which ended the thread that reads
            *(b"", b"{", b"[]", b"\xff\xfe", b'["allreduce","same",[],[],null,null,null]'),
            *(
                json.dumps([name, "same", specs, [], root, None, None, None, [], None]).encode()
                for name, specs, root in (
                    (1, [], None),
                    ("allreduce", [], "0"),
                    ("allreduce", ["float32[4]"], None),
                    *(("allreduce", [["float32[4]", count]], None) for count in (10**12, 10**9, -1)),
                )
            ),
        ],
    ),
    Parser(
        "a statement in a record",
        [statements.pack_statement(CALL, 3, b"payload")],
        read_record,
        (ValueError,),
        [b"", bytes(statements.RECORD_BYTES), b"\xff" * statements.RECORD_BYTES],
    ),
    Parser(
        "a ruling",
        [checking.encode_problem(problem) for problem in PROBLEMS],
        checking.decode_problem,
        (ValueError,),
        [
            DEEP,
            b'["missing", [null], {}, true, 1.0]',  # a TypeError
            b'["missing", [1e999], {}, true, 1.0]',  # an OverflowError
            b'["missing", [0], {"0": 5}, true, 1.0]',
            b'["disagreement", "x", {"y": 1}]',
        ],
    ),
    Parser(
        "a message on a Baby group's channel",
        [WORDS],
        on_channel,
        (ForeignMessageError, ChannelClosedError),
        [
            b"\x00",  # announces a file, and brings none
            struct.pack("<qqB", 1, 2, 1)
            + struct.pack("<BI", TUPLE, 2**31 - 1),  # for which marshal made 16 GB
            struct.pack("<qqB", 1, 2, 1) + struct.pack("<BI", LIST, 1) * 10_000,
            struct.pack("<qqB", 1, 2, 254),
        ],
    ),
    Parser("a call of a Baby group", [BABY_CALL], decode_call, (ForeignMessageError,)),
    Parser(
        "an answer of a Baby group's child",
        [*ANSWERS_OF_CHILD, WORDS],
        answered,
        found=[struct.pack("<qqB", 1, 99, 0)],  # a ValueError of an enumeration, on whichever thread read it
    ),
    Parser("calls of the lighthouse", CALL_SAMPLES, call_lighthouse, (RefusedCallError,), [b"\0" + NESTED]),
    Parser("what a rank says to its group", [RANK_SAYS], said_by_rank, found=[b"\x0a\xff\xff\xff\xff\x7f"]),
    Parser("what the lighthouse says", [LIGHTHOUSE_SAYS], said_by_lighthouse),
    Parser("what a group says to its rank", [RANK_HEARS], said_to_rank, (MalformedMessageError,)),
    Parser(
        "where a spare is to go",
        [pb.SpareResponse(vacancy=VACANCY).SerializeToString()],
        said_to_spare,
        (GroupLostError,),
    ),
    Parser(
        "the data of a quorum's member",
        [b'{"a": [1, null]}', b""],
        data_of_member,
        (MalformedMessageError,),
        [DEEP, b"[]"],
    ),
    Parser("requests to the page", REQUESTS, ask_page),
    Parser(
        "a status document",
        statuses,
        lambda data: lines_of(status_in(data)),
        (ValueError,),
        [DEEP, b"{}", b"[]"],
    ),
    Parser(
        "an address",
        [b"http://host-1.example:29510", b"127.0.0.1:1", b"[::1]:65535"],
        read_address,
        (AddressError,),
        [*(f"{host}:1".encode() for host in BAD_HOSTS), "host:\u0663".encode()],
    ),
    Parser(
        "a host",
        [b"host-1.example", b"::1"],
        read_host,
        (AddressError,),
        [host.encode() for host in BAD_HOSTS],
    ),
    Parser(
        "the environment",
        [ENVIRONMENT],
        read_environment,
        (AddressError, ConfigError),
        BAD_VARIABLES,
        [b"TORCHFT_TIMEOUT_SEC=1_0"],
    ),
    Parser(
        "the lighthouse's flags",
        [b"127.0.0.1:0\n2\n8"],
        read_flags,
        (AddressError, ConfigError),
        [b"[::]:1\n1\n1000000", b"h:1\n" + b"9" * 5000],  # a quorum of so many would fit into no message
    ),
    Parser(
        "a line of a log",
        [b"a:1b4e|its connection ended"],
        log_it,
        found=[b"a\n[b] lost c|\x1b[2J\x1b[31m", "a\u202eb|\x00".encode(), "a\u2028b|\x85".encode()],
    ),
    Parser("a header with a token", [f"Bearer {TRUST.shown}".encode(), b"Basic YTpi"], role_of_header),
    Parser(
        "a file of tokens",
        [text.encode() for text in TOKENS.values()],
        read_tokens,
        (ConfigError,),
        file="operate",
    ),
    *(
        Parser(
            name,
            functools.partial(certificate, name),
            read_certificates,
            (ConfigError,),
            file=name,
            cost=8,  # OpenSSL reads it
        )
        for name in FILES
    ),
    Parser(
        "a file of events",
        [EVENTS + b"\n"],
        lambda path: list(read_events(path)),
        found=[DEEP + b"\n"],
        file="events.jsonl",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    if source.cache_info().currsize:
        source().close(wait=True)
    if lighthouse.cache_info().currsize:
        lighthouse().shutdown()


# torch says this of the first complex32 tensor of a process, wherever it is made.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name.replace(" ", "-") for parser in PARSERS])
def test_changed_messages_are_taken_or_refused(parser: Parser, tmp_path: Path) -> None:
    tally = assert_all_are_taken_or_refused(parser, MUTATIONS // len(PARSERS), tmp_path)
    print(f"\n{parser.name}: {tally}")
    assert (tally.ends.total() > tally.ends["taken"]) == bool(parser.refusals), "the changes are felt"
