"""The server that rank 0 of a replica group runs: it speaks for the group's ranks to the lighthouse.

`replica_group` in `core` decides; the modules here carry its messages. They must not know process groups,
checkpoints or anything else of the training thread.
"""
