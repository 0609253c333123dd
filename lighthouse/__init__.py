"""The lighthouse: who is in the quorum, over gRPC.

gRPC's own handlers of a fork crash the child where other threads speak gRPC at that moment, as those of a
trainer with data-loader workers do. They are off, which gRPC wants to know before it is imported; `net`
says so to a child that would speak gRPC itself.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
