"""Process groups whose backend runs in a subprocess that can be killed.

`group` is the trainer's side; `fork_pool` starts the subprocesses, and is what they run; tensors pass as
shared memory (`tensor_sharing`, `cuda_sharing`), requests over one socket (`messages`). Nothing here knows
the Manager.
"""
