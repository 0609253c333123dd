"""Communication between the members of one group, below the interfaces of other libraries.

`communicator` has the groups of the same members, the handling of their errors, and the agreement before a
call; `collectives` moves tensors, `messages` values. Nothing here knows a Manager, or the purpose of the
calls.
"""
