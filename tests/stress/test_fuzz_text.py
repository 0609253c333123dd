"""Text that comes from the network or from whoever starts the job: addresses, names, settings, log lines."""

from __future__ import annotations

import json
import socket
from datetime import timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from lighthouse.address import parse_address, parse_host
from lighthouse.cli import _parse
from lighthouse.core.config import MESSAGE_BYTES_MAX
from lighthouse.errors import AddressError, ConfigError
from lighthouse.events import Event
from tests.stress.fuzzing import assert_parsed_or_refused, fuzz, names
from torchft_like.manager.config import ManagerArguments, resolve
from torchft_like.process_group.store import parse_store_address

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHFT_LIGHTHOUSE",
    "TORCHFT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_TIMEOUT_SEC",
    "TORCHFT_CONNECT_TIMEOUT_SEC",
    "TORCHFT_MANAGER_PORT",
    "TORCHFT_QUORUM_RETRIES",
    "TORCHELASTIC_RUN_ID",
)
settings_texts = st.one_of(
    names, st.integers().map(str), st.floats().map(str), st.sampled_from(["127.0.0.1", "[::1]:1", "1" * 5000])
)
addresses = st.one_of(
    names,
    st.from_regex(r"(http://)?[a-z0-9._\[\]:%-]{0,40}:[0-9]{0,6}/?", fullmatch=True),
    st.from_regex(r"\[[0-9a-f:.%]{0,30}\]:[0-9]{1,5}", fullmatch=True),
)


@fuzz
@given(addresses)
@example("a..b:1")  # Python's resolver raises a UnicodeError: it knows labels of 1 to 63 characters
@example("a" * 64 + ":1")
@example("[a..b]:1")
@example("a\0b:1")  # a ValueError
@example("h\u00e9:1")
@example("host:\u0663")
@example("x" * 5000 + ":1")
def test_an_address_is_one_that_the_resolver_takes_or_is_refused(text: str) -> None:
    address = assert_parsed_or_refused(parse_address, text, refusals=AddressError)
    if address is not None:
        assert parse_address(str(address)) == address == parse_address(address.url)
        assert 0 <= address.port <= 65535
        the_resolver_takes(address.host)
    store = assert_parsed_or_refused(parse_store_address, f"{text}/prefix", refusals=AddressError)
    assert store is None or str(store).endswith("prefix")


@fuzz
@given(names)
@example("a..b")
@example("::1")
def test_a_host_is_one_that_the_resolver_takes_or_is_refused(text: str) -> None:
    if assert_parsed_or_refused(parse_host, text, refusals=AddressError) is not None:
        the_resolver_takes(text)


def the_resolver_takes(host: str) -> None:
    """Without asking anybody."""
    try:
        socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return


@fuzz
@given(st.dictionaries(st.sampled_from(VARIABLES), settings_texts, max_size=6), st.booleans())
@example({"TORCHFT_TIMEOUT_SEC": "1e308"}, True)  # an OverflowError, later, of a timedelta
@example({"TORCHFT_TIMEOUT_SEC": "nan"}, True)
@example({"TORCHFT_TIMEOUT_SEC": "1_0"}, True)
@example({"TORCHFT_MANAGER_PORT": "99999"}, True)  # an OverflowError, later, of a socket
@example({"MASTER_ADDR": "a..b", "MASTER_PORT": "1"}, True)
@example({"MASTER_ADDR": "a", "MASTER_PORT": "-1"}, True)
@example({"RANK": "1" * 5000}, True)
def test_the_environment_is_a_configuration_or_is_refused(variables: dict[str, str], usual: bool) -> None:
    usually = {"TORCHFT_LIGHTHOUSE": "127.0.0.1:29510"} if usual else {}
    config = assert_parsed_or_refused(
        resolve, ManagerArguments(), {**usually, **variables}, refusals=(AddressError, ConfigError)
    )
    if config is not None:
        timedelta(seconds=config.timeout_s + config.quorum_timeout_s + config.connect_timeout_s)
        assert 0 <= config.port <= 65535
        assert 0 <= config.group_rank < config.group_world_size


@fuzz
@given(
    st.lists(
        st.tuples(st.sampled_from(["--bind", "--min_replicas", "--replicas_max", "--x"]), settings_texts),
        max_size=3,
    )
)
@example([("--replicas_max", "1000000")])  # a quorum of them would fit into no message
@example([("--min_replicas", "9" * 5000)])
def test_the_flags_are_a_configuration_or_are_refused(flags: list[tuple[str, str]]) -> None:
    given_flags = [f"{flag}={value}" for flag, value in flags]
    found = assert_parsed_or_refused(_parse, given_flags, refusals=(AddressError, ConfigError))
    if found is not None:
        config = found.config
        assert config.replicas_max * config.member_bytes_max <= MESSAGE_BYTES_MAX
        assert config.member_bytes_max >= 512


@fuzz
@given(names, names)
@example("a\n[b] lost c", "\x1b[2J\x1b[31m")
@example("a\u202eb", "\x00")
@example("a\u2028b", "\x85")
def test_a_log_line_is_one_line_that_moves_no_cursor(replica_id: str, reason: str) -> None:
    for kind in ("leave", "shutdown", "error", "loss"):
        event = Event(kind, "lighthouse", 0.0, replica_id, fields={"reason": reason, "member": replica_id})
        assert event.to_text().isprintable()
        assert "\n" not in event.to_json()
        assert json.loads(event.to_json())["reason"] == reason
