"""The stores of a replica group: who serves which, and which ones a job goes on without."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.stores import serve_store
from torchft_like.manager.config import ManagerArguments, resolve
from torchft_like.manager.group_store import open_group_store
from torchft_like.process_group.store import create_store_client

LIMIT = timedelta(seconds=60)


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
    assert (second.served, second.meeting_place) == (None, None)
    assert first.meeting_place is not None
    assert first.meeting_place.port != agents.port
    del agents, second
    for text in ("one", "other"):
        client = create_store_client(f"{first.meeting_place}/{text}", LIMIT)
        client.set("who", text)
        assert client.get("who") == text.encode()


def test_rank_0_serves_one_store_for_both_where_torchrun_does_not() -> None:
    free = serve_store()
    port = free.port
    del free
    config = resolve(ManagerArguments(rank=0, world_size=2), environment(port, is_agents=False))
    store = open_group_store(config)
    assert store.served is store.shared
    assert store.meeting_place == config.store
