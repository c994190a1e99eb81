"""The bytes that a single id stands for, which need not be whole characters."""

from __future__ import annotations

import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")
_SPACE_MARK = "\u2581"


class TokenBytes:
    """Bytes by id, for byte-level and SentencePiece-like vocabularies. Immutable."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = backend.decoder
        self._backend = backend
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._added = {
            token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._byte_of = _byte_level_alphabet()

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of one id; none for an id that the vocabulary lacks."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(self._byte_of.get(char, char.encode()) for char in token)
        byte = _BYTE_TOKEN.match(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """How byte-level BPE writes bytes: printable ones as they are, the others as characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return {char: bytes([byte]) for char, byte in zip(chars, printable + others, strict=True)}
