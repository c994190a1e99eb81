"""What vLLM 0.24.0 did on one H200 (CUDA 13.0, torch 2.11, prefix caching and CUDA graphs on, dummy weights,
medians of 3): stored, not measured beside ours."""

from __future__ import annotations

# 7B in fp16, requests sharing 6,000 tokens and 100 of their own: milliseconds per output token.
DECODE_SHARED_MS = {
    "vLLM": {1: 5.31, 8: 8.33, 16: 12.2, 32: 20.5, 64: 37.5},
    "vLLM, FlashInfer": {1: 5.98, 8: 7.87, 16: 11.1, 32: 17.1, 64: 28.5},
    "vLLM, cascade": {1: 5.29, 8: 9.7, 16: 9.8, 32: 10.9, 64: 10.4},
}
FOUR_GROUPS_MS = 28.5  # 4 groups of 16, its fastest arm

# Shape -> workload of bench/engine.py -> its figure.
ENGINE = {
    "llama-7b": {"mix": 5614, "prefill": 47300, "single": 0.256, "map": 1.10, "copilot": 15.1},
    "llama3-8b": {"mix": 9970, "prefill": 42000, "single": 0.27, "map": 1.03, "copilot": 6.63},
    "qwen3-0.6b": {"mix": 23048, "prefill": 387000, "single": 0.096, "map": 0.222, "copilot": 3.39},
}
