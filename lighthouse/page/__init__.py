"""What operators see of a lighthouse: its page, its status, its metrics, over HTTP.

It reads what the lighthouse knows and decides nothing. Whoever imports `lighthouse.server` loads none of it.
"""
