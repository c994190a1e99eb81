"""vLLM as a peer of the benchmarks of whole engines, where PARROT_PEER_VLLM_PYTHON names an interpreter that
has it. It has the GPU to itself: it ends before our engine is made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, cast

from parrot.dummy_model import SHAPES, write_dummy_model

from ..any_engine import AnyEngine
from .process import PeerProcess

Arm = Literal["default", "flashinfer", "cascade"]
ARMS: dict[str, Arm] = {"vLLM": "default", "vLLM, FlashInfer": "flashinfer", "vLLM, cascade": "cascade"}
MAX_MODEL_LEN = 16384


def interpreter() -> str | None:
    """The one that has vLLM, if one is named."""
    return os.environ.get("PARROT_PEER_VLLM_PYTHON") or None


class VllmEngine(AnyEngine):
    """One of its arms, with dummy weights of a shape of :mod:`parrot.dummy_model`."""

    def __init__(self, process: PeerProcess, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.version = process.version
        self._process = process

    def generate(
        self, prompts: Sequence[Sequence[int]], num_outputs: Sequence[int], temperature: float = 0.0
    ) -> float:
        """See :meth:`AnyEngine.generate`."""
        workload = {"prompts": prompts, "max_tokens": num_outputs, "temperature": temperature}
        return float(self._process.ask(workload)["seconds"])


@contextmanager
def started(python: str, model: str, dtype: str, arm: Arm, max_batch: int) -> Iterator[VllmEngine]:
    """The arm while it runs. Raises RuntimeError with the end of its log if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": str(write_dummy_model(Path(folder) / "model", model)),
            "dtype": dtype,
            "arm": arm,
            "max_model_len": MAX_MODEL_LEN,
            "max_batch": max_batch,
        }
        command = [python, str(Path(__file__).with_name("vllm_gpu.py"))]
        log = Path(f"out/vllm-{model}-{arm}.log")
        with closing(PeerProcess(f"vLLM ({arm})", command, options, log)) as process:
            yield VllmEngine(process, cast(int, SHAPES[model]["vocab_size"]))
