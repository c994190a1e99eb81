"""The step loop with the device ahead of the host: a step is planned and launched while the one before runs.

The ids of a step stay on the device and are the input of the next one; the host learns them once that is
launched. An output that ends is thus seen to end a step late, and what was launched beyond its end is taken
back: nobody gets the id, and the context has the length that it would have had (docs/engine.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._core import OutOfBlocks
from ..wire import CallId, FinishReason
from .call import EngineCall, Output
from .cost_model import expected_us
from .engine import Engine
from .runner import I64, Reservation, Work, reserve
from .sampling import to_list

log = logging.getLogger(__name__)


class LaunchedIds:
    """Ids that a device computes, int64 [n], on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        self.on_device = ids
        if ids.is_cuda:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = ids.clone()  # they may lie where the next step puts its own

    def wait(self) -> list[int | None]:
        """The ids, None for -1."""
        if self.on_device.is_cuda:
            self._arrived.synchronize()
        return to_list(self._host)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device computes. Its tokens are committed: whatever reads them runs behind it."""

    work: list[Work]
    sampled: list[tuple[EngineCall, Output]]  # by row of the ids
    ids: LaunchedIds
    kv_tokens: int  # that it loads
    expected_us: float


class OverlappingEngine(Engine):
    """Gives the replies of :class:`Engine`, those of a step while the next one runs. A step that has an
    output whose sampling looks at ids before, or that may end by its text, is waited for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._launched: _Launched | None = None
        self._ahead: dict[CallId, Work] = {}  # of the step in hand: computes an id that only the device knows

    def _build(self) -> tuple[list[Work], Reservation | None]:
        """Does not take blocks from anybody while ids are on their way: with those, less may be needed."""
        if self._launched is None:
            return super()._build()
        work = self._choose()
        if work:
            try:
                return work, reserve(self.tree, work)
            except OutOfBlocks:
                self._early.let_go()
        self._report_evictions()
        self._settle()
        return super()._build()

    def _compute(self, work: Sequence[Work], reservation: Reservation) -> None:
        """Launch, take in the ids of the step before, commit what of this one is still wanted."""
        outputs = [w.call.output if w.wants_logits else None for w in work]
        sampled = [(w.call, output) for w, output in zip(work, outputs, strict=True) if output is not None]
        before = None if self._launched is None else self._launched.ids.on_device
        try:
            ids = LaunchedIds(self._next_ids.launch(self.tree, work, outputs, reservation, before))
        except Exception as error:
            log.exception("a step of %d calls failed", len(work))
            self.tree.rollback(reservation.context_ids)
            self._settle()
            for w in work:
                if self._is_live(w.call):
                    self._fail(w.call, self._failure(error))
            return
        late = {w.call.call_id: w for w in work if w.call.pending_row is not None}
        self._ahead = dict(late)
        self._settle()
        kept = [w for w in work if w.call.call_id not in late or w.call.call_id in self._ahead]
        self._launched = self._commit(kept, sampled, ids)
        if all(output.may_be_late for _, output in sampled):
            self._expect_ids(sampled)
        else:
            self._settle()

    def _commit(
        self, work: list[Work], sampled: list[tuple[EngineCall, Output]], ids: LaunchedIds
    ) -> _Launched:
        late = list(self._ahead.values())
        self._ahead = {}
        last_ids = np.array([w.call.ids.last for w in late], dtype=np.int32)
        self.tree.set_last_tokens(_contexts(late), last_ids)
        self.tree.commit(context_ids := _contexts(work))
        self.counters.shared_decodes = self._runner.num_shared_decodes
        expected = 0.0 if self._cost_model is None else expected_us(self._cost_model, work)
        kv_tokens = self.tree.num_distinct_tokens(context_ids) if self._live_cost is not None else 0
        for w in work:
            self._count(w)
            w.call.num_computed += w.count
            self._reply_progress(w.call)
        return _Launched(work, sampled, ids, kv_tokens, expected)

    def _expect_ids(self, sampled: Sequence[tuple[EngineCall, Output]]) -> None:
        """Let the next step compute the ids that this one gives, where those are not the last for sure."""
        for row, (call, output) in enumerate(sampled):
            is_last = output.num_generated + 1 >= output.sampling.max_tokens
            if self._is_live(call) and call.output is output and not is_last:
                call.pending_row = row

    def _settle(self) -> None:
        """Wait for the ids of the step that was launched, and take them in."""
        step, self._launched = self._launched, None
        if step is None:
            return
        try:
            ids = step.ids.wait()
        except Exception:
            self._renew_pool("the device failed in a step whose tokens count as computed")
            raise
        self.counters.expected_us += step.expected_us
        if self._live_cost is not None:
            self._live_cost.computed(step.work, step.kv_tokens)
        for call, _ in step.sampled:
            call.pending_row = None
        for (call, output), token_id in zip(step.sampled, ids, strict=True):
            if self._is_live(call) and call.output is output:
                self._accept(call, output, token_id)

    def _end_output(self, call: EngineCall, output: Output, reason: FinishReason) -> None:
        """Takes back first what was launched beyond the end."""
        if self._ahead.pop(call.call_id, None) is not None:
            self.tree.rollback(np.array([call.context_id], dtype=np.int64))
        super()._end_output(call, output, reason)

    def _forget(self, call: EngineCall) -> None:
        self._ahead.pop(call.call_id, None)
        super()._forget(call)

    def _renew_pool(self, reason: str) -> None:
        """Ids on their way are let go: they will be sampled again, and be the same."""
        self._launched = None
        self._ahead = {}
        for call in self._live.values():
            call.pending_row = None
        super()._renew_pool(reason)

    def _is_live(self, call: EngineCall) -> bool:
        return self._live.get(call.call_id) is call


def _contexts(work: Sequence[Work]) -> I64:
    return np.array([w.call.context_id for w in work], dtype=np.int64)
