"""What operators see of a lighthouse: its page, its status, its metrics, over HTTP.

It reads what the lighthouse knows and decides nothing. `lighthouse.server` imports none of it.
"""
