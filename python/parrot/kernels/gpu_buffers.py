"""What a step on a GPU reads besides weights and pages: packed on the host, uploaded once, never elsewhere.

The addresses depend on the limits of a step alone, and what a step of decodes launches on its number of rows
alone, so that a CUDA graph captured on one step replays on any other with as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .draws import DRAW_SIZE
from .ops import Batch, StepLimits
from .paged_prefill import LOW, PrefillPlan, prefill_tiles, tile_rows
from .shared_prefix import BLOCK_SIZE, SharedPrefixAttention
from .staging import Staging

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepViews:
    """One step as the kernels read it: int32 on the device, valid until the next one is packed."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    logit_rows: Tensor | None  # [m]; None: all rows
    draws: Tensor  # [T * 8] of a step of decodes: DRAW of each row
    num_decodes: int  # sequences with one row, padding included
    decode_rows: Tensor | None  # [num_decodes]; None: the first of the step
    chunks: PrefillPlan | None  # sequences with several rows


class StepBuffers:
    """The staging of steps within ``limits``; ``attention`` plans in it, and so must have been made for it
    (:meth:`stage`)."""

    def __init__(self, limits: StepLimits, staging: Staging, attention: SharedPrefixAttention) -> None:
        self.limits = limits
        self.attention = attention
        self._staging = staging

    @staticmethod
    def stage(limits: StepLimits, device: torch.device) -> Staging:
        """The sections of a step, the plan of its decodes among them."""
        sizes = {
            "token_ids": limits.rows,
            "positions": limits.rows,
            "slots": limits.rows,
            "logit_rows": limits.rows,
            "decode_rows": limits.sequences,
            "draws": DRAW_SIZE * limits.sequences,
            "tiles": 4 * (limits.rows // LOW + limits.sequences),
        }
        return Staging(sizes | SharedPrefixAttention.sections(limits.sequences, limits.blocks), device)

    def pack_decodes(self, batch: Batch, num_rows: int, scratch_block: int, *, share: bool) -> StepViews:
        """A step of n sequences with one row each, padded to ``num_rows`` and uploaded. All rows have logits.
        Rows past n read nothing, write into ``scratch_block``, and what they compute means nothing."""
        n = len(batch.token_ids)
        staging, host = self._staging, self._staging.host
        staging.wait()
        self._put_rows(batch)
        host["token_ids"][n:num_rows] = 0
        host["positions"][n:num_rows] = 0
        padding = np.arange(num_rows - n, dtype=np.int32) % BLOCK_SIZE
        host["slots"][n:num_rows] = scratch_block * BLOCK_SIZE + padding
        host["draws"][: DRAW_SIZE * num_rows] = 0
        if batch.draws is not None:
            host["draws"][: DRAW_SIZE * n] = batch.draws.view(np.int32)
        tables, seq_lens = _tables(batch), np.asarray(batch.seq_lens, dtype=np.int32)
        self.attention.write_plan(tables, seq_lens, num_rows=num_rows, share=share)
        staging.upload("block_tables", n * self.limits.blocks)
        return self._views(num_rows, None, num_rows)

    def pack(self, batch: Batch, *, share: bool) -> StepViews:
        """Any step, uploaded."""
        staging, host = self._staging, self._staging.host
        rows = np.diff(np.asarray(batch.query_start))
        decodes, chunks = np.flatnonzero(rows == 1), np.flatnonzero(rows > 1)
        tables, seq_lens = _tables(batch), np.asarray(batch.seq_lens, dtype=np.int32)
        staging.wait()
        self._put_rows(batch)
        logit_rows = _host(batch.logit_rows)
        host["logit_rows"][: len(logit_rows)] = logit_rows
        if len(decodes):
            self.attention.write_plan(tables[decodes], seq_lens[decodes], share=share)
        decode_rows = np.asarray(batch.query_start)[decodes]
        host["decode_rows"][: len(decodes)] = decode_rows
        plan = self._put_chunks(batch, tables, len(decodes), chunks.tolist())
        staging.upload("block_tables", len(tables) * self.limits.blocks)
        views = self._views(len(batch.token_ids), len(logit_rows), len(decodes))
        is_first = np.array_equal(decode_rows, np.arange(len(decodes)))
        return StepViews(
            views.token_ids,
            views.positions,
            views.slots,
            views.logit_rows,
            views.draws,
            views.num_decodes,
            None if is_first else staging.device["decode_rows"][: len(decodes)],
            plan,
        )

    def _put_rows(self, batch: Batch) -> None:
        for name in ("token_ids", "positions", "slots"):
            values = _host(getattr(batch, name))
            self._staging.host[name][: len(values)] = values

    def _put_chunks(
        self, batch: Batch, tables: I32, first_table: int, chunks: Sequence[int]
    ) -> PrefillPlan | None:
        """Tiles and tables of the sequences ``chunks``, behind the tables of decodes; the plan of them."""
        if not chunks:
            return None
        host, device, limits = self._staging.host, self._staging.device, self.limits
        lengths = [batch.query_start[i + 1] - batch.query_start[i] for i in chunks]
        rows = tile_rows(lengths, [batch.seq_lens[i] for i in chunks], self.attention.num_heads)
        tiles = prefill_tiles(batch.query_start, batch.seq_lens, chunks, first_table, rows)
        host["tiles"][: tiles.size] = tiles.ravel()
        shape = limits.sequences, limits.blocks
        last_table = first_table + len(chunks)
        host["block_tables"].reshape(shape)[first_table:last_table, : tables.shape[1]] = tables[chunks]
        return PrefillPlan(
            device["tiles"][: tiles.size].view(-1, 4),
            device["block_tables"].view(shape),
            rows,
            num_tokens=sum(batch.seq_lens[i] for i in chunks),
        )

    def _views(self, num_rows: int, num_logits: int | None, num_decodes: int) -> StepViews:
        device = self._staging.device
        return StepViews(
            token_ids=device["token_ids"][:num_rows],
            positions=device["positions"][:num_rows],
            slots=device["slots"][:num_rows],
            logit_rows=None if num_logits is None else device["logit_rows"][:num_logits],
            draws=device["draws"][: DRAW_SIZE * num_rows],
            num_decodes=num_decodes,
            decode_rows=None,
            chunks=None,
        )


def _host(tensor: Tensor) -> npt.NDArray[np.integer]:
    """Without a copy where the tensor is on the host, as those of an engine's steps are."""
    array: npt.NDArray[np.integer] = tensor.cpu().numpy()
    return array


def _tables(batch: Batch) -> I32:
    return _host(batch.block_tables).astype(np.int32, copy=False)
