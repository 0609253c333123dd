"""A replica that reports when each piece of its start is over, and then trains as `worker` does.

It runs as a script in either package's environment, or with plain DDP, beside `worker`. Nothing that takes
time is imported at the top: each import is a piece.
"""

from __future__ import annotations

import importlib
import time

_times = {"interpreter": time.time()}


def main() -> None:
    importlib.import_module("torch")
    _times["import of torch"] = time.time()
    worker = importlib.import_module("worker")
    options = worker._options()
    worker.make_optimizer(worker.make_model(options.model))
    _times["what torch loads for a model and an optimizer"] = time.time()
    model = worker.make_model(options.model)
    if options.package == "ddp":
        trainer = worker.PlainTrainer(model, options)
        _times["process group and DistributedDataParallel"] = time.time()
    else:
        for name in ("Manager", "Optimizer", "DistributedDataParallel"):
            getattr(importlib.import_module(options.package), name)
        importlib.import_module(f"{options.package}.process_group")
        _times["import of the package"] = time.time()
        trainer = worker.ManagedTrainer(model, options)
        _times["store and Manager"] = time.time()
    worker.report(event="started", times=_times)
    worker.train_freely(trainer, options)


if __name__ == "__main__":
    main()
