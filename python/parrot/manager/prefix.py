"""PrefixHash, a primitive of the graph: who will share a prompt's beginning (paper sections 4.2 and 5.3)."""

from __future__ import annotations

import hashlib

from .call import Call, InputPart, OutputPart, Part

# Bytes that UTF-8 never contains keep markers apart from text, so that equal text gives equal hashes however
# it is cut into parts.
_PENDING, _MESSAGE, _HEAD = b"\xff", b"\xfe", b"\xfd"


def prefix_hashes(call: Call, *, key: bytes, default_model: str) -> list[bytes]:
    """The keyed 128-bit hash of everything before each boundary: entry ``b`` covers model, domain, and the
    first ``b`` of ``call.parts``; there are ``len(call.parts) + 1`` entries.

    A variable without a value stands for itself, with the transforms on its way: calls that share it have
    equal hashes before it exists, and the hash changes to that of its text when it does.
    """
    hasher = hashlib.blake2b(key=key, digest_size=16)
    hasher.update(_HEAD.join((b"", _encode(call.model or default_model), str(call.domain).encode(), b"")))
    message = -1
    hashes = [hasher.digest()]
    for part in call.parts:
        if call.roles is not None:
            for role in call.roles[message + 1 : part.message + 1]:
                hasher.update(_MESSAGE + role.encode() + _MESSAGE)
            message = max(message, part.message)
        hasher.update(_content(call, part))
        hashes.append(hasher.digest())
    return hashes


def _content(call: Call, part: Part) -> bytes:
    if isinstance(part, OutputPart):
        if part.binding.raw is not None:
            return _encode(part.binding.raw)
        return _mark(call, part.binding.variable.id, "raw")
    if isinstance(part, InputPart):
        binding = part.binding
        if binding.text is not None:
            return _encode(binding.text)
        return _mark(call, binding.variable.id if binding.variable is not None else "", binding.chain.key)
    return _encode(part.text)


def _mark(call: Call, var_id: str, chain_key: str) -> bytes:
    fields = (call.session_id, var_id, chain_key)
    return _PENDING + b"".join(_encode(field) + _PENDING for field in fields)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
