"""One small tokenizer of each kind that matters for cutting text, as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from parrot.tokenizer.layout import LLAMA3_SPLIT, QWEN2_SPLIT
from tiny_models import (
    CHATML,
    CONTROL,
    CORPUS,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    write_tokenizer,
)


def _byte_level(
    split: str | None, *, normalizer: normalizers.Normalizer | None = None, space: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=split is None)
    steps = [level] if split is None else [pre_tokenizers.Split(Regex(split), "isolated"), level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metaspace(scheme: str, *, split: bool, model: models.Model, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _metaspace_bpe(scheme: str, *, split: bool) -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    return _metaspace(
        scheme,
        split=split,
        model=models.BPE(unk_token="<unk>", fuse_unk=True),
        trainer=trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, show_progress=False, limit_alphabet=70
        ),
    )


def _metaspace_without_unknown() -> Tokenizer:
    """Characters that the vocabulary lacks vanish, so that their neighbours may merge."""
    return _metaspace(
        "first",
        split=False,
        model=models.BPE(),
        trainer=trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False, limit_alphabet=50
        ),
    )


def _unigram() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    return _metaspace("always", split=True, model=models.Unigram(), trainer=trainer)


def _stripping() -> Tokenizer:
    """Control tokens that swallow the white space behind them."""
    tokenizer = _byte_level(None)
    tokens = [AddedToken(token, special=True, normalized=False, rstrip=True) for token in CONTROL[1:]]
    tokenizer.add_special_tokens(tokens)
    return tokenizer


def _with_text_tokens() -> Tokenizer:
    """Added tokens that are ordinary text: runs of spaces."""
    tokenizer = _byte_level(None)
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in (2, 3, 4, 8)])
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level-digits": byte_level_tokenizer,
    "byte-level-gpt2": lambda: _byte_level(None),
    "byte-level-llama3": lambda: _byte_level(LLAMA3_SPLIT),
    "byte-level-qwen2-nfc": lambda: _byte_level(QWEN2_SPLIT, normalizer=normalizers.NFC()),
    "byte-level-prefix-space": lambda: _byte_level(None, space=True),
    "byte-level-unknown-regex": lambda: _byte_level(r"\p{L}{1,5}|[^\p{L}]+?(?=\p{L}|$)"),
    "byte-level-lowercase": lambda: _byte_level(None, normalizer=normalizers.Lowercase()),
    "byte-level-stripping": _stripping,
    "byte-level-text-tokens": _with_text_tokens,
    "sentencepiece-prepend": sentencepiece_tokenizer,
    "metaspace-first": lambda: _metaspace_bpe("first", split=False),
    "metaspace-always-split": lambda: _metaspace_bpe("always", split=True),
    "metaspace-never": lambda: _metaspace_bpe("never", split=False),
    "metaspace-no-unknown": _metaspace_without_unknown,
    "unigram": _unigram,
}
FULLY_CUT = [
    name
    for name in BUILDERS
    if name not in ("byte-level-unknown-regex", "byte-level-lowercase", "byte-level-text-tokens")
]


def write_zoo(root: Path) -> dict[str, Path]:
    """Every tokenizer in a directory of its own."""
    directories = {}
    for name, build in BUILDERS.items():
        tokenizer = build()
        roles = {"bos_token": "<s>", "eos_token": "</s>"}
        if tokenizer.token_to_id("<s>") is None:
            roles = {"eos_token": "<|im_end|>"}
        directories[name] = write_tokenizer(root / name, tokenizer, chat_template=CHATML, **roles)
    return directories
