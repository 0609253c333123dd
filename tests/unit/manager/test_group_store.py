"""The stores of a replica group: who serves which, and which ones a job goes on without."""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import HashStore

from tests.stores import serve_store
from torchft_like.manager.config import ManagerArguments, resolve
from torchft_like.manager.group_store import open_group_store


def environment(port: int, is_agents: bool) -> dict[str, str]:
    return {
        "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(is_agents),
    }


def test_process_groups_meet_in_a_store_of_rank_0_and_not_in_torchruns() -> None:
    agents = serve_store()
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(agents.port, is_agents=True))
    first = open_group_store(config)
    second = open_group_store(replace(config, group_rank=1))
    first.shared.set("manager", "here")
    assert second.shared.get("manager") == b"here"
    assert second.meeting_place is None
    assert first.meeting_place is not None
    assert first.meeting_place.address.server.port != agents.port


def test_rank_0_serves_the_store_that_the_user_has_named_where_torchrun_does_not() -> None:
    free = serve_store()
    port = free.port
    del free
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(port, is_agents=False))
    first = open_group_store(config)
    second = open_group_store(replace(config, group_rank=1))
    first.shared.set("manager", "here")
    assert second.shared.get("manager") == b"here"


def test_a_group_of_one_rank_needs_no_store_of_the_users() -> None:
    config = resolve(ManagerArguments(), {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1"})
    store = open_group_store(config)
    assert isinstance(store.shared, HashStore)
    assert store.meeting_place is not None
