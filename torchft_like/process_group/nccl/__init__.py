"""The process group over NCCL.

`group` is the group, `work` its works, `device_watch` looks at the GPU so that no wait is for ever. Nothing
here knows the Manager, or which group wraps this one.
"""
