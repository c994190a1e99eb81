"""An engine in this process, as its server makes one: no manager, no sockets."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch
from torch import Tensor

from parrot.config import Backend
from parrot.dummy_model import SHAPES, write_dummy_model
from parrot.engine.engine import Engine
from parrot.engine.memory import choose_batch, choose_num_blocks
from parrot.engine.model import DecoderModel
from parrot.engine.overlap import OverlappingEngine
from parrot.engine.process import num_physical_cores
from parrot.engine.runner import ModelRunner
from parrot.models import resolve_model
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallFailed, CallId, ContextId, Dispatch, Fill, Generate, Sampling, pack_ids

from .any_engine import AnyEngine
from .machine import say_no_gpu


@dataclass(frozen=True)
class Setting:
    """What is run: a shape of :mod:`parrot.dummy_model` with random weights, or a real model by its name."""

    model: str
    dtype: str
    device: str
    backend: Backend = "auto"
    share_prefixes: bool = True
    cuda_graphs: bool = True
    overlap: bool = True  # on a GPU
    max_batch_size: int | None = None  # what the engine takes by default
    max_batch_tokens: int | None = None
    num_blocks: int | None = None


class LocalEngine(AnyEngine):
    """Runs calls of given ids; the outputs have given lengths."""

    def __init__(self, setting: Setting) -> None:
        is_dummy = setting.model in SHAPES
        if is_dummy:
            directory = write_dummy_model(Path(tempfile.mkdtemp()) / "model", setting.model)
        else:
            directory = resolve_model(setting.model)
        if setting.device == "cpu":
            torch.set_num_threads(num_physical_cores())
        dtype, device = getattr(torch, setting.dtype), torch.device(setting.device)
        model = DecoderModel.load(
            directory,
            dtype,
            device,
            setting.backend,
            share_prefixes=setting.share_prefixes,
            dummy_weights=is_dummy,
        )
        num_blocks = choose_num_blocks(model.config, dtype, device, setting.num_blocks)
        super().__init__(model.config.vocab_size)
        self.max_batch_size, self.max_batch_tokens = choose_batch(
            device, setting.max_batch_size, setting.max_batch_tokens
        )
        self.runner = ModelRunner.for_engine(
            model,
            num_blocks,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            cuda_graphs=setting.cuda_graphs,
        )
        self._next_id = 1
        engine_type = OverlappingEngine if device.type == "cuda" and setting.overlap else Engine
        self._engine = engine_type(
            self.runner,
            Tokenizer.load(directory),
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
        )

    @torch.inference_mode()
    def draw_weights(self, low: float, high: float) -> None:
        """Uniform weights in place of all that there are, those of norms too; not on the native CPU backend,
        whose weights are packed."""
        for tensor in _tensors(self.runner.model.decoder.weights):
            tensor.uniform_(low, high)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_outputs: Sequence[int], temperature: float = 0.0
    ) -> float:
        """See :meth:`AnyEngine.generate`."""
        started = time.perf_counter()
        for prompt, count in zip(prompts, num_outputs, strict=True):
            context_id = ContextId(self._next_id)
            sampling = Sampling(max_tokens=count, ignore_eos=True, temperature=temperature)
            verbs = (Fill(pack_ids(prompt), context_id), Generate(sampling, context_id))
            self._engine.submit(Dispatch(CallId(self._next_id), 1, 0, "THROUGHPUT", verbs))
            self._next_id += 1
        while self._engine.has_work:
            for reply in self._engine.step():
                if isinstance(reply, CallFailed):
                    raise RuntimeError(reply.error.message)
        return time.perf_counter() - started


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def on_gpu() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def chosen_models(of_a_gpu: str) -> list[str]:
    """The models that ``PARROT_BENCH_MODELS`` names, comma-separated; else ``of_a_gpu``, without one SmolLM2.
    Standard error says when they run on the CPU."""
    names = os.environ.get("PARROT_BENCH_MODELS", of_a_gpu if on_gpu() else "smollm2")
    if not on_gpu():
        say_no_gpu(f"{names} on the CPU")
    return names.split(",")
