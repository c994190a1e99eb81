"""Decode steps recorded once for each size and replayed: CUDA graphs.

A step in which every sequence has one row is padded to the next of a few sizes, so that what it launches
depends on that size alone; what it reads lies in buffers that stay where they are (``kernels.gpu_buffers``).
On a CPU a replay computes the same on the same buffers: all but the capture is tested without a GPU.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ..kernels.ops import StepLimits
from ..kernels.torch_ops import TorchOps
from .batch import BLOCK_SIZE, PagedKV, StepBatch, StepLogits

if TYPE_CHECKING:
    from ..kernels.gpu_ops import GpuOps
    from .model import Decoder, DecoderModel

log = logging.getLogger(__name__)
Outputs = tuple[Tensor, Tensor, Tensor]  # logits [n, vocab]; int64 [n]: the likeliest ids, those drawn
Compute = Callable[[], Outputs]
_SMALL = (1, 2, 4)
_STEP = 8


class Recording(Protocol):
    """A computation on fixed addresses."""

    outputs: Outputs  # of the last replay

    def replay(self) -> None:
        """Compute again, on the current stream."""


class Recorder(Protocol):
    """Makes recordings, of which one is replayed at a time: they may share their memory."""

    def record(self, compute: Compute) -> Recording:
        """Record what ``compute`` launches, which may run several times; outputs count after a replay."""


class EagerRecorder:
    """A replay computes anew, into the outputs of the first time."""

    def record(self, compute: Compute) -> Recording:
        """See :class:`Recorder`."""
        return _EagerRecording(compute)


class _EagerRecording:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.outputs = compute()

    def replay(self) -> None:
        for output, value in zip(self.outputs, self._compute(), strict=True):
            output.copy_(value)


class CudaGraphRecorder:
    """CUDA graphs with one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, compute: Compute) -> Recording:
        """See :class:`Recorder`. Computes once before the capture: kernels are compiled and loaded then."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                outputs = compute()
            self._pool = graph.pool()
        return _CudaRecording(graph, outputs)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


def recorder_for(model: DecoderModel) -> Recorder | None:
    """CUDA graphs, where the operations of a model can be recorded: on a GPU, if they are not torch's."""
    if model.device.type != "cuda" or isinstance(model.decoder.ops, TorchOps):
        return None
    return CudaGraphRecorder(model.device)


def decode_sizes(max_sequences: int) -> list[int]:
    """Numbers of rows that steps are padded to, ascending: 1, 2, 4, 8, 16, 24 ... and the largest."""
    sizes = (*_SMALL, *range(_STEP, max_sequences, _STEP))
    return [*(size for size in sizes if size < max_sequences), max_sequences]


class GraphedDecodes:
    """Steps of decodes, recorded on first use or by :meth:`warm_up`. The last block of ``kv`` is its own.

    Should a recording fail (memory is short, say), that is logged and steps are computed without.
    """

    def __init__(self, decoder: object, kv: PagedKV, recorder: Recorder, limits: StepLimits) -> None:
        """``decoder``: over ``GpuOps``."""
        self._decoder = cast("Decoder[Tensor, Tensor, Tensor]", decoder)
        self._ops = cast("GpuOps", self._decoder.ops)
        self._kv = kv
        self._recorder = recorder
        self._limits = limits
        self.sizes = decode_sizes(limits.sequences)
        self._recordings: dict[int, Recording] = {}
        self._ops.reserve(limits, len(kv.k[0]))

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepLogits:
        """Compute a step of n sequences with one row each, within the limits: logits and ids of all rows,
        valid until the next one runs. ``batch.draws`` are of those rows. Raises ValueError for a larger
        step."""
        n = len(batch.token_ids)
        if not self._limits.hold(needed := StepLimits.of(batch)):
            raise ValueError(f"the step needs {needed}, steps were to stay within {self._limits}")
        logits, likeliest, drawn = self._run(batch, self.sizes[bisect_left(self.sizes, n)])
        return StepLogits(logits[:n], likeliest[:n], None if batch.draws is None else drawn[:n])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all sizes, the largest first, whose memory the others then share, and compile what other
        steps launch besides."""
        started = time.monotonic()
        self._ops.compile_prefill(self._kv)
        scratch, zero = len(self._kv.k[0]) - 1, torch.zeros(1, dtype=torch.int64)
        batch = StepBatch(
            token_ids=zero,
            positions=zero,
            slots=torch.tensor([scratch * BLOCK_SIZE]),
            query_start=[0, 1],
            seq_lens=[1],
            block_tables=torch.tensor([[scratch]]),
            logit_rows=zero,
        )
        for size in reversed(self.sizes):
            self._run(batch, size)
        log.info("recorded steps of %d sizes in %.1f s", len(self.sizes), time.monotonic() - started)

    def _run(self, batch: StepBatch, size: int) -> Outputs:
        step = self._ops.begin_decodes(batch, self._kv, size)

        def compute() -> Outputs:
            logits = self._decoder.run(step)
            drawn, likeliest = step.choose(logits)
            return logits, likeliest, drawn

        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recordings[size] = self._record(compute, size)
        recording.replay()
        return recording.outputs

    def _record(self, compute: Compute, size: int) -> Recording:
        try:
            return self._recorder.record(compute)
        except RuntimeError:
            log.exception("a step of %d rows could not be recorded; steps are computed without", size)
            self._recorder = EagerRecorder()
            return self._recorder.record(compute)
