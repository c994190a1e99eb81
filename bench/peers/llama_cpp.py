"""llama.cpp (xllamacpp) as a peer of ``python -m bench engine-cpu``, started with an interpreter that has it.

It runs the GGUF file, so its weights are of 4 bits; it is reported beside the others. The protocol is that of
``bench/engine_cpu.py``; the times are those that its server measures for each request.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def main() -> None:
    """Load the model, then serve workloads until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its messages are not replies
    options = json.loads(sys.stdin.readline())
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["gguf"]
    params.n_ctx = options["max_model_len"] * options["max_batch"]
    params.n_parallel = options["max_batch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True, "version": xllamacpp.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(server, json.loads(line))), file=out, flush=True)


def run(server: Any, workload: dict[str, Any]) -> dict[str, float]:
    """Run the prompts at once; the slowest one's times stand for all, since they decode in one batch."""
    body = {
        "n_predict": workload["max_tokens"],
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    bodies = [{**body, "prompt": prompt} for prompt in workload["prompts"]]
    with ThreadPoolExecutor(len(bodies)) as threads:
        timings = [reply["timings"] for reply in threads.map(server.handle_completions, bodies)]
    return {
        "fill_s": max(timing["prompt_ms"] for timing in timings) / 1e3,
        "decode_s": max(timing["predicted_ms"] for timing in timings) / 1e3,
        "decode_tokens": sum(timing["predicted_n"] - 1 for timing in timings),
    }


if __name__ == "__main__":
    main()
