"""vLLM on a GPU as a peer, started with the interpreter of its own environment (:mod:`.vllm_engine`).

After the line of options, each line is ``{"prompts": [[id, ...], ...], "max_tokens": [n, ...], "temperature":
t}``, answered by ``{"seconds": s}``. Weights are vLLM's dummies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model, then serve workloads until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    options = json.loads(sys.stdin.readline())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    more: dict[str, Any] = {}
    if options["arm"] == "flashinfer":
        more["attention_backend"] = "FLASHINFER"
    if options["arm"] == "cascade":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the only one that has it
    import vllm
    from vllm import LLM

    llm = LLM(
        options["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_batch"],
        gpu_memory_utilization=0.85,
        enable_prefix_caching=True,
        disable_cascade_attn=options["arm"] != "cascade",
        seed=0,
        **more,
    )
    print(json.dumps({"ready": True, "version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": run(llm, json.loads(line))}), file=out, flush=True)


def run(llm: Any, workload: dict[str, Any]) -> float:
    """Seconds from the submit of all until the last one has ended."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=count, ignore_eos=True, temperature=workload["temperature"], detokenize=False
        )
        for count in workload["max_tokens"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in workload["prompts"]]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
