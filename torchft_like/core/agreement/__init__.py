"""Whether the ranks of a group mean the same call, before any of them moves data. This is pure.

`statements` has one rank's description of its call, as a value and as bytes; `referee` finds out which
statements belong to one call, compares them, and says which ranks are missing; `prediction` foresees calls
that need no statement.

Two carriers bring statements together. `process_group.checking` has a connection from each rank to a
referee on rank 0, for collectives that stay asynchronous. `communicator` gathers records of a fixed length
over the group itself, for calls that are synchronous. Before there is a group, `group_coordinator.creation`
leaves the same records in a store. Nothing here knows tensors, groups, sockets or clocks.
"""
