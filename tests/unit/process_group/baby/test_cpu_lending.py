"""Lending CPU tensors: what is said to the subprocess before a request."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from torchft_like.process_group.baby.cpu_lending import CpuLender
from torchft_like.process_group.baby.cpu_memory import Staging
from torchft_like.process_group.baby.protocol import ToChild


def test_letters_come_in_order_and_each_once() -> None:
    staging = Staging()
    lender = CpuLender(staging)
    blocks = [lender.stage(torch.zeros(size))[0] for size in (10, 1_000_000)]
    letters = []
    while (letter := lender.next_letter()) is not None:
        letters.append(letter)
        lender.letter_sent()
    assert [(message[0], message[2]) for message, _ in letters] == [
        (ToChild.MAP, block.segment.number) for block in blocks
    ]
    staging.close()


def test_a_lender_that_is_closed_while_a_letter_is_sent_lets_the_sender_finish() -> None:
    staging = Staging()
    lender = CpuLender(staging)
    for size in (10, 1_000_000):
        lender.stage(torch.zeros(size))
    letter = lender.next_letter()
    assert letter is not None
    (descriptor,) = letter[1]
    lender.close()
    staging.close()
    gc.collect()
    os.fstat(descriptor)  # it may be on its way
    lender.letter_sent()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert lender.next_letter() is None
