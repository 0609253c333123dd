"""Which call comes next, as all ranks predict it alike.

Training is a loop, so after a few calls each one is what followed an earlier time. `Predictor` finds the
place in the history that is most like its end (the longest match counts, as in LZ77) and predicts what came
after it. As long as calls are as predicted it walks on from there, in what is then a loop. Of equally long
matches the first one counts: the latest would predict, round after round, what has just interrupted the loop.

It sees the numbers of agreements alone: each is a call on which all ranks have agreed. What one rank does
differently is no part of it.

INVARIANT: predictors that saw the same calls predict the same. So a rank whose call is the predicted one
needs no ruling: all ranks whose call is the predicted one have agreed on it before, and one that means
something else asks before it moves data.
"""

from __future__ import annotations

NO_AGREEMENT = 0
HISTORY_MAX = 4096  # calls; a loop that is longer is not recognized
MATCH_MAX = 32


class Predictor:
    """The history of a group's calls, and the prediction that follows from it."""

    def __init__(self) -> None:
        # A character for each call, because strings are searched fast.
        self._history = ""
        self._loop = ""  # the end of the history, which is predicted over and over
        self._confirmed = 0  # how many calls were as predicted since the history was written
        # The number of the agreement that is predicted.
        self.next: int = NO_AGREEMENT

    def confirm(self, calls: int = 1) -> None:
        """Count calls that were as predicted."""
        self._confirmed += calls
        if loop := self._loop:
            self.next = ord(loop[self._confirmed % len(loop)])

    def learn(self, agreement: int) -> None:
        """Take in the next call, whether or not it was predicted."""
        if agreement == self.next:
            self.confirm()
            return
        self._history = (self._history + self._confirmed_calls() + chr(agreement))[-HISTORY_MAX:]
        self._loop = self._history[_end_of_longest_match(self._history) :]
        self._confirmed = 0
        self.next = ord(self._loop[0]) if self._loop else NO_AGREEMENT

    def _confirmed_calls(self) -> str:
        """Return the calls that were as predicted, or the last `HISTORY_MAX` of them."""
        count = min(self._confirmed, HISTORY_MAX)
        start = (self._confirmed - count) % max(len(self._loop), 1)
        rounds = 2 + count // max(len(self._loop), 1)
        return (self._loop * rounds)[start : start + count] if count else ""


def _end_of_longest_match(history: str) -> int:
    """Return where the first part that is like the end of the history ends; its length if there is none."""
    for length in range(min(MATCH_MAX, len(history) - 1), 0, -1):
        place = history.find(history[-length:], 0, len(history) - 1)
        if place >= 0:
            return place + length
    return len(history)
