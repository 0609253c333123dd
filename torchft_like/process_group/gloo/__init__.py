"""The process group over Gloo.

`group` is the group, `device` ends its sockets when it is aborted, `gaps` mends the collectives that Gloo
lacks or gets wrong. Nothing here knows the Manager, or which group wraps this one.
"""
