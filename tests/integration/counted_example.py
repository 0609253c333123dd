"""examples/train_ddp.py, which also records in this rank's journal the samples that it takes in each step.

python -m tests.integration.counted_example [arguments of the example]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import library_text
import train_ddp

from torchft_like import GlobalBatchLoader
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import prepare_process

text = library_text.StandardLibraryText(train_ddp.CONTEXT)


class CountedLoader(GlobalBatchLoader):
    def __next__(self) -> Any:
        batch = super().__next__()
        samples = self.samples if self.weight else []
        manager: Any = self._manager
        journal.write("took", step=manager.current_step(), quorum_id=manager.quorum_id, samples=samples)
        return batch


if __name__ == "__main__":
    prepare_process()
    journal = Journal.of_this_process()
    setattr(train_ddp, "GlobalBatchLoader", CountedLoader)  # noqa: B010 - the example imports it
    train_ddp.main()
