"""Communication between the members of one group, below the interfaces of other libraries.

`channel` is one process group; `communicator` has the groups of the same members, the handling of their
errors, and the agreement before a call; `collectives` moves tensors, `messages` values, and `parts` makes
groups of some of the members. Nothing here knows a Manager, or the purpose of the calls.
"""
