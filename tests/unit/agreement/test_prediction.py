"""Ranks that predict their calls: what they may leave unsaid, and that no call starts that does not fit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from torchft_like.core.agreement.prediction import HISTORY_MAX, NO_AGREEMENT, Predictor
from torchft_like.core.agreement.referee import (
    ANSWER_S_MAX,
    ENOUGH,
    NO_TICKET,
    Answer,
    Call,
    Disagreement,
    Missing,
    Problem,
    Question,
    Referee,
    Ruling,
    disagreement,
)
from torchft_like.core.agreement.statements import GATHERED, Statement


def missed(calls: Sequence[int]) -> list[int]:
    """The places of the calls that were not predicted."""
    predictor, found = Predictor(), []
    for place, call in enumerate(calls):
        if predictor.next != call:
            found.append(place)
        predictor.learn(call)
    return found


@pytest.mark.parametrize(
    ("step", "misses"),
    [
        ([1], [0, 1]),
        ([1, 2, 3], [0, 1, 2, 3]),
        ([1, 1, 2], [0, 1, 2, 3]),
        ([1, *[2] * 40, 3], [0, 1, 2, 42 - 1, 42]),
    ],
    ids=["one bucket", "three buckets", "two alike", "many layers alike"],
)
def test_a_loop_is_known_after_its_first_round(step: list[int], misses: list[int]) -> None:
    assert missed(step * 50) == misses


def test_an_evaluation_now_and_then_costs_a_few_misses_each() -> None:
    step, evaluation = [1, 2, 2, 3], [7, 8]
    calls = (step * 20 + evaluation) * 10
    assert len(missed(calls)) <= 5 + 4 + 3 * 10


def test_a_loop_goes_on_after_a_history_that_is_cut() -> None:
    calls = [1, 2, 3] * HISTORY_MAX
    before, after = missed(calls), missed([*calls, 4, *calls])
    assert before == [0, 1, 2, 3]
    assert len(after) <= len(before) + 4


@pytest.mark.parametrize("seed", range(50))
def test_calls_that_are_confirmed_together_are_like_calls_that_are_learned_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    one, other = Predictor(), Predictor()
    for _ in range(40):
        call = dice.randint(1, 3)
        one.learn(call)
        other.learn(call)
        count = dice.choice([0, 1, 5, 5000]) if one.next != NO_AGREEMENT else 0
        for _ in range(count):
            one.learn(one.next)
        other.confirm(count)
        assert one.next == other.next


# Ranks and their referee.


class Player:
    """A rank, as `process_group.checking` is one."""

    def __init__(self, rank: int, program: Sequence[Statement]) -> None:
        self.rank = rank
        self.program = deque(program)
        self.started: list[Statement | None] = []  # in the order of numbers; None for a call that was refused
        self.problems: list[Problem] = []
        self.inbox: deque[Answer] = deque()
        self.outbox: deque[Call | int] = deque()  # calls, and the numbers that it has passed
        self.stated = 0
        self._pending: deque[Call] = deque()
        self._agreed: dict[int, Statement] = {}
        self._predictor = Predictor()
        self._number = 0
        self._told_until = 0
        self.is_free = False  # nothing is compared any more
        self.is_over = False

    def call(self) -> None:
        """Make the next call of the program."""
        statement = self.program.popleft()
        self._number += 1
        if not self._pending and self.is_free:
            self.started.append(statement)
        elif not self._pending and self._agreed.get(self._predictor.next) == statement:
            self._predictor.confirm()
            self.started.append(statement)
            if self._number <= self._told_until:
                self.outbox.append(self._number)
        else:
            call = Call(self.rank, self._number, statement, 0.0, 60.0, self._number)
            self.stated += 1
            self._pending.append(call)
            self.outbox.append(call)

    def hear(self) -> None:
        """Take one answer of the referee."""
        answer = self.inbox.popleft()
        if isinstance(answer, Question):
            self._told_until = max(self._told_until, answer.number)
            self.outbox.append(self._number)
            return
        self.is_over = self.is_over or answer.is_final
        if answer.problem is not None:
            self.problems.append(answer.problem)
        if answer.ticket == NO_TICKET:
            return
        call = self._pending.popleft()
        assert answer.ticket == call.ticket
        self.started.append(call.statement if answer.problem is None else None)
        if answer.problem is None:
            self.is_free = self.is_free or answer.agreement == ENOUGH
            if not self.is_free:
                self._agreed.setdefault(answer.agreement, call.statement)
                self._predictor.learn(answer.agreement)

    @property
    def waits(self) -> bool:
        return bool(self._pending)


class Game:
    """Ranks that run their programs, and messages that take their time."""

    def __init__(self, programs: Sequence[Sequence[Statement]], seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.players = [Player(rank, program) for rank, program in enumerate(programs)]
        self.referee = Referee(len(programs), predicts=True)

    def play(self, keeps_in_step: bool = False) -> None:
        """Do what can be done, in any order, until nothing can."""
        while moves := [move for player in self.players for move in self._moves(player, keeps_in_step)]:
            player, act = self.dice.choice(moves)
            if act == "call":
                player.call()
            elif act == "hear":
                player.hear()
            else:
                self._judge(player)

    def _moves(self, player: Player, keeps_in_step: bool) -> list[tuple[Player, str]]:
        # A collective is over when all ranks have started it; a script that waits for each one goes on then.
        slowest = min(len(each.started) for each in self.players)
        may_call = not player.is_over and (
            not keeps_in_step or (not player.waits and len(player.started) == slowest)
        )
        moves = [(player, "call")] if player.program and may_call else []
        moves += [(player, "hear")] if player.inbox else []
        return moves + ([(player, "judge")] if player.outbox else [])

    def _judge(self, player: Player) -> None:
        said = player.outbox.popleft()
        answers = self.referee.passed(player.rank, said) if isinstance(said, int) else self.referee.hear(said)
        for answer in answers:
            self.players[answer.rank].inbox.append(answer)

    def assert_nothing_started_that_does_not_fit(self) -> None:
        for number in range(max(len(player.started) for player in self.players)):
            started = [player.started[number] for player in self.players if number < len(player.started)]
            ran = [each for each in started if each is not None]
            assert len(set(ran)) <= 1, f"#{number + 1}: {ran}"


CALLS = [Statement("allreduce", inputs=(f"float32[{size}]",)) for size in range(6)]


def loop(dice: random.Random) -> list[Statement]:
    """A training script: steps of a few collectives, and others now and then."""
    step = [dice.choice(CALLS[:4]) for _ in range(dice.randint(1, 5))]
    program: list[Statement] = []
    for _ in range(dice.randint(1, 12)):
        program += step
        if dice.random() < 0.2:
            program += [dice.choice(CALLS) for _ in range(dice.randint(1, 3))]
    return program


@pytest.mark.parametrize("keeps_in_step", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_a_right_program_runs_to_its_end_in_every_interleaving(seed: int, keeps_in_step: bool) -> None:
    dice = random.Random(seed)
    program = loop(dice)
    game = Game([program] * dice.randint(2, 4), seed)
    game.play(keeps_in_step)
    for player in game.players:
        assert player.started == program
        assert player.problems == []
    if keeps_in_step:  # all of them predict alike, so all state the same calls
        assert len({player.stated for player in game.players}) == 1


@pytest.mark.parametrize("keeps_in_step", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_of_a_wrong_program_no_call_starts_that_does_not_fit_and_all_ranks_are_told(
    seed: int, keeps_in_step: bool
) -> None:
    """One rank makes another call somewhere, leaves one out, or makes one too many."""
    dice = random.Random(seed)
    program = loop(dice)
    wrong = list(program)
    at = dice.randrange(len(wrong))
    others = [call for call in CALLS if call != wrong[at]]
    wrong[at : at + 1] = dice.choice([[dice.choice(others)], [], [dice.choice(others), wrong[at]]])
    programs = [program] * dice.randint(1, 3) + [wrong]
    dice.shuffle(programs)
    game = Game(programs, seed)
    game.play(keeps_in_step)
    game.assert_nothing_started_that_does_not_fit()
    first = next((n for n in range(min(len(program), len(wrong))) if program[n] != wrong[n]), None)
    if first is None:
        return  # only its end is missing: nobody else can tell before a timeout
    for player in game.players:
        assert [type(problem) for problem in player.problems[:1]] == [Disagreement]
        problem = player.problems[0]
        assert isinstance(problem, Disagreement)
        assert all(f"#{first + 1} " in text for text in problem.calls.values())


def test_a_call_that_is_wrong_among_known_ones_is_refused_and_ends_the_group() -> None:
    """Every rank has made both calls before, only in another order."""
    one, two = CALLS[1], CALLS[2]
    game = Game([[one, two] * 4 + [one], [one, two] * 4 + [two]])
    game.play(keeps_in_step=True)
    right, wrong = game.players
    assert right.started[8:] == [one]  # its peers never come, and it is told why
    assert wrong.started[8:] == [None]
    assert right.problems == wrong.problems
    assert right.problems[0] == Disagreement(
        "shape", {0: "allreduce #9 float32[1]", 1: "allreduce #9 float32[2]"}
    )
    assert right.is_over
    assert wrong.is_over


def test_a_rank_whose_backend_has_failed_hears_the_verdict_before_anything_else() -> None:
    game = Game([[CALLS[1]] * 5 + [CALLS[2]], [CALLS[1]] * 6])
    assert game.referee.why(1, 0, 0.0, 0.0) == [Ruling(1, NO_TICKET)]  # nothing is known
    game.play(keeps_in_step=True)
    problem = game.players[1].problems[0]
    assert game.referee.why(1, 0, 0.0, 0.0) == [Ruling(1, NO_TICKET, problem, is_final=True)]


def test_a_rank_that_does_not_come_to_a_call_that_others_have_begun_is_named_to_all() -> None:
    """Rank 0 means another call, rank 1 is in the predicted one, and rank 2 never comes."""
    call, other = CALLS[1], CALLS[2]
    game = Game([[call] * 5 + [other], [call] * 6, [call] * 5])
    game.play(keeps_in_step=True)
    assert not any(player.problems for player in game.players)
    for answer in game.referee.expire(60.0):
        game.players[answer.rank].inbox.append(answer)
    game.play()
    zero, one, _ = game.players
    assert zero.problems == one.problems == [Missing((2,), {0: ("allreduce #6 float32[2]",)}, seconds=60.0)]


@pytest.mark.parametrize(
    ("how", "missing"), [("behind", (2,)), ("silent", (3,)), ("lost", (3,)), ("not known", ())]
)
def test_the_rank_that_a_predicted_call_waits_for_is_named_to_all_that_are_in_it(
    how: str, missing: tuple[int, ...]
) -> None:
    """Two ranks are in a predicted call, which times out; rank 2 is not, or rank 3 is stopped, or gone."""
    call = CALLS[1]
    game = Game([[call] * (5 + (rank != 2 or how != "behind")) for rank in range(4)])
    game.play(keeps_in_step=True)
    heard: dict[int, list[Ruling]] = {rank: [] for rank in range(4)}

    def take(answers: Sequence[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, Ruling):
                heard[answer.rank].append(answer)
            elif how == "lost" and answer.rank == 3:
                take(game.referee.lose(3))
            elif not (how == "silent" and answer.rank == 3):
                take(game.referee.passed(answer.rank, len(game.players[answer.rank].started)))

    take(game.referee.why(1, 6, 3.0, now_s=10.0))
    take(game.referee.why(0, 6, 3.0, now_s=10.1))
    assert (game.referee.next_deadline_s() is None) == (how != "silent")
    take(game.referee.expire(10.0 + ANSWER_S_MAX))
    own = heard[1][0]
    assert all(ruling == replace(own, rank=ruling.rank) for ruling in heard[0] + heard[1])
    assert own.is_final is bool(missing)
    if isinstance(own.problem, Missing):
        assert own.problem.ranks == missing
        assert own.problem.lost is (how == "lost")
        assert own.problem.seconds == 3.0
        assert own.problem.waiting[0] == ("collective #6",)
    else:
        assert missing == ()


def test_a_lost_rank_is_told_of_to_who_waits() -> None:
    game = Game([[CALLS[1]] * 5 + [CALLS[2]], [CALLS[1]] * 5])
    game.play(keeps_in_step=True)
    assert game.players[0].waits
    (ruling,) = game.referee.lose(1)
    assert isinstance(ruling, Ruling)
    assert isinstance(ruling.problem, Missing)
    assert ruling.problem.lost


def test_a_part_that_only_its_own_rank_sees_may_change() -> None:
    """The root's own part of a gather: the others, as predicted, say nothing, and it fits them."""
    own, fours = "float32[2]", "float32[4]"
    root = Statement("gather", GATHERED, (fours,), (fours, fours), root=0)
    changed = replace(root, inputs=(own,), outputs=(own, fours))
    part = Statement("gather", GATHERED, (fours,), (), root=0)
    assert disagreement([changed, part]) is None
    game = Game([[root] * 4 + [changed] * 2 + [root] * 4, [part] * 10])
    game.play(keeps_in_step=True)
    assert [len(player.started) for player in game.players] == [10, 10]
    assert not any(player.problems for player in game.players)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_rank_that_skips_calls_which_nobody_can_predict_is_refused(number: int) -> None:
    referee = Referee(2, predicts=True)
    referee.hear(Call(0, 1, CALLS[0], 0.0, 60.0, 1))
    with pytest.raises(ValueError, match="after"):
        referee.hear(Call(0, 2, CALLS[0], 0.0, 60.0, number))
