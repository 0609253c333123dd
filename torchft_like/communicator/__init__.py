"""How the members of one group talk to each other, below the names of any library.

`channel` is one process group; `communicator` is the groups of the same members, what becomes of their
errors, and the agreement before a call; `collectives` moves tensors, `messages` values, and `parts` makes
groups of some of the members. Nothing here knows a Manager, or what the calls are for.
"""
