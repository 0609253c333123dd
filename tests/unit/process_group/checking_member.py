"""A rank for test_checking_life, which has two: they reduce tensors of different shapes, after some that fit.

`checking_member.py STORE_ADDRESS RANK FITTING`
"""

from __future__ import annotations

import sys

import torch

from torchft_like.errors import CollectiveMismatchError
from torchft_like.process_group import ProcessGroupGloo


def main(store_address: str, rank: int, fitting: int) -> None:
    group = ProcessGroupGloo(30)
    group.configure(store_address, rank, 2)
    for _ in range(fitting):
        group.allreduce([torch.ones(4)]).wait()
    try:
        group.allreduce([torch.ones(4 + 4 * rank)]).wait()
    except CollectiveMismatchError as error:
        print(f"refused: {error}")
    group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
