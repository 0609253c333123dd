"""The limits that docs/security.md tells are those of the code."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from lighthouse import admission, net, server, session
from lighthouse.core import claims, config, history, left_out
from lighthouse.listening import DESCRIPTORS_KEPT
from lighthouse.page import server as page
from tests.conftest import ROOT
from torchft_like import parameter_server, plain_data
from torchft_like.checkpointing import http_transport, state_stream
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.shards import STATE_SCHEMA
from torchft_like.core import conversation, store
from torchft_like.core.agreement import statements
from torchft_like.message_queue import remote
from torchft_like.process_group import checking, store_server
from torchft_like.process_group import store as store_client

TEXT = (ROOT / "docs" / "security.md").read_text()
TABLE = TEXT.partition("## Limits\n")[2].partition("## Ports")[0]
ROWS = [
    [cell.strip("| ") for cell in row.split(" | ")] for row in TABLE.splitlines() if row.startswith("| ")
][1:]

JOB, GRPC = config.LighthouseConfig(), net.ServerLimits()
SOURCE, STATE, FLOOR = http_transport.ServerLimits(), STATE_SCHEMA.limits, state_stream.GROWTH_FROM
REPLICAS_HIGHEST = get_type_hints(config.LighthouseConfig, include_extras=True)["replicas_max"].__metadata__[
    1
]
STALL_S = inspect.signature(HTTPTransport).parameters["stall_timeout"].default.total_seconds()


def size(nbytes: int) -> str:
    unit, name = next(one for one in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if nbytes >= one[0])
    return f"{nbytes / unit:.2g} {name}" if nbytes < 10 * unit else f"{nbytes // unit} {name}"


# What the cells of the limits say, by how their rows begin.
LIMITS: dict[str, list[str]] = {
    "connections to a lighthouse": [f"2 * replicas_max + {JOB.connections_max - 2 * JOB.replicas_max}"],
    "open calls": [f"{GRPC.streams} on one connection"],
    "connections to the page": [
        f"{page.CONNECTIONS_MAX}, each with a whole request in {page.SILENT_S:g} s",
        f"{page.HANDSHAKES_MAX} that shake hands, {page.SILENT_S:g} s each",
    ],
    "descriptors that are kept": [f"{DESCRIPTORS_KEPT}"],
    "sessions of a parameter": [f"{parameter_server.SESSIONS_MAX} ", f"in {parameter_server.REQUEST_S:g} s"],
    "what the page keeps": [
        f"{history.MOMENTS_MAX:,} moments of {history.TEXT_MAX} characters",
        f"{history.RECORDS_MAX} heals, {history.RECORDS_MAX} recoveries",
    ],
    "connections, calls": [f"{GRPC.connections:,} each, {GRPC.streams} calls"],
    "a connection that does not": [f"{GRPC.handshake_s:g} s"],
    "a connection without a call": [f"{GRPC.idle_s:g} s"],
    "a session that does not": [f"{session.REGISTER_S:g} s"],
    "a request to a lighthouse": [
        f"2 MiB and {config._REPORT_BYTES} bytes",
        f"{size(JOB.request_bytes_max)} by default",
    ],
    "a request to a ManagerServer": [size(GRPC.request_bytes)],
    "an answer": [size(config.MESSAGE_BYTES_MAX)],
    "one member of a quorum": [
        f"{size(config.MESSAGE_BYTES_MAX)} / replicas_max, {size(config._MEMBER_BYTES_MAX)} at the most",
        f"{size(JOB.member_bytes_max)} by default",
    ],
    "a group": ["refused"],
    "replicas": [f"{JOB.replicas_max:,}; up to {REPLICAS_HIGHEST:,}"],
    "a replica id": [f"{admission.TEXT_MAX:,} characters"],
    "a step": [f"0 to 10^{len(str(admission.STEP_MAX)) - 1}"],
    "quorums of an earlier start": [f"{claims.QUORUMS_MAX}, "],
    "links that": [f"{left_out.REPORTED_MAX}, {left_out.REPORTED_CHARACTERS_MAX:,} characters"],
    "a quorum id": [f"{admission.AHEAD_MS_MAX // (365 * 24 * 60 * 60 * 1000)} years"],
    "unary Quorum calls": [f"{server._CALLS_PER_REPLICA_MAX}"],
    "messages that wait": [f"{JOB.session_queue_max}; {conversation.KEPT_MAX} at a ManagerServer"],
    "connections to a checkpoint": [f"{SOURCE.connections}, "],
    "a request to it (checkpoint)": [
        f"{size(http_transport.HEAD_BYTES_MAX)}, {SOURCE.request_s:g} s",
        f"further one {STALL_S:g} s",
    ],
    "1 MiB of state": [f"{STALL_S:g} s"],
    "the state that a peer sends": [
        f"{state_stream.GROWTH_MAX} times",
        f"{size(FLOOR.structure_bytes)} of description, {FLOOR.leaves:,} tensors, {size(FLOOR.leaf_bytes)}",
    ],
    "the description of a state": [
        f"{size(STATE.structure_bytes)}, {STATE.leaves:,} tensors, {STATE.values:,} values",
        f"{plain_data.DEPTH_MAX} levels",
    ],
    "an object that": [
        f"{size(plain_data.STRUCTURE_BYTES_MAX)} beside its tensors, {plain_data.LEAVES_MAX:,} tensors",
        f"{plain_data.VALUES_MAX:,} values, {plain_data.DEPTH_MAX} levels",
    ],
    "keys of one dict": [f"{plain_data.EQUAL_HASHES_MAX}"],
    "connections to a store": [f"{store_server.CONNECTIONS_MAX:,}"],
    "connections to it": [f"{store_server.UNKNOWN_MAX}, {store_server.KEY_S:g} s"],
    "a request to it (store)": [
        f"{size(store.MESSAGE_BYTES_MAX)}, {store.REQUEST_KEYS_MAX:,} keys of {size(store.KEY_BYTES_MAX)}",
        f"{size(store.FIRST_BYTES_MAX)} before",
    ],
    "requests to it": [size(store_server.PARTIAL_BYTES_MAX)],
    "keys, values and waits": [
        f"{size(store.STORE_BYTES_MAX)}, a key counting {store.ENTRY_BYTES} bytes",
        f"{store.QUORUMS_MAX} quorums",
    ],
    "a value that": [size(store_client.VALUE_BYTES_MAX)],
    "connections of those": [f"{checking.CALLERS_MAX}"],
    "a message about": [f"{size(checking.BODY_BYTES_MAX)}, {statements.TENSORS_MAX:,} tensors"],
}


@pytest.mark.parametrize(("begins", "row"), list(zip(LIMITS, ROWS, strict=True)), ids=list(LIMITS))
def test_a_limit_is_that_of_the_code(begins: str, row: list[str]) -> None:
    what, limit, _ = row
    assert what.startswith(begins.partition(" (")[0])
    for text in LIMITS[begins]:
        assert text in limit.replace("`", "")


def test_the_rest_of_its_numbers_are_those_of_the_code() -> None:
    assert f"The lighthouse remembers its last {claims.QUORUMS_MAX} quorums" in TEXT
    assert f"makes {server._SECRET_BYTES} random bytes for each quorum id" in TEXT
    assert f"deleted after {store.QUORUMS_MAX - 1} more" in TEXT
    assert f"one without the key is closed after {remote.SILENCE_S:g} s" in TEXT
