"""The decisions of replica groups and ranks.

Everything here is pure: events and the time come as arguments, decisions are returned. It must not know
torch, gRPC, sockets, threads, logging or the clock.
"""
