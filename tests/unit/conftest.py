"""Members of groups that are threads of one process, for every unit test that asks for them."""

from __future__ import annotations

from tests.unit.process_group.conftest import party, store

__all__ = ["party", "store"]
