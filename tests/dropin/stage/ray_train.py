"""A driver for Ray Train, as its users write them: Ray's own example of torchft in a longer run.

The example's own driver has `FailureConfig()`, with which the first failure ends the run.
"""

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.examples.pytorch.torchft_linear_example import train_func
from ray.train.v2.torch.torchft_config import TorchftConfig


def main(storage_path: str) -> None:
    ray.init(num_cpus=8, include_dashboard=False)
    TorchTrainer(
        train_func,
        train_loop_config={"num_steps": 10**9, "training_requires_all_workers": False},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(storage_path=storage_path, failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
