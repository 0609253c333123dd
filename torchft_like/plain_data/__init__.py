"""Nested values as bytes and tensors, and back: the one codec of messages, checkpoints and digests.

A schema is closed: a value has exactly one of the schema's types (a subclass is another type), or it does
not travel. Reading can therefore never run anything that a peer sent, which a pickle does. Coordinators,
gangs and message queues send `MESSAGES`, checkpoint transports `STATES` with DTensors, Baby groups `CALLS`;
`state_digest` has a schema of its own. They differ in their types and limits, and share one format.

A value comes apart into a *structure*, which is bytes, and tensors, which the caller moves as it likes:
by a collective, through shared memory. Arrays, and bytes and texts too long to be worth a place in the
structure, go beside it as tensors of uint8 on the same memory.

What is kept: values bit for bit, types, the order of keys, dtypes and shapes. What is not: tensors need
no gradient afterwards, a Parameter arrives as the tensor in it, and what occurs twice arrives twice; of a
state, equal views of the same memory (tied weights) are one memory again, tensors arrive on the CPU, and a
DTensor arrives as a `Shard`.

INVARIANT of reading: no length is used before it was compared with what is there and with what the reader
takes (`Limits`), so a corrupt structure costs an error, and never more memory than a small multiple of its
own size. All processes of a job must run the same version of the format; another one is refused by its first
bytes. This module knows nothing of who sends what to whom.
"""

from torchft_like.errors import PlainDataError
from torchft_like.plain_data.messages import (
    assemble,
    assemble_from,
    decode,
    disassemble,
    dissect,
    encode,
    tensor_specs,
)
from torchft_like.plain_data.reading import LeafSource, Structure
from torchft_like.plain_data.schema import (
    ALLOWED,
    Buffer,
    Layout,
    Leaf,
    Limits,
    Message,
    Schema,
    Shard,
    TensorSpec,
    bytes_of,
    nbytes_of,
    shown,
)
from torchft_like.plain_data.schemas import CALLS, MESSAGES, STATES
from torchft_like.plain_data.writing import Sheet, Unfit, UnfitType, encoded_bytes, list_of, write

__all__ = [
    "ALLOWED",
    "CALLS",
    "MESSAGES",
    "STATES",
    "Buffer",
    "Layout",
    "Leaf",
    "LeafSource",
    "Limits",
    "Message",
    "PlainDataError",
    "Schema",
    "Shard",
    "Sheet",
    "Structure",
    "TensorSpec",
    "Unfit",
    "UnfitType",
    "assemble",
    "assemble_from",
    "bytes_of",
    "decode",
    "disassemble",
    "dissect",
    "encode",
    "encoded_bytes",
    "list_of",
    "nbytes_of",
    "shown",
    "tensor_specs",
    "write",
]
