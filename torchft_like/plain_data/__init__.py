"""Plain data as bytes and tensors, and back, for whatever sends objects between processes.

The schema is closed: a value has exactly one of the types in `ALLOWED` (a subclass is another type), or
it does not travel. Reading can therefore never run anything that a peer sent, which a pickle does.

A value comes apart into a *structure*, which is bytes, and tensors, which the caller moves as it likes:
by a collective, through shared memory. Arrays, and bytes and texts too long to be worth a place in the
structure, go beside it as tensors of uint8 on the same memory.

What is kept: values bit for bit, types, the order of keys, dtypes and shapes. What is not: tensors need
no gradient afterwards, a Parameter arrives as the tensor in it, and what occurs twice arrives twice.

INVARIANT of reading: no length is used before it was compared with what is there, so a corrupt structure
costs an error, and never more memory than a small multiple of its own size. This module knows nothing
of who sends what to whom.
"""

from torchft_like.errors import PlainDataError
from torchft_like.plain_data.reading import LeafSource, assemble, assemble_from, tensor_specs
from torchft_like.plain_data.schema import ALLOWED, Buffer, Leaf, Message, TensorSpec
from torchft_like.plain_data.writing import disassemble, dissect

__all__ = [
    "ALLOWED",
    "Buffer",
    "Leaf",
    "LeafSource",
    "Message",
    "PlainDataError",
    "TensorSpec",
    "assemble",
    "assemble_from",
    "disassemble",
    "dissect",
    "tensor_specs",
]
