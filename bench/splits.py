"""Where two greedy texts of one prompt part: how close the two tokens were.

Batches of different shapes round differently, so greedy decoding may part at a near tie. The gap between the
two largest logits there, computed alone and in one piece, tells a near tie from an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from parrot.engine.batch import BLOCK_SIZE, PagedKV, StepBatch
from parrot.engine.model import DecoderModel
from parrot.tokenizer import Piece, PromptEncoder, Tokenizer, render_chat

NEAR_TIE = 1e-3

Message = tuple[str, str]  # role, content


def top2_gap(directory: Path, messages: Sequence[Message], first: str, second: str, max_tokens: int) -> float:
    """Gap between the two largest logits at the token where greedy decoding leaves what ``first`` and
    ``second`` have in common. ``directory``: the model's. Infinite if it stays within for ``max_tokens``."""
    tokenizer, model = _load(directory)
    common = _common_prefix(first, second)
    ids = _prompt_ids(tokenizer, messages)
    kv = PagedKV.allocate(model.config, -(-(len(ids) + max_tokens) // BLOCK_SIZE), torch.float32, "cpu")
    step, generated, length = ids, [], 0
    for _ in range(max_tokens):
        logits = _forward(model, kv, step, length)
        length += len(step)
        largest = torch.topk(logits, 2)
        step = [int(largest.indices[0])]
        generated += step
        text = tokenizer.decode(np.asarray(generated, dtype=np.int32)).rstrip("\ufffd")
        if not common.startswith(text):
            return float(largest.values[0] - largest.values[1])
    return float("inf")


def _prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    chat = render_chat(tokenizer, [role for role, _ in messages], add_generation_prompt=True)
    pieces = [
        Piece(messages[part][1]) if isinstance(part, int) else Piece(part, control=True) for part in chat
    ]
    return [int(token) for token in PromptEncoder(tokenizer).encode(pieces).token_ids]


def _forward(model: DecoderModel, kv: PagedKV, ids: list[int], start: int) -> torch.Tensor:
    """Logits [vocab] after the last of ``ids``, which lie at position ``start`` of the only sequence."""
    positions = torch.arange(start, start + len(ids))
    batch = StepBatch(
        token_ids=torch.tensor(ids),
        positions=positions,
        slots=positions,
        query_start=[0, len(ids)],
        seq_lens=[start + len(ids)],
        block_tables=torch.arange(kv.k[0].shape[0])[None],
        logit_rows=torch.tensor([len(ids) - 1]),
    )
    with torch.inference_mode():
        return model.forward(batch, kv)[0]


@lru_cache(maxsize=1)
def _load(directory: Path) -> tuple[Tokenizer, DecoderModel]:
    return Tokenizer.load(directory), DecoderModel.load(directory, torch.float32, "cpu")


def _common_prefix(first: str, second: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return min(first, second, key=len) if length is None else first[:length]
