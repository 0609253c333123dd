"""What must agree, and who waits for whom: the pure half of the check of collectives."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from torchft_like.core.agreement.referee import (
    Answer,
    Call,
    Disagreement,
    Missing,
    Referee,
    Ruling,
    disagreement,
)
from torchft_like.core.agreement.statements import (
    CALL_BYTES_MAX,
    EXCHANGED,
    GATHERED,
    NUMBER_MAX,
    PAIRED,
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES,
    SCATTERED,
    SHARED_OUT,
    RecordError,
    Statement,
    decode,
    encode,
    pack,
    pack_statement,
    unpack,
)
from torchft_like.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from torchft_like.process_group.checking import CALL, Request, take_request

FOUR, EIGHT, INTS = "float32[4]", "float32[8]", "int32[4]"
SUM = Statement("allreduce", inputs=(FOUR,), reduce_op="SUM")
GATHER = Statement("gather", GATHERED, (FOUR,), (), root=0)
GATHER_ROOT = replace(GATHER, outputs=(FOUR, FOUR))
SCATTER = Statement("scatter", SCATTERED, (), (FOUR,), root=0)
SCATTER_ROOT = replace(SCATTER, inputs=(FOUR, FOUR))
SHARE = Statement("reduce_scatter", SHARED_OUT, (FOUR, EIGHT), (FOUR,), reduce_op="SUM")
EXCHANGE = Statement("alltoall", EXCHANGED, (FOUR, EIGHT), (FOUR, EIGHT))
TOLD = Statement("all_gatherv", inputs=("float32[*, 4]",), terms=(("dim", "0"),))

FITTING = [
    ("the same", [SUM, SUM, SUM]),
    ("no tensors", [Statement("barrier")] * 2),
    ("a list on the root", [GATHER_ROOT, GATHER]),
    ("a scattered list on the root", [SCATTER_ROOT, SCATTER]),
    ("uneven shares", [SHARE, replace(SHARE, outputs=(EIGHT,))]),
    ("an uneven exchange", [EXCHANGE, replace(EXCHANGE, inputs=(EIGHT, FOUR), outputs=(EIGHT, FOUR))]),
    (
        "uneven gathered",
        [replace(GATHER, root=None, inputs=(one,), outputs=(FOUR, EIGHT)) for one in (FOUR, EIGHT)],
    ),
    ("the same mistake on all ranks", [replace(EXCHANGE, inputs=(FOUR,), outputs=(INTS,) * 3)] * 2),
]

MISFITS = [
    ("operation", [SUM, Statement("broadcast", inputs=(FOUR,), root=0)]),
    ("shape", [SUM, replace(SUM, inputs=(EIGHT,))]),
    ("shape", [SUM, replace(SUM, inputs=("float32[2, 2]",))]),
    ("dtype", [SUM, replace(SUM, inputs=(INTS,))]),
    ("dtype", [SUM, replace(SUM, inputs=("sparse_coo float32[4]",))]),
    ("device", [SUM, replace(SUM, inputs=(f"{FOUR} on cuda",))]),
    ("reduce op", [SUM, replace(SUM, reduce_op="MAX")]),
    ("number of tensors", [SUM, replace(SUM, inputs=(FOUR, FOUR))]),
    ("shape", [replace(SUM, outputs=(FOUR,)), replace(SUM, outputs=(EIGHT,))]),
    ("root", [GATHER_ROOT, replace(GATHER, root=1)]),
    ("root", [GATHER_ROOT, GATHER_ROOT]),
    ("number of tensors", [replace(GATHER, outputs=(FOUR,)), GATHER]),
    ("number of tensors", [GATHER, GATHER, replace(GATHER, inputs=())]),
    ("shape", [GATHER_ROOT, replace(GATHER, inputs=(EIGHT,))]),
    ("dtype", [SCATTER_ROOT, replace(SCATTER, outputs=(INTS,))]),
    ("shape", [SHARE, replace(SHARE, outputs=(FOUR,))]),
    ("shape", [SHARE, replace(SHARE, inputs=(EIGHT, EIGHT), outputs=(EIGHT,))]),
    ("shape", [EXCHANGE, EXCHANGE]),
    ("number of tensors", [EXCHANGE, replace(EXCHANGE, inputs=(FOUR,))]),
    ("dtype", [TOLD, TOLD, replace(TOLD, inputs=("int8[*, 4]",))]),
    ("dim", [replace(TOLD, terms=(("dim", "1"),)), TOLD, TOLD]),
    ("arguments", [TOLD, TOLD, replace(TOLD, terms=())]),
    ("arguments", [TOLD.refused(TypeError("no tensor")), TOLD, TOLD]),
]


@pytest.mark.parametrize(("name", "calls"), FITTING)
def test_these_calls_fit(name: str, calls: list[Statement]) -> None:
    assert disagreement(calls, 1) is None


@pytest.mark.parametrize(("aspect", "calls"), MISFITS)
def test_these_calls_differ_in(aspect: str, calls: list[Statement]) -> None:
    found = disagreement(calls, 7)
    assert found is not None
    assert found.aspect == aspect
    assert found.calls == {rank: call.text(7) for rank, call in enumerate(calls)}


def test_a_text_cuts_long_lists_short_and_shows_what_differs() -> None:
    many = tuple(f"float32[{n}]" for n in range(1000))
    other = (*many[:600], INTS, *many[601:])
    found = disagreement([replace(SUM, inputs=many), replace(SUM, inputs=other)], 1)
    assert found is not None
    assert found.calls[0].endswith("... (1000 tensors, number 600 is float32[600])")
    assert found.calls[1].endswith(f"... (1000 tensors, number 600 is {INTS})")
    assert len(found.calls[0]) < 200


# The referee.


class Game:
    """Ranks that call, with tickets of their own, and the rulings they got."""

    def __init__(self, world_size: int) -> None:
        self.referee = Referee(world_size)
        self._tickets = 0
        self._numbers = [0] * world_size
        self.rulings: dict[int, Ruling] = {}

    def call(self, rank: int, statement: Statement, deadline_s: float = math.inf, now_s: float = 0) -> int:
        self._tickets += 1
        is_paired = statement.rule == PAIRED
        self._numbers[rank] += not is_paired
        number = 0 if is_paired else self._numbers[rank]
        call = Call(rank, self._tickets, statement, now_s, deadline_s, number)
        self.take(self.referee.hear(call))
        return self._tickets

    def take(self, answers: list[Answer]) -> None:
        for ruling in answers:
            assert isinstance(ruling, Ruling)
            assert ruling.ticket not in self.rulings
            self.rulings[ruling.ticket] = ruling

    def may_run(self, *tickets: int) -> bool:
        return all(ticket in self.rulings and self.rulings[ticket].problem is None for ticket in tickets)

    def waits(self, *tickets: int) -> bool:
        return not self.rulings.keys() & set(tickets)

    def problem(self, ticket: int) -> object:
        return self.rulings[ticket].problem


def send(to: int, tag: int = 0, spec: str = FOUR) -> Statement:
    return Statement("send", PAIRED, (spec,), (), peer=to, tag=tag)


def receive(source: int | None, tag: int = 0, spec: str = FOUR) -> Statement:
    return Statement("recv", PAIRED, (), (spec,), peer=source, tag=tag)


def test_calls_of_a_rank_that_is_ahead_are_compared_in_their_order() -> None:
    game = Game(2)
    barrier = Statement("barrier")
    ahead = [game.call(0, each) for each in (SUM, barrier, SUM)]
    assert game.may_run(game.call(1, SUM))
    assert game.may_run(ahead[0])
    wrong = game.call(1, SUM)
    assert game.problem(wrong) == game.problem(ahead[1])
    assert game.problem(wrong) == Disagreement("operation", {0: "barrier #2", 1: "allreduce #2 float32[4]"})
    assert game.may_run(game.call(1, SUM), ahead[0], ahead[2])  # a refusal does not shift what follows


def test_sends_and_receives_meet_by_ranks_and_tag_in_their_order() -> None:
    game = Game(3)
    sends = [game.call(0, send(1, tag)) for tag in (5, 6, 5)]
    other = game.call(2, send(1, 5))
    assert game.waits(*sends, other)
    assert game.may_run(game.call(1, receive(0, 6)), sends[1])
    assert game.may_run(game.call(1, receive(0, 5)), sends[0])
    assert game.waits(sends[2], other)
    assert game.may_run(game.call(1, receive(2, 5)), other)


def test_a_receive_from_any_rank_takes_the_oldest_send_and_leaves_the_others() -> None:
    game = Game(3)
    late, early = game.call(2, send(0)), game.call(1, send(0))
    assert game.may_run(game.call(0, receive(None)), late)
    assert game.waits(early)
    assert game.may_run(game.call(0, receive(None)), early)


def test_a_send_may_be_received_on_another_device() -> None:
    game = Game(2)
    assert game.may_run(game.call(0, send(1)), game.call(1, receive(0, spec=f"{FOUR} on cuda")))


@pytest.mark.parametrize(("sent", "received"), [("int32[]", "int32[1]"), ("int32[1]", "int32[] on cuda")])
def test_a_number_may_be_received_in_a_tensor_of_one_number(sent: str, received: str) -> None:
    """The legacy start of torch's pipelines does that."""
    game = Game(2)
    assert game.may_run(game.call(0, send(1, spec=sent)), game.call(1, receive(0, spec=received)))


def test_a_number_is_none_of_another_dtype_and_no_empty_tensor() -> None:
    for received in ("float32[1]", "int32[0]", "int32[1, 1]"):
        game = Game(2)
        call = game.call(0, send(1, spec="int32[]"))
        game.call(1, receive(0, spec=received))
        assert isinstance(game.problem(call), Disagreement)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_does_not_exist_is_left_to_the_backend(peer: int) -> None:
    game = Game(2)
    assert game.may_run(game.call(0, send(peer)))


def test_a_missing_rank_is_named_and_everything_is_refused_from_then_on() -> None:
    game = Game(3)
    waiting = [game.call(0, SUM, 30.0), game.call(2, SUM, 40.0), game.call(2, receive(0))]
    assert game.referee.next_deadline_s() == 30.0
    assert game.referee.expire(29.9) == []
    game.take(game.referee.expire(30.0))
    sums = ("allreduce #1 float32[4]",)
    expected = Missing((1,), {0: sums, 2: (*sums, "recv from rank 0, tag 0, float32[4]")}, seconds=30.0)
    assert all(game.problem(ticket) == expected for ticket in waiting)
    assert game.problem(game.call(1, SUM)) == expected
    assert game.referee.next_deadline_s() is None


def test_a_report_that_a_call_is_overdue_is_of_that_call_alone() -> None:
    game = Game(3)
    done, waiting, other = game.call(0, send(1)), game.call(0, send(1)), game.call(2, receive(None))
    assert game.may_run(game.call(1, receive(0)), done)
    assert game.referee.overdue(0, done, 5.0) == game.referee.overdue(2, waiting, 5.0) == []
    assert game.waits(waiting, other)
    game.take(game.referee.overdue(2, other, 5.0))
    problem = game.problem(waiting)
    assert isinstance(problem, Missing)
    assert problem.ranks == (0, 1)


def test_who_waits_for_a_rank_that_is_gone_is_told() -> None:
    game = Game(3)
    first = game.call(0, SUM)
    other = game.call(0, receive(1))
    game.take(game.referee.lose(2))
    assert game.problem(first) == Missing(
        (2,), {0: ("allreduce #1 float32[4]", "recv from rank 1, tag 0, float32[4]")}, lost=True
    )
    assert game.waits(other)
    assert game.may_run(game.call(1, send(0)), other)  # it needs nobody else
    assert isinstance(game.problem(game.call(1, SUM)), Missing)
    assert isinstance(game.problem(game.call(1, send(2))), Missing)


def test_what_a_rank_called_before_it_went_is_in_vain() -> None:
    """It hears no ruling, so it never does its part."""
    game = Game(3)
    game.call(2, SUM, deadline_s=1.0)
    game.call(2, send(0))
    waiting = game.call(0, SUM, deadline_s=2.0)
    game.take(game.referee.lose(2))
    assert game.referee.next_deadline_s() is None
    late = game.call(1, SUM)
    for ticket in (waiting, late, game.call(0, receive(2))):
        assert isinstance(game.problem(ticket), Missing)
    assert game.may_run(game.call(0, receive(None)), game.call(1, send(0)))  # not with the one that is gone


def test_a_receive_from_any_rank_waits_while_one_is_left() -> None:
    game = Game(3)
    waiting = game.call(0, receive(None))
    game.take(game.referee.lose(1))
    assert game.waits(waiting)
    game.take(game.referee.lose(2))
    assert isinstance(game.problem(waiting), Missing)


@pytest.mark.parametrize("seed", range(100))
def test_every_interleaving_of_a_right_program_runs_to_its_end(seed: int) -> None:
    """Each rank's calls in its own order, the ranks in any: all may run, whatever stands open meanwhile."""
    dice = random.Random(seed)
    world_size = dice.randint(2, 5)
    programs: list[list[Statement]] = [[] for _ in range(world_size)]
    for _ in range(dice.randint(1, 30)):
        if dice.random() < 0.5:
            call = dice.choice([SUM, replace(SUM, inputs=(EIGHT,)), Statement("barrier")])
            for program in programs:
                program.append(call)
        else:
            source, target = dice.sample(range(world_size), 2)
            tag, spec = dice.randint(0, 1), f"float32[{source}]"
            _insert(dice, programs[source], send(target, tag, spec))
            _insert(dice, programs[target], receive(source, tag, spec))
    game = Game(world_size)
    tickets = []
    while any(programs):
        rank = dice.choice([rank for rank, program in enumerate(programs) if program])
        tickets.append(game.call(rank, programs[rank].pop(0)))
    assert game.may_run(*tickets)


@pytest.mark.parametrize("seed", range(100))
def test_after_a_loss_a_collective_runs_on_all_ranks_or_is_refused_on_those_that_are_left(seed: int) -> None:
    dice = random.Random(seed)
    world_size = dice.randint(2, 4)
    left = dict.fromkeys(range(world_size), 6)
    game = Game(world_size)
    tickets: dict[int, list[int]] = {rank: [] for rank in left}
    while any(left.values()):
        rank = dice.choice([rank for rank, calls in left.items() if calls])
        left[rank] -= 1
        tickets[rank].append(game.call(rank, SUM))
        if len(left) > 1 and dice.random() < 0.1:
            gone = dice.choice(list(left))
            del left[gone]
            game.take(game.referee.lose(gone))
    for round_of_calls in itertools.zip_longest(*tickets.values()):
        ran = [ticket is not None and game.may_run(ticket) for ticket in round_of_calls]
        assert len(set(ran)) == 1
    if len(left) < world_size:
        assert not any(game.waits(tickets[rank][-1]) for rank in left)


def _insert(dice: random.Random, program: list[Statement], call: Statement) -> None:
    program.insert(dice.randint(0, len(program)), call)


# Messages.


def test_a_list_of_equal_tensors_is_short_on_the_wire() -> None:
    assert len(encode(replace(SUM, inputs=(FOUR,) * 10_000))) < 100


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        encode(SUM)[:-1] + b",null]",
        encode(SUM).replace(b'"allreduce"', b"7"),
        encode(SUM).replace(b'4]",1]', b'4]",-1]'),
        encode(SUM).replace(b'4]",1]', b'4]",1000001]'),
        encode(TOLD).replace(b'["dim","0"]', b'["dim"]'),
        encode(TOLD).replace(b'["dim","0"]', b'["dim",0]'),
    ],
)
def test_what_is_no_statement_is_refused(body: bytes) -> None:
    with pytest.raises(RecordError):
        decode(body)


def test_messages_are_cut_out_of_the_stream_as_they_arrive() -> None:
    stream = bytearray()
    requests = [Request(CALL, ticket, ticket, 1.5, b"x" * ticket) for ticket in range(3)]
    for byte in b"".join(request.encode() for request in requests):
        stream.append(byte)
        if (request := take_request(stream)) is not None:
            assert request == requests.pop(0)
    assert requests == []
    assert not stream


# Errors.


@pytest.mark.parametrize(
    "error",
    [
        CollectiveMismatchError("shape", {0: "one", 1: "other"}),
        CollectiveTimeoutError(1.5, (1,), {0: ("one", "other")}),
        PeerLostError((1, 2), {}),
    ],
)
def test_an_error_can_be_made_again_from_its_arguments(error: Exception) -> None:
    again = type(error)(*error.args)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


# What ranks say before data moves, in records of one length.


def told(statement: Statement) -> Statement:
    """As the other ranks get it."""
    return decode(unpack(pack_statement(statement)).call)


def test_what_is_long_is_cut_and_differs_where_the_whole_does() -> None:
    one, other = (told(Statement("x", terms=(("sizes", "1, " * 3000 + end),))) for end in "12")
    assert len(one.text()) < 200
    found = disagreement([one, other])
    assert found is not None
    assert found.aspect == "sizes"
    many = [Statement("x", terms=tuple((f"name {n}", "v" * 60 + end) for n in range(99))) for end in "12"]
    one, other = map(told, many)
    found = disagreement([one, other])
    assert found is not None
    assert found.aspect == "arguments"
    assert disagreement([one, one]) is None
    lists = [Statement("x", inputs=tuple(f"float32[{n}, {end}]" for n in range(999))) for end in "12"]
    one, other = map(told, lists)
    assert disagreement([one, other]) is not None


@pytest.mark.parametrize("length", [10, 80, 400, 900, 1500])
@pytest.mark.parametrize("character", ["v", "ü", "\U0001f600"], ids=ascii)
def test_records_of_the_same_call_begin_alike_whatever_else_a_rank_says(character: str, length: int) -> None:
    statement = Statement("all_gatherv", terms=(("sizes", character * length), ("shape", "[*, 4]")))
    bare = unpack(pack_statement(statement))
    full = unpack(pack_statement(statement, NUMBER_MAX - 1, b"p" * PAYLOAD_BYTES_MAX))
    assert bare.call == full.call


@pytest.mark.parametrize("character", ["ü", "\0", '"', "\n", "\ud800", "\\"])
def test_a_long_reason_is_cut(character: str) -> None:
    data = pack_statement(TOLD.refused(ValueError(character * 5000)))
    assert len(data) == RECORD_BYTES
    assert unpack(data).refuses
    reason = decode(unpack(data).call).refusal
    assert reason is not None
    assert reason.startswith("ValueError: ")
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("call", "number", "payload"),
    [
        (b"x" * (CALL_BYTES_MAX + 1), 0, b""),
        (b"", NUMBER_MAX, b""),
        (b"", -1, b""),
        (b"", 0, b"x" * (PAYLOAD_BYTES_MAX + 1)),
    ],
)
def test_too_much_for_a_record_is_refused(call: bytes, number: int, payload: bytes) -> None:
    with pytest.raises(ValueError, match="too much"):
        pack(call, number, payload)


def test_bytes_of_another_length_are_no_record() -> None:
    for length in (0, RECORD_BYTES - 1, 2 * RECORD_BYTES):
        with pytest.raises(RecordError):
            unpack(bytes(length))
