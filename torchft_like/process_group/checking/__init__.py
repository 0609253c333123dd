"""A check that every rank means the same collective, before any data moves.

`core.agreement`, which is pure, says what must agree and which rank waits for which. Here `link` carries the
ranks' statements to a referee on rank 0, and `backend` makes a statement of each call, in front of any
backend. Which rule a collective follows is a field of its row. docs/checking-collectives.md is the user's
view, and says why torch's own check is not enough.
"""
