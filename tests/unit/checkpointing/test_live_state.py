"""A state that is sent from its own tensors: the same bits, whoever is slow, and a bounded wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lighthouse.address import parse_address
from lighthouse.tls import TLS_ENV
from tests.certificates import certify
from tests.unit.checkpointing.clients import asking
from tests.unit.checkpointing.conftest import LIMIT, Make
from tests.unit.checkpointing.states import load_state, stream_of
from tests.waiting import wait_for
from torchft_like.checkpointing import copy_ahead, http_server, state_stream
from torchft_like.checkpointing.copy_ahead import Piece
from torchft_like.checkpointing.http_fetch import connect
from torchft_like.checkpointing.http_server import wait_s
from torchft_like.checkpointing.state_stream import Snapshot
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import CheckpointError
from torchft_like.plain_data import Leaf

LIMIT_S = LIMIT.total_seconds()
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_is_worth_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.checkpointing.http_transport.LIVE_FROM", 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """The pieces that were copied."""
    pieces: list[Piece] = []
    copy = Piece.copy

    def watched(piece: Piece, *, is_alone: bool) -> None:
        pieces.append(piece)
        copy(piece, is_alone=is_alone)

    monkeypatch.setattr(Piece, "copy", watched)
    return pieces


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that wait for half a minute, and copy everything then."""
    monkeypatch.setattr(http_server, "wait_s", lambda elapsed_s, *_: max(LIMIT_S / 2 - elapsed_s, 0.0))
    monkeypatch.setattr(http_server, "PROGRESS_S", LIMIT_S)


def make_state(count: int = 5_000_000) -> State:
    """A state whose last tensor ends beside a multiple of 64 bytes."""
    return {"a": torch.randn(count), "b": torch.randn(3), "c": torch.randn(count // 2 + 1)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


class TestWait:
    GB = 1_000_000_000

    @pytest.mark.parametrize(
        ("elapsed_s", "left", "copied", "expected"),
        [
            (0.0, GB, 0, 0.1),  # they are given time to come
            (0.1, GB, 0, 0.0),
            (0.2, GB // 2, 0, 0.4),  # they have taken what would have taken half a second to copy
            (0.6, GB // 2, 0, 0.0),
            (0.6, GB // 2, GB // 4, 0.25),
            (1.1, 1, GB, 0.99),
            (2.1, 0, GB, 0.0),  # never longer than two copies take
        ],
    )
    def test_it_lasts_while_copying_would_have_done_less(
        self, elapsed_s: float, left: int, copied: int, expected: float
    ) -> None:
        assert wait_s(elapsed_s, self.GB, left, copied, 1e9) == pytest.approx(expected, abs=0.011)

    def test_what_is_copied_soon_is_not_waited_for_for_long(self) -> None:
        assert wait_s(0.0, self.GB // 100, self.GB, 0, 1e9) == pytest.approx(0.01)
        assert wait_s(0.02, self.GB // 100, self.GB, 0, 1e9) == 0.0


@pytest.mark.usefixtures("patient")
class TestFastReceivers:
    def test_what_they_take_at_once_is_never_copied(
        self, transports: Make, pool: ThreadPoolExecutor, copied: list[Piece]
    ) -> None:
        source, state = transports(), make_state()
        expected = {key: tensor.clone() for key, tensor in state.items()}
        received = [
            pool.submit(transports().recv_checkpoint, 0, source.metadata(), 5, LIMIT) for _ in range(2)
        ]
        source.send_checkpoint([1, 2], 5, state, LIMIT)
        for tensor in state.values():
            tensor.zero_()
        assert all(same(one.result(LIMIT_S), expected) for one in received)
        assert not copied

    def test_afterwards_nobody_is_given_what_has_changed(
        self, transports: Make, pool: ThreadPoolExecutor
    ) -> None:
        source = transports()
        received = pool.submit(transports().recv_checkpoint, 0, source.metadata(), 5, LIMIT)
        source.send_checkpoint([1], 5, make_state(), LIMIT)
        received.result(LIMIT_S)
        with pytest.raises(CheckpointError, match="424 all for whom the state was offered have it"):
            transports().recv_checkpoint(0, source.metadata(), 5, LIMIT)
        with pytest.raises(CheckpointError, match="no state to offer as step 6"):
            source.allow_checkpoint(6)

    def test_each_of_several_sources_is_told_when_all_has_come(
        self, transports: Make, pool: ThreadPoolExecutor, copied: list[Piece]
    ) -> None:
        sources, state = [transports() for _ in range(3)], make_state(20_000_000)
        sending = [pool.submit(source.send_checkpoint, [1], 5, state, LIMIT) for source in sources]
        asked = [Source(rank, source.metadata()) for rank, source in enumerate(sources)]
        received = transports().recv_checkpoint_from(asked, 5, LIMIT, Destination())
        for one in sending:
            one.result(LIMIT_S)
        assert same(received, state)
        assert not copied

    @pytest.mark.progress
    def test_a_shutdown_ends_the_wait(
        self, transports: Make, pool: ThreadPoolExecutor, copied: list[Piece]
    ) -> None:
        source = transports()
        sending = pool.submit(source.send_checkpoint, [1], 5, make_state(), LIMIT)
        wait_for(lambda: source._served()[0]._offer is not None)
        source.shutdown()
        sending.result(LIMIT_S)
        assert not copied


def test_without_receivers_nothing_is_waited_for(transports: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "wait_s", pytest.fail)
    source, state = transports(), make_state()
    source.send_checkpoint([], 5, state, LIMIT)
    assert same(transports().recv_checkpoint(0, source.metadata(), 5, LIMIT), state)


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("kind", ["http", "https"])
def test_who_stops_in_the_middle_holds_nobody_up_and_gets_the_old_bytes(
    transports: Make, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    if kind == "https":
        monkeypatch.setenv(TLS_ENV, str(certify(tmp_path)))
    has_stopped = threading.Event()
    monkeypatch.setattr(http_server, "wait_s", lambda *_: 0.0 if has_stopped.is_set() else 0.01)
    monkeypatch.setattr(http_server, "PROGRESS_S", LIMIT_S)
    source, state = transports(), make_state(20_000_000)
    expected = stream_of(Snapshot(state).fill())
    sending = pool.submit(source.send_checkpoint, [1], 5, state, LIMIT)
    got = bytearray()
    with connect(parse_address(source.metadata()), LIMIT_S) as client, client.makefile("rb") as answers:
        client.settimeout(LIMIT_S)

        def ask(what: str) -> int:
            client.sendall(asking(f"/checkpoint/5/{what}"))
            head = iter(answers.readline, b"\r\n")
            return int({k: v for k, _, v in (line.partition(b": ") for line in head)}[b"Content-Length"])

        got += answers.read(ask("header?wait_ms=5000"))
        length = len(expected) // (1 << 20) * (1 << 20) // 2  # more than sockets hold
        assert ask(f"payload?from=0&to={length}") == length
        got += answers.read(1 << 20)
        assert not sending.done()
        has_stopped.set()
        sending.result(LIMIT_S)
        for tensor in state.values():
            tensor.zero_()
        got += answers.read(length - (1 << 20))
        assert got == expected[: len(got)]
        sums = answers.read(ask("sums"))
        assert sums == expected[-len(sums) :]


def test_a_receiver_that_takes_nothing_any_more_is_not_waited_for(
    transports: Make, pool: ThreadPoolExecutor, copied: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it might be waited for, as the copy would take long."""
    monkeypatch.setattr(http_server, "wait_s", lambda *_: LIMIT_S)
    source, state = transports(), make_state(20_000_000)
    sending = pool.submit(source.send_checkpoint, [1], 5, state, LIMIT)
    with connect(parse_address(source.metadata()), LIMIT_S) as client:
        client.sendall(asking("/checkpoint/5/payload?from=0&to=64"))
        assert client.recv(64)
        sending.result(LIMIT_S)
    assert copied


class TestSnapshot:
    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copy_ahead, "PLAIN_FROM", 64)
        for module in (copy_ahead, state_stream):
            monkeypatch.setattr(module, "COPY_BYTES", 1024)

    @pytest.mark.heal_is_clean
    def test_it_is_the_same_before_while_and_after_it_is_copied(self) -> None:
        base = torch.randn(3000)
        state = {
            "plain": [base, torch.randn(777), torch.arange(9), torch.tensor(1.5), torch.empty(0), b"x" * 500],
            "shared": [base[:64], base[100:900], base.view(30, 100).T, base.expand(2, 3000)],
            "odd": [torch.randn(99, dtype=torch.complex64).conj(), torch.randn(50, 4)[:, ::2]],
            "types": [torch.ones(333, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.uint8)],
            "grad": torch.nn.Parameter(torch.randn(20, 20)),
        }
        snapshot = Snapshot(state)
        snapshot.copy_first()
        before = stream_of(snapshot)
        assert snapshot.copy_next()
        assert stream_of(snapshot) == before
        snapshot.fill()
        assert stream_of(snapshot) == before
        assert 0 < snapshot.live_nbytes < snapshot.nbytes
        loaded: Any = load_state(before)
        assert torch.equal(loaded["odd"][0], state["odd"][0])  # type: ignore[index]
        assert torch.equal(loaded["grad"], state["grad"])  # type: ignore[arg-type]

    @pytest.mark.heal_is_clean
    def test_the_state_may_not_change_while_somebody_reads_it(self, pool: ThreadPoolExecutor) -> None:
        snapshot = Snapshot([torch.randn(5000)])
        snapshot.copy_first()
        with snapshot.reading(0, 2000) as pieces:
            settling = pool.submit(snapshot.settle)
            wait_for(lambda: bool(snapshot.changed._waiters))  # type: ignore[attr-defined]
            assert not settling.done()
            assert pieces
        settling.result(LIMIT_S)
        with pytest.raises(CheckpointError, match="not kept"), snapshot.reading(0, 2000):
            pass

    def test_it_is_sent_while_the_rest_is_copied(
        self, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What cannot be read from where it is comes as it is copied, piece by piece."""
        may_end, copy = threading.Event(), state_stream._copy_on_host

        def copy_in_time(leaf: Leaf, place: memoryview) -> None:
            assert not (isinstance(leaf, torch.Tensor) and len(leaf) == 3) or may_end.wait(LIMIT_S)
            copy(leaf, place)

        monkeypatch.setattr(state_stream, "_copy_on_host", copy_in_time)
        first = torch.arange(500_000, dtype=torch.float64)[::2]
        snapshot = Snapshot([first, torch.ones(3)])
        filling = pool.submit(snapshot.fill)
        with snapshot.reading(0, snapshot.nbytes) as pieces:
            begun = b"".join(pieces)
            assert begun == first.numpy().tobytes()[: len(begun)]
        assert not filling.done()
        may_end.set()
        filling.result(LIMIT_S)

    def test_a_sum_is_taken_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = Snapshot([torch.randn(5000)])
        snapshot.copy_first()
        sums = b"".join(snapshot.sums())
        snapshot.settle()
        assert b"".join(snapshot.sums()) == sums
