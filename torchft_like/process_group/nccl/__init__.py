"""The process group over NCCL.

`group` is the group; `device_watch` has its operations, and looks at the GPU so that no wait is for ever.
Nothing here knows the Manager, or which group wraps this one.
"""
