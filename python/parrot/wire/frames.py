"""Messages as frames of the socket, and back."""

from __future__ import annotations

import msgspec

from .common import WireError
from .from_engine import FromEngine
from .to_engine import ToEngine

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises :class:`WireError` for anything that is not a message for an engine."""
    try:
        return _to_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message for an engine: {error}") from None


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises :class:`WireError` for anything that is not a message from an engine."""
    try:
        return _from_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message from an engine: {error}") from None
