"""Latency against throughput as batches grow, beside what the engine's cost model says of itself.

On a GPU: the shapes llama-7b and llama-13b in fp16 with random weights. Without one: SmolLM2 in bfloat16.
``PARROT_BENCH_MODELS`` names others.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parrot.engine.cost_model import calibrate
from parrot.wire import CostModel

from .engine import setting
from .local_engine import LocalEngine, Setting, chosen_models, on_gpu
from .timing import print_table, show, spread

TARGETS_MS = (20, 40, 80)


def run(quick: bool) -> dict[str, Any]:
    """A curve for each model; prints a table of each and draws them in out/curve.png."""
    curves = {model: _curve(setting(model, quick), quick) for model in chosen_models("llama-7b,llama-13b")}
    _draw(curves, Path("out/curve.png"))
    return {"models": curves}


def _curve(what: Setting, quick: bool) -> dict[str, Any]:
    batches = (1, 4) if quick else (1, 2, 4, 8, 16, 32, 64, 128) if on_gpu() else (1, 2, 4, 8, 16, 32)
    length, few, many, repeats = (32, 2, 6, 1) if quick else (512, 4, 36, 3)
    engine = LocalEngine(what)
    cost = calibrate(
        engine.runner, max_batch_size=engine.max_batch_size, max_batch_tokens=engine.max_batch_tokens
    )
    points = []
    for batch in batches:
        prompts = [engine.random_ids(length) for _ in range(batch)]
        engine.generate(prompts, [1] * batch)
        figure = spread([engine.ms_per_token(prompts, few, many) for _ in range(repeats)])
        points.append(
            {
                "batch": batch,
                "ms_per_token": figure,
                "tok_per_s": float(f"{1e3 * batch / figure['median']:.4g}"),
                "predicted_ms": float(f"{step_ms(cost, batch, batch * (length + many // 2)):.4g}"),
            }
        )
    capacities = {str(target): capacity_tokens(cost, target, length) for target in TARGETS_MS}
    _print(what.model, points, capacities)
    return {"points": points, "capacity_tokens": capacities, "tokens_in": length}


def step_ms(cost: CostModel, batch: float, kv_tokens: float) -> float:
    """Milliseconds of a decode step, as the cost model has it."""
    return cost.step_us(batch, 0, kv_tokens) / 1e3


def capacity_tokens(cost: CostModel, target_ms: float, length: int) -> int:
    """Most KV tokens, in sequences of ``length``, at which a step takes no longer than the target."""
    return cost.tokens_within(target_ms * 1e3, length)


def _print(model: str, points: list[dict[str, Any]], capacities: dict[str, int]) -> None:
    print_table(
        f"{model}: decode",
        ["batch", "ms per token", "tok/s", "the cost model says", "error"],
        [
            [
                str(point["batch"]),
                show(point["ms_per_token"]),
                f"{point['tok_per_s']:,.0f}",
                f"{point['predicted_ms']:.2f}",
                f"{point['predicted_ms'] / point['ms_per_token']['median'] - 1:+.0%}",
            ]
            for point in points
        ],
    )
    text = ", ".join(f"{tokens:,} at {target} ms" for target, tokens in capacities.items())
    print(f"{model}: KV tokens that keep a target per token: {text}", flush=True)


def _draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    if find_spec("matplotlib") is None:
        print("no picture: pip install 'parrot-serve[bench]' has matplotlib")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    slowest = max(curves, key=lambda model: curves[model]["points"][0]["ms_per_token"]["median"])
    for model, curve in curves.items():
        points = curve["points"]
        latencies = [point["ms_per_token"]["median"] for point in points]
        (line,) = axes.plot([p["tok_per_s"] for p in points], latencies, "o-", label=model)
        predicted = [point["predicted_ms"] for point in points]
        rates = [1e3 * p["batch"] / p["predicted_ms"] for p in points]
        axes.plot(rates, predicted, ":", color=line.get_color(), label=f"{model}, cost model")
        for point, latency in zip(points, latencies, strict=True):
            axes.annotate(
                str(point["batch"]),
                (point["tok_per_s"], latency),
                xytext=(0, 6 if model == slowest else -13),
                textcoords="offset points",
                ha="right" if point is points[0] else "center",  # the second is near
                fontsize=8,
                bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
            )
    axes.set(xlabel="output tokens per second", ylabel="ms per token", ylim=(0, 1.1 * axes.get_ylim()[1]))
    axes.set_title("Decoding: a token's time as the batch grows (numbers: sequences)", fontsize=10)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn: {path}", flush=True)
