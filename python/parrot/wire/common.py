"""What messages of both directions have in common: ids, versions, and token ids as bytes."""

from __future__ import annotations

from typing import Literal, NewType

import numpy as np
import numpy.typing as npt

from ..errors import ParrotError

PROTOCOL_VERSION = 4

CallId = NewType("CallId", int)  # unique for the life of a manager, never reused
PUBLIC_DOMAIN = 0  # of text that the operator published; tenants have numbers from 1
ContextId = NewType("ContextId", int)  # unique for the life of a manager, never reused; 0 = no context
Ids = npt.NDArray[np.int32]
_INT32 = np.dtype("<i4")
Objective = Literal["LATENCY", "THROUGHPUT"]
FinishReason = Literal["stop", "length"]


class WireError(ParrotError):
    """A frame that is not a message of this protocol."""

    code = "wire_error"


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype=_INT32).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Inverse of :func:`pack_ids`; a read-only int32 array of shape [len(data) / 4]."""
    if len(data) % 4:
        raise WireError(f"token ids of {len(data)} bytes are not a whole number of int32")
    return np.frombuffer(data, dtype=_INT32)


def max_cached_contexts(num_blocks: int) -> int:
    """Contexts of ended calls that an engine keeps, the newest, and that the manager knows of it. Many can
    end in the same few blocks, so that the cache alone would not bound them."""
    return max(1024, num_blocks)
