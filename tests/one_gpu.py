"""Several ranks of NCCL on one GPU, one in each process.

NCCL refuses two ranks on one device of one host. It knows a device by its bus id and a host by a hash,
which is of NCCL_HOSTID where that is set (NCCL 2.28.9: src/misc/utils.cc, src/init.cc). With another one in
each process the ranks are on hosts of their own, and sockets connect them. The driver gives the processes
the device in turn, so such a group is slow; how it reduces and fails is how NCCL does between hosts.
"""

from __future__ import annotations


def host_of_its_own(name: str) -> dict[str, str]:
    """Environment variables for one process, before its first group; `name` is no other process's."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}
