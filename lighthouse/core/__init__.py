"""The lighthouse's decisions: who is in the next quorum, and why.

Everything here is pure: events and the time come as arguments, decisions are returned. It must not know
gRPC, sockets, threads, logging or the clock.
"""
