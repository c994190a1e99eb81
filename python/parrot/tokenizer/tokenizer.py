"""The tokenizer of a Hugging Face model directory: ids to text and back, control tokens, BOS and EOS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers

from ..errors import ModelFileError
from ..wire import Ids
from .layout import TokenizerLayout, literal_backends

JsonObject = Mapping[str, object]


def read_json(path: Path, *, optional: bool = False) -> JsonObject:
    """The object in a JSON file. Raises :class:`ModelFileError` naming the file and the fix."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing; download or convert the model again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} cannot be read ({error}); download or convert the model again"
        ) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object; download or convert the model again")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Wraps ``tokenizers.Tokenizer``. Immutable, so that any number of threads may use it.

    ``backend`` is the tokenizer as it was loaded (what ``DecodeStream`` needs). Literal text, in which a
    control string such as ``<|im_end|>`` is text, goes through ``literal`` at the start of a run and through
    ``literal_middle`` elsewhere: the two differ where the tokenizer puts a space before a run.
    """

    backend: tokenizers.Tokenizer
    literal: tokenizers.Tokenizer
    literal_middle: tokenizers.Tokenizer
    layout: TokenizerLayout
    vocab_size: int
    bos_id: int | None
    add_bos: bool  # a prompt starts with BOS whether or not its text does
    eos_ids: frozenset[int]
    fingerprint: str  # equal for tokenizers that give equal ids and render equal chats
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token ... by role

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the token ids of (generation_)config.json.

        Raises :class:`ModelFileError` for a missing or malformed file.
        """
        path = directory / "tokenizer.json"
        spec = read_json(path)
        config = read_json(directory / "tokenizer_config.json", optional=True)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise ModelFileError(f"{path} is not a tokenizer ({error}); download it again") from None
        backend.no_truncation()
        backend.no_padding()
        chat_template = _chat_template(directory, config)
        special_tokens = _special_tokens(config)
        layout, literal, middle = literal_backends(spec, chat_template or "")
        bos_id = _token_id(backend, special_tokens.get("bos_token"))
        return cls(
            backend=backend,
            literal=literal,
            literal_middle=middle,
            layout=layout,
            vocab_size=backend.get_vocab_size(with_added_tokens=True),
            bos_id=bos_id,
            add_bos=bos_id is not None and _adds_bos(backend, config, bos_id),
            eos_ids=_eos_ids(directory, backend, special_tokens),
            fingerprint=_fingerprint(spec, config, chat_template),
            chat_template=chat_template,
            special_tokens=special_tokens,
        )

    @property
    def can_constrain(self) -> bool:
        """Whether tokens are known as bytes, as constrained decoding needs; whole words are not."""
        parts = (self.backend.decoder, self.backend.pre_tokenizer)
        states = [part.__getstate__() for part in parts if part is not None]
        return any(kind in state for state in states for kind in (b"ByteLevel", b"ByteFallback"))

    def ends_below(self, vocab_size: int) -> frozenset[int]:
        """The ids that end an output of a model with so many; its files may name others besides."""
        return frozenset(token for token in self.eos_ids if 0 <= token < vocab_size)

    def encode(self, text: str) -> Ids:
        """Ids of one run of literal text: no BOS, and control strings in it stay text. int32 [n]."""
        return np.array(self.literal.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)


def _chat_template(directory: Path, config: JsonObject) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: JsonObject) -> dict[str, str]:
    found: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = config.get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[role] = token
    return found


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _adds_bos(backend: tokenizers.Tokenizer, config: JsonObject, bos_id: int) -> bool:
    """What the configuration says, else what the post-processor of tokenizer.json does."""
    configured = config.get("add_bos_token")
    if isinstance(configured, bool):
        return configured
    return backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _eos_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    found: list[object] = [_token_id(backend, special_tokens.get("eos_token"))]
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name, optional=True).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return frozenset(token for token in found if isinstance(token, int))


def _fingerprint(spec: JsonObject, config: JsonObject, chat_template: str | None) -> str:
    content = json.dumps(
        [spec, _special_tokens(config), config.get("add_bos_token"), chat_template], sort_keys=True
    )
    return hashlib.sha256(content.encode()).hexdigest()[:32]
