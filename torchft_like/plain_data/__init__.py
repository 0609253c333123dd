"""Nested values as bytes and tensors, and back: the one codec of messages, checkpoints and digests.

A schema is closed: a value has exactly one of the schema's types (a subclass is another type), or it is
refused. Reading can therefore never run code that a peer sent, as reading a pickle can. Coordinators, gangs
and message queues send `MESSAGES`, checkpoint transports `STATES` with DTensors, Baby groups `CALLS`;
`state_digest` has a schema of its own. They differ in their types and limits, and share one format.

A value is taken apart into a *structure*, which is bytes, and tensors, which the caller moves in its own way:
by a collective, through shared memory. Arrays, and long bytes and texts, go beside the structure as tensors
of uint8 on the same memory.

Values are kept bit for bit, and so are types, the order of keys, dtypes and shapes. Gradients and identity
are not: tensors arrive without requires_grad, a Parameter arrives as its tensor, and a value that occurs
twice arrives twice. In a state, equal views of the same memory (tied weights) are one memory again, tensors
arrive on the CPU, and a DTensor arrives as a `Shard`.

INVARIANT of reading: no length is used before it was compared with what is there and with what the reader
takes (`Limits`), so a corrupt structure costs an error, and never more memory than a small multiple of its
own size. All processes of a job must run the same version of the format; another one is refused by its first
bytes. This package does not know its senders and receivers.
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
