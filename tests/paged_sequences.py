"""Sequences over a paged KV cache with tables made by hand: shuffled pages, poisoned where unused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import nan

import torch
from torch import Tensor

from parrot.engine.batch import BLOCK_SIZE, PagedKV, StepBatch
from parrot.engine.model import DecoderModel


@dataclass
class PagedSequence:
    """What a sequence has computed: its tokens, its blocks, and the logits of every position."""

    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class PagedRunner:
    """Runs steps of a model over one cache, all of whose slots hold NaN until they are written."""

    def __init__(self, model: DecoderModel, num_blocks: int = 128, seed: int = 0) -> None:
        self.model = model
        self.kv = PagedKV.allocate(model.config, num_blocks, model.dtype, model.device)
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(nan)
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)

    def step(self, *work: tuple[PagedSequence, list[int]]) -> None:
        """Append tokens to sequences, one step for all; keep the logits of each."""
        positions, slots, query_start = [], [], [0]
        for sequence, new in work:
            for position in range(len(sequence.ids), len(sequence.ids) + len(new)):
                if position % BLOCK_SIZE == 0:
                    sequence.blocks.append(self.free.pop())
                positions.append(position)
                slots.append(sequence.blocks[-1] * BLOCK_SIZE + position % BLOCK_SIZE)
            sequence.ids += new
            query_start.append(len(positions))
        tables = torch.full((len(work), max(len(s.blocks) for s, _ in work) + 1), -1)
        for i, (sequence, _) in enumerate(work):
            tables[i, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        device = self.model.device
        batch = StepBatch(
            token_ids=torch.tensor([token for _, new in work for token in new], device=device),
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            query_start=query_start,
            seq_lens=[len(sequence.ids) for sequence, _ in work],
            block_tables=tables.to(device),
            logit_rows=torch.arange(len(positions), device=device),
        )
        logits = self.model.forward(batch, self.kv).clone().cpu()  # the next step writes over them
        for i, (sequence, _) in enumerate(work):
            sequence.logits += logits[query_start[i] : query_start[i + 1]]

    def fork(self, parent: PagedSequence, length: int) -> PagedSequence:
        """The first ``length`` tokens: whole blocks shared, a partial one copied."""
        whole, partial = divmod(length, BLOCK_SIZE)
        child = PagedSequence(parent.ids[:length], parent.blocks[:whole], parent.logits[:length])
        if partial:
            child.blocks.append(self.free.pop())
            copies = torch.tensor([[parent.blocks[whole], child.blocks[-1], partial]], dtype=torch.int32)
            self.kv.copy_slots(copies)
        return child
