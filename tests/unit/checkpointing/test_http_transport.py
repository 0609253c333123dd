"""HTTPTransport within one process: what is served, what is refused, what is waited for, what is left."""

from __future__ import annotations

import copy
import gc
import io
import queue
import re
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.listening import listen_tcp, why_unbindable
from tests.descriptors import left_open_since, open_descriptors
from tests.unit.checkpointing.clients import drain, request
from tests.unit.checkpointing.conftest import LIMIT, Make
from tests.waiting import wait_for
from torchft_like.checkpointing import HTTPTransport, http_fetch, http_server, state_stream
from torchft_like.checkpointing.http_fetch import Fetch, Stripe, _Line
from torchft_like.checkpointing.http_server import CheckpointServer, ServerLimits
from torchft_like.checkpointing.http_transport import LINES
from torchft_like.checkpointing.state_stream import (
    CHUNK_BYTES,
    PIECE_BYTES,
    Expectation,
    IncomingState,
    Snapshot,
    flatten_state,
)
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import BindError, CheckpointError, CheckpointFormatError, ShutdownError
from torchft_like.testing.relay import Filter, Relay, at, cut, flip_bit
from torchft_like.testing.training import RelayedTransport

SOON = timedelta(milliseconds=300)
State = dict[str, Any]


def make_state(size: int = 1000) -> State:
    return {"model": {"w": torch.randn(size), "b": torch.arange(7)}, "step": 3, "torchft": {1: None}}


def fetch(receiver: HTTPTransport[State], source: HTTPTransport[State], step: int = 5) -> State:
    return receiver.recv_checkpoint(0, source.metadata(), step, LIMIT)


def assert_same(left: State, right: State) -> None:
    assert torch.equal(left["model"]["w"], right["model"]["w"])
    assert torch.equal(left["model"]["b"], right["model"]["b"])
    assert (left["step"], left["torchft"]) == (right["step"], right["torchft"])


@contextmanager
def scripted_server(answer: bytes, then: Callable[[socket.socket], None] = lambda _: None) -> Iterator[str]:
    """Answers every request with the same bytes."""
    listener = listen_tcp(Address(LOOPBACK, 0))
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                if ended.is_set():
                    return
                peer.recv(65536)
                peer.sendall(answer)
                then(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


class TestTransfer:
    @pytest.mark.parametrize("num_chunks", [0, 1, 2, 5])
    def test_the_state_arrives_over_many_connections(self, transports: Make, num_chunks: int) -> None:
        source, receiver = transports(), transports(num_chunks=num_chunks)
        state = make_state(5_000_000)
        source.send_checkpoint([1], 5, state, LIMIT)
        assert_same(fetch(receiver, source), state)

    @pytest.mark.skipif(why_unbindable(Address("::1", 0)) is not None, reason="no IPv6 on this host")
    def test_a_state_comes_through_a_relay_on_a_host_with_ipv6_alone(self, transports: Make) -> None:
        source, receiver, state = RelayedTransport(lambda: bytes, LIMIT, "::1"), transports(), make_state()
        try:
            source.send_checkpoint([1], 5, state, LIMIT)
            assert_same(fetch(receiver, source), state)
        finally:
            source.shutdown()

    @pytest.mark.heal_is_clean
    def test_what_is_sent_is_the_state_at_the_time_of_sending(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        state = make_state()
        source.send_checkpoint([1], 5, state, LIMIT)
        before = state["model"]["w"].clone()
        state["model"]["w"].zero_()
        assert torch.equal(fetch(receiver, source)["model"]["w"], before)

    @pytest.mark.parametrize("then", ["withdrawn", "replaced"])
    def test_a_slow_fetch_goes_on_with_the_offer_with_which_it_began(
        self, transports: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, then: str
    ) -> None:
        """Its checksums included, for which it connects anew."""
        monkeypatch.setattr(http_fetch, "KEPT_OPEN_S", 0.01)
        begun, is_over, may_go_on = threading.Semaphore(0), threading.Event(), threading.Event()
        fill, read_sums = state_stream._fill, Fetch._read_sums

        def slowly(source: Any, window: memoryview) -> None:
            if len(window) == PIECE_BYTES:
                begun.release()
                assert may_go_on.wait(LIMIT.total_seconds())
            fill(source, window)

        def read_sums_then(of: Fetch, incoming: Any, line: _Line) -> bytes:
            assert is_over.wait(LIMIT.total_seconds())
            line.close()  # as one is that had no request for a while
            sums = read_sums(of, incoming, line)
            may_go_on.set()
            return sums

        monkeypatch.setattr(state_stream, "_fill", slowly)
        monkeypatch.setattr(Fetch, "_read_sums", read_sums_then)
        source, receiver, state = transports(), transports(), make_state(8_000_000)
        source.send_checkpoint([], 5, state, LIMIT)
        fetching = pool.submit(fetch, receiver, source)
        assert all(begun.acquire(timeout=LIMIT.total_seconds()) for _ in range(LINES))
        if then == "withdrawn":
            source.disallow_checkpoint()
        else:
            source.send_checkpoint([], 6, make_state(), LIMIT)
        is_over.set()
        assert_same(fetching.result(LIMIT.total_seconds()), state)

    def test_a_terminal_shows_how_much_has_come(
        self, transports: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        source, receiver, terminal = transports(), transports(), Terminal()
        monkeypatch.setattr(http_fetch, "SHOWN_S", 0.0)
        monkeypatch.setattr(sys, "stderr", terminal)
        source.send_checkpoint([], 5, make_state(8_000_000), LIMIT)
        fetch(receiver, source)
        shown = terminal.getvalue()
        assert shown.startswith("\rstate of step 5: ")
        assert re.search(r"\r[^\r]* 100% of 0.03 GB, [0-9.]+ GB/s\n$", shown)

    def test_what_was_kept_is_taken_however_long_that_takes(
        self, transports: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The source ends a connection that says nothing meanwhile."""
        source, receiver, state = transports(stall_timeout=SOON), transports(), make_state()
        source.send_checkpoint([], 5, state, LIMIT)
        take = IncomingState.take

        def slowly(incoming: IncomingState, kept: Any) -> None:
            wait_for(lambda: not source._served()[0]._connections)
            take(incoming, kept)

        monkeypatch.setattr(IncomingState, "take", slowly)
        destination = Destination[State](None, kept=flatten_state(state)[1])
        sources = [Source(0, source.metadata())]
        assert_same(receiver.recv_checkpoint_from(sources, 5, LIMIT, destination), state)
        assert not sum(destination.received.values())

    def test_a_state_is_looked_at_however_long_that_takes(self, transports: Make) -> None:
        """The source ends a connection that says nothing while a receiver looks at 100,000 tensors."""
        source, receiver, state = transports(stall_timeout=SOON), transports(), make_state()
        source.send_checkpoint([], 5, state, LIMIT)
        into = Destination[State](None, lambda _: wait_for(lambda: not source._served()[0]._connections))
        sources = [Source(0, source.metadata())]
        assert_same(receiver.recv_checkpoint_from(sources, 5, LIMIT, into), state)

    @pytest.mark.heal_is_clean
    @pytest.mark.parametrize("lands", [False, True])
    @pytest.mark.parametrize("what", ["the same", "a number differs", "laid out in another way"])
    def test_what_was_kept_of_a_state_does_not_come_again(
        self, transports: Make, pool: ThreadPoolExecutor, what: str, lands: bool
    ) -> None:
        source, receiver = transports(), transports()
        state = {**make_state(5_000_000), "blob": b"\1" * 5000}
        nbytes = 4 * 5_000_000 + 7 * 8 + 5000
        source.send_checkpoint([1], 5, state, LIMIT)
        fetched = pool.submit(source.wait_fetched, LIMIT)
        _, leaves = flatten_state(copy.deepcopy(state))
        if what == "a number differs":
            cast("torch.Tensor", leaves[0])[4_000_000] += 1
        elif what == "laid out in another way":
            leaves.reverse()
        own = {"model": {"w": torch.zeros(5_000_000)}} if lands else None
        destination = Destination[State](own, kept=leaves)
        arrived = receiver.recv_checkpoint_from([Source(0, source.metadata())], 5, LIMIT, destination)
        assert_same(arrived, state)
        assert arrived["blob"] == state["blob"]
        assert destination.is_written is lands
        kept, came = destination.kept_nbytes, sum(destination.received.values())
        if what == "the same":
            assert kept >= nbytes
            assert came == 0
        elif what == "a number differs":
            assert 0 < came <= 4 * CHUNK_BYTES
            assert kept + came >= nbytes
        else:
            assert kept == 0
        fetched.result(LIMIT.total_seconds())

    @pytest.mark.parametrize("threads", [0, 1])
    def test_with_too_few_threads_it_takes_fewer_connections_or_fails_at_once(
        self, transports: Make, monkeypatch: pytest.MonkeyPatch, threads: int
    ) -> None:
        source, receiver = transports(), transports(num_chunks=3)
        source.send_checkpoint([1], 5, make_state(10_000_000), LIMIT)
        start = threading.Thread.start

        def start_if_there_are_threads(thread: threading.Thread) -> None:
            if thread.name.startswith("torchft-checkpoint-fetch") and not thread.name.endswith(
                f"_{threads - 1}"
            ):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_there_are_threads)
        if threads:
            assert fetch(receiver, source)["step"] == 3
        else:
            with pytest.raises(CheckpointError, match="there is no thread to fetch it"):
                fetch(receiver, source)

    @pytest.mark.parametrize("parts", [1, 3])
    def test_a_state_larger_than_expected_is_refused_unfetched(self, transports: Make, parts: int) -> None:
        source, receiver = transports(), transports(num_chunks=parts, state_bytes_max=5000)
        source.send_checkpoint([1], 5, make_state(10_000), LIMIT)
        for _ in range(2):
            with pytest.raises(CheckpointFormatError, match=r"has 40056 bytes .* give .* state_bytes_max"):
                fetch(receiver, source)
            receiver.check_state(make_state())
        source.send_checkpoint([1], 5, make_state(1000), LIMIT)
        assert fetch(receiver, source)["step"] == 3

    def test_it_listens_and_advertises_where_it_is_told_to(self, transports: Make) -> None:
        source, receiver = transports(hostname="localhost", bind_host="127.0.0.1"), transports()
        assert source.metadata().startswith("http://localhost:")
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        assert fetch(receiver, source)["step"] == 3

    def test_it_serves_where_others_reach_it(self, transports: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchft_like.checkpointing.http_transport.own_host", lambda: "127.0.0.3")
        source, receiver = transports(hostname=None), transports()
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        assert parse_address(source.metadata()).host == "127.0.0.3"
        assert fetch(receiver, source)["step"] == 3

    def test_it_listens_once_it_knows_where(self, transports: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchft_like.checkpointing.http_transport.own_host", pytest.fail)
        source = transports(hostname=None)
        source.disallow_checkpoint()
        source.use_host("127.0.0.2")
        assert parse_address(source.metadata()).host == "127.0.0.2"

    def test_it_moves_where_its_manager_is(self, transports: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: LOOPBACK)
        source, receiver = transports(hostname=None), transports()
        before = parse_address(source.metadata())
        source.use_host("127.0.0.2")
        assert parse_address(source.metadata()).host == "127.0.0.2"
        assert source.address() == f"{source.metadata()}/checkpoint/"
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        assert fetch(receiver, source)["step"] == 3
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((before.host, before.port), 10)

    def test_a_hostname_that_was_given_stays(self, transports: Make) -> None:
        source = transports(hostname="localhost")
        before = source.metadata()
        source.use_host("127.0.0.2")
        assert source.metadata() == before

    def test_what_is_offered_can_be_offered_as_another_step(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        source.send_checkpoint([1], 4, make_state(), LIMIT)
        source.allow_checkpoint(5)
        assert fetch(receiver, source)["step"] == 3
        source.disallow_checkpoint()
        with pytest.raises(CheckpointError, match="no state to offer as step 6: call send_checkpoint"):
            source.allow_checkpoint(6)

    def test_an_address_of_another_host_is_refused(self) -> None:
        with pytest.raises(BindError, match=r"cannot listen on 192\.0\.2\.1"):
            HTTPTransport(LIMIT, hostname="192.0.2.1")

    @pytest.mark.parametrize("options", [{"num_chunks": -1}, {"num_chunks": 65}, {"timeout": timedelta(0)}])
    def test_numbers_out_of_range_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            HTTPTransport(**{"timeout": LIMIT, "hostname": LOOPBACK, **options})


class TestLanding:
    """In the receiver's own tensors, and what is left of them if the transfer fails."""

    def receive(self, receiver: HTTPTransport[State], address: str, into: Destination[State]) -> State:
        return receiver.recv_checkpoint_from([Source(0, address)], 5, LIMIT, into)

    def test_the_receivers_tensors_take_the_state(self, transports: Make) -> None:
        source, receiver = transports(), transports(num_chunks=3)
        state, own = make_state(5_000_000), make_state(5_000_000)
        source.send_checkpoint([1], 5, state, LIMIT)
        into = Destination(own)
        received = self.receive(receiver, source.metadata(), into)
        assert_same(received, state)
        assert received["model"]["w"].data_ptr() == own["model"]["w"].data_ptr()
        assert into.is_written
        assert list(into.received) == [source.metadata()]

    @pytest.mark.heal_is_clean
    def test_a_state_that_is_refused_by_its_form_leaves_them_as_they_are(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        own = {"model": {"w": torch.zeros(1000)}}
        seen: list[Any] = []

        def refuse(state: State) -> None:
            seen.append(state["model"]["w"])
            raise CheckpointFormatError("not mine")

        source.send_checkpoint([1], 5, make_state(), LIMIT)
        into = Destination[State](own, refuse)
        with pytest.raises(CheckpointFormatError, match="not mine"):
            self.receive(receiver, source.metadata(), into)
        assert (seen[0].shape, seen[0].device.type) == (torch.Size([1000]), "meta")
        assert not into.is_written
        assert not own["model"]["w"].any()

    @pytest.mark.heal_is_clean
    def test_a_failure_says_whether_they_were_written_to(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        own = make_state(5_000_000)
        source.send_checkpoint([1], 5, make_state(5_000_000), LIMIT)
        address = parse_address(source.metadata())
        relay = Relay((address.host, address.port), lambda: at(1_000_000, cut))
        into = Destination(own)
        with pytest.raises(CheckpointError, match="truncated"):
            self.receive(receiver, f"http://{LOOPBACK}:{relay.port}", into)
        assert into.is_written


class TestSeveralSources:
    """The state is the first one's, whoever sends its bytes."""

    MEGABYTES = 64

    @pytest.fixture
    def state(self) -> State:
        return make_state(self.MEGABYTES << 18)

    def offer(self, transports: Make, *states: State) -> list[HTTPTransport[State]]:
        sources = [transports() for _ in states]
        for source, state in zip(sources, states, strict=True):
            source.send_checkpoint([1], 5, state, LIMIT)
        return sources

    def receive(self, transports: Make, addresses: list[str]) -> tuple[State, Destination[State]]:
        sources = [Source(rank, address) for rank, address in enumerate(addresses)]
        into = Destination[State]()
        return transports().recv_checkpoint_from(sources, 5, LIMIT, into), into

    def hold_first(self, monkeypatch: pytest.MonkeyPatch, until: Callable[[Fetch], object]) -> None:
        """Let the first source send no part yet: alone it might have sent all before another one began."""
        read = Fetch._read

        def read_later(fetch: Fetch, line: _Line, *what: Any) -> None:
            if line.source.is_first:
                wait_for(lambda: until(fetch))
            read(fetch, line, *what)

        monkeypatch.setattr(Fetch, "_read", read_later)

    def relayed(self, source: HTTPTransport[State], spoil: Filter) -> str:
        address = parse_address(source.metadata())
        return f"http://{LOOPBACK}:{Relay((address.host, address.port), lambda: spoil).port}"

    def test_each_sends_a_part(self, transports: Make, state: State) -> None:
        addresses = [source.metadata() for source in self.offer(transports, state, state, state)]
        received, into = self.receive(transports, addresses)
        assert_same(received, state)
        assert sum(into.received.values()) > self.MEGABYTES << 20
        assert set(into.received) <= set(addresses)

    @pytest.mark.progress
    @pytest.mark.parametrize("where", [0, 10_000, 6_000_000])
    def test_what_a_helper_that_dies_had_to_send_comes_from_the_others(
        self, transports: Make, state: State, where: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.hold_first(monkeypatch, lambda fetch: fetch._destination.refused)
        first, helper = self.offer(transports, state, state)
        struck: list[bytes] = []

        def strike(data: bytes) -> bytes:
            struck.append(data)
            return cut(data)

        address = parse_address(helper.metadata())
        relay = Relay((address.host, address.port), lambda: at(where, strike))
        through = f"http://{LOOPBACK}:{relay.port}"
        received, into = self.receive(transports, [first.metadata(), through])
        assert_same(received, state)
        assert struck
        assert list(into.refused) == [through]

    @pytest.mark.progress
    def test_who_is_stopped_in_its_last_stripe_loses_it(
        self, transports: Make, state: State, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, helper = self.offer(transports, state, state)
        stopped, goes_on = threading.Event(), threading.Event()
        self.hold_first(monkeypatch, lambda _: stopped.is_set())

        def stop(data: bytes) -> bytes:
            stopped.set()
            goes_on.wait(60)
            return data

        address = parse_address(helper.metadata())
        relay = Relay((address.host, address.port), lambda: at(1_000_000, stop))
        received, into = self.receive(transports, [first.metadata(), f"http://{LOOPBACK}:{relay.port}"])
        goes_on.set()
        assert stopped.is_set()
        assert_same(received, state)
        assert into.received[first.metadata()] > self.MEGABYTES << 19

    @pytest.mark.progress
    def test_who_lost_a_stripe_to_a_source_that_is_lost_fetches_it_after_all(self) -> None:
        addresses = {rank: Address(LOOPBACK, rank + 1) for rank in range(2)}
        fetch = Fetch(addresses, 5, 1, 60.0, 60.0, Expectation().limits, Destination())
        slow = _Line(fetch, fetch._sources[0])
        slow.has_lost_stripe = True
        fetch._sums = b""
        fetch._open.append(Stripe(0, 1))
        fetch.lose(1, "it is gone")
        assert fetch._next(slow, 1.0) == Stripe(0, 1)
        assert not slow.has_lost_stripe

    @pytest.mark.heal_is_clean
    @pytest.mark.parametrize("other", ["another state", "another form", "a flipped bit", "no state"])
    def test_what_a_helper_sends_otherwise_comes_from_the_first(
        self, transports: Make, state: State, other: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.hold_first(monkeypatch, lambda fetch: fetch._destination.refused)
        theirs = make_state(self.MEGABYTES << 18) if other == "another state" else state
        theirs = make_state(3) if other == "another form" else theirs
        first, helper = self.offer(transports, state, theirs)
        address = helper.metadata()
        if other == "a flipped bit":
            address = self.relayed(helper, at(3_000_000, flip_bit))
        elif other == "no state":
            helper.refuse_checkpoint([], 5, "no memory")
        received, into = self.receive(transports, [first.metadata(), address])
        assert_same(received, state)
        assert sum(into.received.values()) >= self.MEGABYTES << 20
        assert list(into.refused) == [address]

    def test_without_the_first_there_is_no_state(self, transports: Make, state: State) -> None:
        first, helper = self.offer(transports, state, state)
        first.shutdown()
        with pytest.raises(CheckpointError, match=f"{first.metadata()}: .*refused"):
            self.receive(transports, [first.metadata(), helper.metadata()])

    @pytest.mark.progress
    def test_a_helper_that_is_lost_is_done_without(
        self, transports: Make, state: State, pool: ThreadPoolExecutor
    ) -> None:
        (first,) = self.offer(transports, state)
        with listen_tcp(Address(LOOPBACK, 0)) as silent:
            receiver = transports()
            sources = [Source(0, first.metadata()), Source(7, f"http://{LOOPBACK}:{silent.getsockname()[1]}")]
            receiving = pool.submit(receiver.recv_checkpoint_from, sources, 5, LIMIT, Destination())
            with silent.accept()[0] as peer:
                peer.recv(1000)
                receiver.lose_source(7, "it is gone")
                assert_same(receiving.result(60), state)


class TestSteps:
    def test_a_receiver_that_asks_too_early_asks_again_until_the_step_is_offered(
        self, transports: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wait_for_offer = CheckpointServer.wait_for_offer
        asked_for: queue.Queue[int] = queue.Queue()

        def watched(server: CheckpointServer, step: int, *how: Any) -> http_server.Offer | None:
            asked_for.put(step)
            return wait_for_offer(server, step, *how)

        monkeypatch.setattr(http_server, "WAIT_S_MAX", 0.05)
        monkeypatch.setattr(CheckpointServer, "wait_for_offer", watched)
        source, receiver = transports(), transports()
        source.send_checkpoint([1], 4, {"step": "the one before"}, LIMIT)
        received = pool.submit(fetch, receiver, source)
        assert [asked_for.get(timeout=30) for _ in range(3)] == [5, 5, 5]
        assert not received.done()
        state = make_state()
        source.send_checkpoint([1], 5, state, LIMIT)
        assert_same(received.result(30), state)

    def test_a_step_that_is_never_offered_ends_with_the_timeout(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        with pytest.raises(TimeoutError, match=r"http://127.*after 0\.3 s it had not"):
            receiver.recv_checkpoint(0, source.metadata(), 5, SOON)

    @pytest.mark.heal_is_clean
    def test_a_step_that_is_past_is_refused_at_once(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        source.send_checkpoint([1], 6, make_state(), LIMIT)
        with pytest.raises(CheckpointError, match="410 step 6 is offered by now"):
            fetch(receiver, source)

    @pytest.mark.heal_is_clean
    def test_after_disallow_nothing_is_offered(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        source.disallow_checkpoint()
        with pytest.raises(CheckpointError, match=r"after 0\.3 s"):
            receiver.recv_checkpoint(0, source.metadata(), 5, SOON)
        source.disallow_checkpoint()

    def test_disallow_frees_the_snapshot(self, monkeypatch: pytest.MonkeyPatch, transports: Make) -> None:
        snapshots: list[weakref.ref[Snapshot]] = []

        class Watched(Snapshot):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                snapshots.append(weakref.ref(self))

        monkeypatch.setattr("torchft_like.checkpointing.http_transport.Snapshot", Watched)
        source = transports()
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        assert snapshots[0]() is not None
        source.disallow_checkpoint()
        gc.collect()
        assert snapshots[0]() is None

    @pytest.mark.parametrize("newer", [[6], [6, 7]], ids=["outlives disallow", "of a snapshot long gone"])
    def test_a_transfer_outlives_one_snapshot_and_is_cut_off_by_two(
        self, transports: Make, newer: list[int]
    ) -> None:
        source, state = transports(), make_state(8_000_000)
        source.send_checkpoint([1], 5, state, LIMIT)
        path = f"/checkpoint/5/payload?from=0&to={state['model']['w'].nbytes}"
        with request(parse_address(source.metadata()).port, path) as client:
            begun = client.recv(1000)
            assert b" 200 " in begun
            if newer == [6]:
                source.disallow_checkpoint()
            for step in newer:
                source.send_checkpoint([1], step, make_state(), LIMIT)
            client.shutdown(socket.SHUT_WR)
            has_all = len(begun) + drain(client) > state["model"]["w"].nbytes
        assert has_all == (newer == [6])


class TestFailures:
    def test_a_peer_that_is_not_there_is_named_with_its_address(self, transports: Make) -> None:
        with listen_tcp(Address(LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(CheckpointError, match=f"127.0.0.1:{port}: .*refused"):
            transports().recv_checkpoint(0, f"http://127.0.0.1:{port}", 5, LIMIT)

    @pytest.mark.parametrize(
        ("address", "host"),
        [
            ("http://no-such-host.invalid:1", "this host reaches"),
            ("http://127.0.0.1:1", "this host, which is 127.0.0.1 towards there, reaches"),
        ],
    )
    def test_an_address_that_cannot_be_reached_is_told_what_to_set(
        self, transports: Make, address: str, host: str
    ) -> None:
        told = f"no connection to {address}, which its replica offers .* TORCHFT_HOSTNAME .* {host}"
        with pytest.raises(CheckpointError, match=told):
            transports().recv_checkpoint(0, address, 5, LIMIT)
        with pytest.raises(CheckpointError, match=told):
            transports().check_source(Source(0, address), LIMIT)

    def test_trying_a_source_takes_nothing_from_it(self, transports: Make) -> None:
        source, receiver = transports(), transports()
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        receiver.check_source(Source(0, source.metadata()), LIMIT)
        assert fetch(receiver, source)["step"] == 3

    @pytest.mark.progress
    def test_a_peer_that_accepts_and_says_nothing_is_given_up(self, transports: Make) -> None:
        receiver = transports(stall_timeout=SOON)
        with (
            listen_tcp(Address(LOOPBACK, 0)) as listener,
            pytest.raises(TimeoutError, match=r"no byte came for 0\.3 s"),
        ):
            receiver.recv_checkpoint(0, f"127.0.0.1:{listener.getsockname()[1]}", 5, LIMIT)

    @pytest.mark.progress
    def test_a_peer_that_stops_in_the_middle_is_given_up(self, transports: Make) -> None:
        ended = threading.Event()
        answer = b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\nCheckpoint-Step: 5\r\n\r\nTFTSTATE"
        receiver = transports(stall_timeout=SOON)

        def stop(_: socket.socket) -> None:
            ended.wait(30)

        with scripted_server(answer, stop) as address:
            with pytest.raises(TimeoutError, match=r"no byte came for 0\.3 s"):
                receiver.recv_checkpoint(0, address, 5, LIMIT)
            ended.set()

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (b"", "ended the connection without an answer"),
            (b"HTTP/1.0 500 broken\r\n\r\n", "500 broken"),
            (b"HTTP/1.0 301 Moved\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "301 Moved"),
            (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP: SSH-2.0"),
            (b"HTTP/1.0 200 OK\r\nCheckpoint-Step: 4\r\n\r\n", "it sent step 4"),
            (b"HTTP/1.0 200 OK\r\n\r\nPK\x03\x04" + bytes(100), "it sent step none"),
            (
                b"HTTP/1.0 200 OK\r\nCheckpoint-Step: 5\r\ncontent-length: 104\r\n\r\nPK\x03\x04"
                + bytes(100),
                "this is no state stream",
            ),
            (b"HTTP/1.0 200 OK\r\nCheckpoint-Step: 5\r\nContent-Length: 99\r\n\r\nTFTSTATE", "truncated"),
            (b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 9000, "more than 100 headers"),
            (
                b"HTTP/1.1 200 OK\r\nCheckpoint-Step: 5\r\nTransfer-Encoding: chunked\r\n\r\nmany\r\n",
                "how long it is",
            ),
            (b"HTTP/1.0 200 " + b"x" * 70_000, "more than 65536 bytes"),
        ],
    )
    def test_any_other_answer_is_an_error(self, transports: Make, answer: bytes, message: str) -> None:
        with scripted_server(answer) as address, pytest.raises(CheckpointError, match=message):
            transports().recv_checkpoint(0, address, 5, LIMIT)

    @pytest.mark.parametrize("metadata", ["", "nowhere", "http://host:1/checkpoint/", "<checkpoint>"])
    def test_metadata_of_another_transport_is_an_error(self, transports: Make, metadata: str) -> None:
        with pytest.raises(CheckpointError, match="replica 3 does not send over this transport"):
            transports().recv_checkpoint(3, metadata, 5, LIMIT)

    @pytest.mark.heal_is_clean
    def test_parts_of_two_snapshots_are_not_mixed(self, transports: Make) -> None:
        state = Snapshot({"w": torch.ones(3_000_000)}).fill()
        ids = iter("abcdef")

        class Changing(CheckpointServer):
            def wait_for_offer(self, step: int, wait_s: float, key: str = "") -> http_server.Offer | None:
                return http_server.Offer(step, state, id=next(ids))

            def offer_of(self, fetch: bytes) -> None:
                return None

        server = Changing(Address(LOOPBACK, 0), ServerLimits())
        try:
            with pytest.raises(CheckpointError, match="replaced between two requests"):
                transports(num_chunks=2).recv_checkpoint(0, f"127.0.0.1:{server.port}", 5, LIMIT)
        finally:
            server.close(wait=True)


class TestAbort:
    @pytest.mark.progress
    def test_abort_ends_a_wait_for_a_step_at_once(self, transports: Make, pool: ThreadPoolExecutor) -> None:
        source, receiver = transports(), transports()
        fetches = [pool.submit(fetch, receiver, source) for _ in range(3)]
        wait_for(lambda: len(receiver._fetches) == 3)
        receiver.abort_recv("replica b died")
        for result in fetches:
            with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:.* replica b died"):
                result.result(30)

    def test_abort_ends_a_connect_that_hangs(self, transports: Make, pool: ThreadPoolExecutor) -> None:
        receiver = transports()
        with socket.create_server((LOOPBACK, 0), backlog=0) as full:
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            asked = pool.submit(receiver.recv_checkpoint, 0, f"127.0.0.1:{full.getsockname()[1]}", 5, LIMIT)
            wait_for(lambda: receiver._fetches)
            with pytest.raises(TimeoutError):
                asked.result(0.2)
            receiver.abort_recv("enough")
            with pytest.raises(CheckpointError, match="enough"):
                asked.result(30)
            for filler in fillers:
                filler.close()

    @pytest.mark.parametrize("whose", ["source", "receiver"])
    def test_a_shutdown_ends_a_receive(self, transports: Make, pool: ThreadPoolExecutor, whose: str) -> None:
        source, receiver = transports(), transports()
        asked = pool.submit(fetch, receiver, source)
        wait_for(lambda: receiver._fetches)
        (source if whose == "source" else receiver).shutdown()
        with pytest.raises(
            CheckpointError, match=r"127\.0" if whose == "source" else "the transport is shut down"
        ):
            asked.result(30)

    def test_use_after_shutdown_is_an_error(self, transports: Make) -> None:
        source = transports()
        source.shutdown()
        source.shutdown()
        with pytest.raises(ShutdownError):
            source.send_checkpoint([1], 5, make_state(), LIMIT)
        with pytest.raises(ShutdownError):
            source.recv_checkpoint(0, "127.0.0.1:1", 5, LIMIT)


@pytest.mark.no_leak
def test_transports_leave_no_thread_and_no_descriptor_behind() -> None:
    def use() -> None:
        source: HTTPTransport[State] = HTTPTransport(LIMIT, hostname=LOOPBACK)
        receiver: HTTPTransport[State] = HTTPTransport(LIMIT, 2, hostname=LOOPBACK)
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        fetch(receiver, source)
        with request(parse_address(source.metadata()).port, "/checkpoint/9/header?wait_ms=5000"):
            source.shutdown()
        receiver.shutdown()

    use()
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(20):
        use()
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive(), thread.name
    assert not left_open_since(descriptors)


@pytest.mark.heal_is_clean
def test_concurrent_use_ends_in_a_state_or_an_error(transports: Make, pool: ThreadPoolExecutor) -> None:
    source, receiver = transports(), transports(num_chunks=3)
    outcomes: list[Future[State]] = []
    for step in range(30):
        outcomes += [pool.submit(fetch, receiver, source, step) for _ in range(2)]
        source.send_checkpoint([1], step, {"step": step, "w": torch.full((2_000_000,), float(step))}, LIMIT)
        if step % 3 == 0:
            receiver.abort_recv()
        if step % 4 == 0:
            source.disallow_checkpoint()
    source.shutdown()
    for outcome in outcomes:
        error = outcome.exception(60)
        if error is None:
            state = outcome.result()
            assert torch.equal(state["w"], torch.full((2_000_000,), float(state["step"])))
        else:
            assert isinstance(error, CheckpointError)
