"""Text that stands for what a model would say: a function of the ids before it."""

from __future__ import annotations

import re
import zlib

import numpy as np
import numpy.typing as npt

from ..tokenizer.tokenizer import Tokenizer
from ..wire import Ids, Sampling

U64 = npt.NDArray[np.uint64]
_WORD = re.compile("[▁Ġ][A-Za-z][A-Za-z0-9]+")
_FEWEST = 16


class MadeUpText:
    """Chooses the ids of outputs. One for all engines of a tokenizer; immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.backend.get_vocab(with_added_tokens=False)
        words = sorted(token_id for token, token_id in vocab.items() if _WORD.fullmatch(token))
        if len(words) < _FEWEST:
            ends = tokenizer.eos_ids | {tokenizer.bos_id}
            words = sorted(i for i in vocab.values() if i not in ends and _is_text(tokenizer.decode([i])))
        self._words = np.array(words, dtype=np.int32)
        self._eos_id = min(tokenizer.ends_below(tokenizer.vocab_size), default=None)

    def output(self, context: Ids, sampling: Sampling) -> Ids:
        """All ids of the output behind ``context`` (int32 [n]): the most it may have, unless it may end by
        itself. The client's seed makes it another one."""
        seed = zlib.crc32(np.ascontiguousarray(context).tobytes(), (sampling.seed or 0) & 0xFFFFFFFF)
        count, fewest = sampling.max_tokens, max(sampling.min_tokens, 1) + 1
        eos_id = None if sampling.ignore_eos or fewest > count else self._eos_id
        if eos_id is not None:
            count = fewest + int(_mix(seed, -1, 1)[0]) % (count - fewest + 1)
        ids: Ids = self._words[_mix(seed, 0, count) % np.uint64(len(self._words))]
        if eos_id is not None:
            ids[-1] = eos_id
        return ids


def _mix(seed: int, start: int, count: int) -> U64:
    """uint64 [count]: splitmix64 of seed and position."""
    with np.errstate(over="ignore"):
        x = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _is_text(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()
