"""transformers as a peer of ``python -m bench engine-cpu``: prompts of one length as one batch, greedy.

The protocol is that of ``bench/engine_cpu.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch


def main() -> None:
    """Load the model, then serve workloads until standard input ends."""
    options = json.loads(sys.stdin.readline())
    import transformers

    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
    model.eval()
    print(json.dumps({"ready": True, "version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


@torch.inference_mode()
def run(model: Any, workload: dict[str, Any]) -> dict[str, float]:
    """Time one workload: the prompts in one forward, then one forward for each further token."""
    ids = torch.tensor(workload["prompts"])
    started = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    filled = time.perf_counter()
    for _ in range(workload["max_tokens"] - 1):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return {
        "fill_s": filled - started,
        "decode_s": time.perf_counter() - filled,
        "decode_tokens": (workload["max_tokens"] - 1) * len(ids),
    }


if __name__ == "__main__":
    main()
