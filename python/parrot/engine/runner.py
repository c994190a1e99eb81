"""Runs the model over one step: from contexts and slots to logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._core import ContextTree
from ..kernels.draws import Draws
from ..kernels.ops import StepLimits
from ..wire import Ids
from .admission import num_blocks_for
from .batch import BLOCK_SIZE, PagedKV, StepBatch, StepLogits
from .call import EngineCall
from .graphs import GraphedDecodes, Recorder, recorder_for
from .logprobs import LogprobLog
from .model import DecoderModel

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
_LATE_IDS = np.arange(-1, -4097, -1, dtype=np.int32)  # of rows 0, 1 ... of the step before


@dataclass(slots=True)
class Work:
    """``count`` next ids of a call, computed in one step."""

    call: EngineCall
    count: int

    @property
    def token_ids(self) -> Ids:
        """int32 [count], as in :class:`Reservation`."""
        call = self.call
        ids = call.ids.view(call.num_computed, call.num_computed + self.count)
        if call.pending_row is None or len(ids) == self.count:
            return ids
        late = _LATE_IDS[call.pending_row : call.pending_row + 1]
        return late if self.count == 1 else np.concatenate([ids, late])

    @property
    def wants_logits(self) -> bool:
        """The step reaches the end of the ids, and the next one is to be sampled."""
        return self.call.output is not None and self.count == self.call.num_remaining

    @property
    def is_decode(self) -> bool:
        """One id on top of a context whose output has begun."""
        output, pending = self.call.output, self.call.pending_row is not None
        return self.count == 1 and output is not None and output.num_generated + pending > 0


def choose_work(running: Iterable[EngineCall], budget: int) -> list[Work]:
    """Every decode, then prefill chunks, the earliest application first, up to so many tokens."""
    work: list[Work] = []
    decodes: list[EngineCall] = []
    chunks: list[EngineCall] = []
    for call in running:
        (chunks if call.num_remaining > 1 else decodes).append(call)
    for call in decodes + chunks:
        count = min(call.num_computable, budget)
        if count > 0:
            work.append(Work(call, count))
            budget -= count
    return work


def rows_to_log(work: Sequence[Work]) -> tuple[list[int], list[LogprobLog], list[int]]:
    """Rows of a step whose logits go into prompts' log-probabilities; for each its log, and its id."""
    rows: list[int] = []
    logs: list[LogprobLog] = []
    ids: list[int] = []
    first_row = 0
    for w in work:
        if w.call.prompt_log is not None:
            start = w.call.num_computed
            positions = w.call.prompt_log.positions(start, start + w.count)
            rows += [first_row + position - start for position in positions]
            logs += [w.call.prompt_log.log] * len(positions)
            ids += w.call.ids.view(positions.start + 1, positions.stop + 1).tolist() if positions else []
        first_row += w.count
    return rows, logs, ids


@dataclass(slots=True)
class Reservation:
    """The slots of one step, reserved in the tree and not committed yet."""

    context_ids: I64  # [n]
    counts: I32  # [n]
    token_ids: I32  # [sum(counts)]; -1 - r: row r of the ids that the step before gives
    slots: I32  # [sum(counts)]
    copies: I32  # [k, 3]: source block, destination block, number of slots


def reserve(tree: ContextTree, work: Sequence[Work]) -> Reservation:
    """Reserve slots for a whole step. Raises OutOfBlocks and then has changed nothing."""
    context_ids = np.array([w.call.context_id for w in work], dtype=np.int64)
    counts = np.array([w.count for w in work], dtype=np.int32)
    token_ids = np.concatenate([w.token_ids for w in work], dtype=np.int32)
    slots = np.empty(len(token_ids), dtype=np.int32)
    copies = tree.reserve(context_ids, counts, np.maximum(token_ids, 0), slots)
    return Reservation(context_ids, counts, token_ids, slots, copies)


class Runner(Protocol):
    """What the step loop asks of a model and its KV cache."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def max_positions(self) -> int:
        """The longest context."""

    @property
    def num_shared_decodes(self) -> int:
        """Decodes so far whose attention read a prefix once for several sequences."""

    def forward(
        self,
        tree: ContextTree,
        step: Reservation,
        wants_logits: Sequence[bool],
        more_rows: Sequence[int] = (),
        previous_ids: Tensor | None = None,
        draws: Draws | None = None,
    ) -> StepLogits:
        """Compute a reserved step; logits [sum(wants_logits) + len(more_rows), vocab]: of the last ids of
        those calls, then of these rows of the step. ``previous_ids`` int64 [r], on the device: the ids that
        the reservation refers to. ``draws`` [sum(wants_logits)]: how the next ids are to be chosen, should
        the step be able to; it need not."""


class ModelRunner:
    """A model and its paged KV cache on one device.

    With a ``recorder`` steps in which every sequence has one row are recorded once for each size and replayed
    (:mod:`.graphs`); ``limits`` are then those of every step, and the cache has one block more, which is
    nobody's.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        limits: StepLimits | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.num_blocks = num_blocks
        num_scratch = 0 if recorder is None else 1
        self.kv = PagedKV.allocate(model.config, num_blocks + num_scratch, dtype, device)
        self.graphs: GraphedDecodes | None = None
        if recorder is not None and limits is not None:
            self.graphs = GraphedDecodes(model.decoder, self.kv, recorder, limits)

    @classmethod
    def for_engine(
        cls,
        model: DecoderModel,
        num_blocks: int,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        cuda_graphs: bool = True,
    ) -> ModelRunner:
        """For an engine whose steps are at most so large. ``cuda_graphs``: where they can be, its decodes are
        recorded, here and now."""
        longest = min(model.config.max_positions, num_blocks * BLOCK_SIZE)
        limits = StepLimits(max(max_batch_size, max_batch_tokens), max_batch_size, num_blocks_for(longest))
        recorder = recorder_for(model) if cuda_graphs else None
        runner = cls(model, num_blocks, model.dtype, model.device, limits=limits, recorder=recorder)
        if runner.graphs is not None:
            runner.graphs.warm_up()
        return runner

    @property
    def vocab_size(self) -> int:
        """See :class:`Runner`."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        """See :class:`Runner`."""
        return self.model.config.max_positions

    @property
    def num_shared_decodes(self) -> int:
        """See :class:`Runner`."""
        return self.model.decoder.ops.num_shared_decodes

    def forward(
        self,
        tree: ContextTree,
        step: Reservation,
        wants_logits: Sequence[bool],
        more_rows: Sequence[int] = (),
        previous_ids: Tensor | None = None,
        draws: Draws | None = None,
    ) -> StepLogits:
        """See :class:`Runner`."""
        with torch.inference_mode():
            self.kv.copy_slots(torch.from_numpy(step.copies))
            batch = self._build(tree, step, wants_logits, more_rows)
            batch.previous_ids, batch.draws = previous_ids, draws
            return self.compute(batch)

    def compute(self, batch: StepBatch) -> StepLogits:
        """One step, recorded if it can be."""
        if self.graphs is None or len(batch.token_ids) != len(batch.seq_lens):
            return StepLogits(self.model.forward(batch, self.kv))
        num_rows = len(batch.token_ids)
        if batch.draws is not None and len(batch.draws) != num_rows:
            batch.draws = None  # some rows have no next id
        step = self.graphs.run(batch)
        if torch.equal(batch.logit_rows, torch.arange(num_rows)):
            return step
        return StepLogits(step.logits[batch.logit_rows.to(step.logits.device)])

    def _build(
        self,
        tree: ContextTree,
        step: Reservation,
        wants_logits: Sequence[bool],
        more_rows: Sequence[int] = (),
    ) -> StepBatch:
        n = len(step.counts)
        seq_lens = np.empty(n, dtype=np.int32)
        tree.lengths(step.context_ids, seq_lens)
        tables = np.empty((n, num_blocks_for(int(seq_lens.max()))), dtype=np.int32)
        tree.block_tables(step.context_ids, tables)
        ends = np.cumsum(step.counts, dtype=np.int64)
        last_rows = ends[np.array(wants_logits, dtype=bool)] - 1
        # Row r of sequence i has the position seq_lens[i] - (rows of i from r on).
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, step.counts)
        return StepBatch(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(positions),
            slots=self._tensor(step.slots),
            query_start=[0, *ends.tolist()],
            seq_lens=seq_lens.tolist(),
            block_tables=self._tensor(tables),
            logit_rows=self._tensor(np.concatenate([last_rows, np.array(more_rows, dtype=np.int64)])),
        )

    @staticmethod
    def _tensor(array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))
