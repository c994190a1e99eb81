"""Parrot's engine as an arm of ``python -m bench engine-cpu``: in this process, stepped as its server does.

The protocol is that of ``bench/engine_cpu.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from parrot._core import cpu_isa, set_cpu_threads
from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.runner import ModelRunner
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallFailed, CallId, ContextId, Dispatch, Fill, Generate, Sampling, pack_ids

NUM_BLOCKS = 2048


def main() -> None:
    """Load the model, then serve workloads until standard input ends."""
    options = json.loads(sys.stdin.readline())
    engine = load(options)
    print(json.dumps({"ready": True, "version": f"{cpu_isa()}, {options['backend']}"}), flush=True)
    next_id = 1
    for line in sys.stdin:
        workload = json.loads(line)
        print(json.dumps(run(engine, workload, next_id)), flush=True)
        next_id += len(workload["prompts"])


def load(options: dict[str, Any]) -> Engine:
    """An engine as its process makes one, without a manager."""
    torch.set_num_threads(options["threads"])
    set_cpu_threads(options["threads"])
    directory, dtype, device = Path(options["model"]), getattr(torch, options["dtype"]), torch.device("cpu")
    model = DecoderModel.load(
        directory, dtype, device, options["backend"], share_prefixes=options["share_prefixes"]
    )
    runner = ModelRunner(model, NUM_BLOCKS, dtype, device)
    tokenizer = Tokenizer.load(directory)
    return Engine(runner, tokenizer, max_batch_size=options["max_batch"], max_batch_tokens=512)


def run(engine: Engine, workload: dict[str, Any], first_id: int) -> dict[str, float]:
    """Time one workload: until the last step that filled a prompt, then until the last call ends."""
    sampling = Sampling(max_tokens=workload["max_tokens"], ignore_eos=True)
    started = filled = time.perf_counter()
    for number, prompt in enumerate(workload["prompts"], first_id):
        context_id = ContextId(number)
        verbs = (Fill(pack_ids(prompt), context_id), Generate(sampling, context_id))
        engine.submit(Dispatch(CallId(number), 1, 0, "THROUGHPUT", verbs))
    counters = engine.counters
    decoded_at_fill = decoded = counters.decode_tokens
    prefilled = counters.prefill_tokens
    while engine.has_work:
        for reply in engine.step():
            if isinstance(reply, CallFailed):
                raise RuntimeError(reply.error.message)
        if counters.prefill_tokens > prefilled:
            prefilled, filled = counters.prefill_tokens, time.perf_counter()
            decoded_at_fill = counters.decode_tokens
        decoded = counters.decode_tokens
    return {
        "fill_s": filled - started,
        "decode_s": time.perf_counter() - filled,
        "decode_tokens": decoded - decoded_at_fill,
    }


if __name__ == "__main__":
    main()
