"""The server that rank 0 of a replica group runs: it speaks for the group's ranks to the lighthouse.

`core.replica_group` decides; the modules here carry its messages, `rank_link` the rank's end of them. They
must not know the Manager, process groups, or anything else of the training thread.
"""
