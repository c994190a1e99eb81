"""A whole engine on plain work and on shared prefixes: five workloads, on a GPU beside figures of vLLM.

On a GPU: shapes of known models with random weights (``PARROT_BENCH_MODELS``, comma-separated, names
them). Without one: SmolLM2 in bfloat16, in sizes that two cores can do. ``PARROT_BENCH_BACKEND`` chooses the
backend. vLLM is run on each shape right before ours where ``PARROT_PEER_VLLM_PYTHON`` names an interpreter
that has it; else its stored figures stand beside ours.

A GPU on heavy products runs at the clock that its power allows, and what they take depends on the numbers in
them. vLLM's dummy weights are so small that in float16 silu(gate) * up vanishes: the last product of a layer
multiplies zeros. Ours keep activations near one, as real weights do. So on a GPU there is a second figure
for prefill, with weights drawn as vLLM draws them, and vLLM's figure stands beside both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from parrot.config import Backend
from parrot.dummy_model import SHAPES

from .any_engine import AnyEngine
from .local_engine import LocalEngine, Setting, chosen_models, on_gpu
from .peers.stored_vllm import ENGINE
from .peers.vllm_engine import interpreter, started
from .timing import Spread, print_table, show, spread

REPEATS = 3
TEMPERATURE = 0.6  # of all outputs but those of prefill, as the stored figures of vLLM have it
DTYPES = {"llama3-8b": "bfloat16", "qwen3-0.6b": "bfloat16"}


@dataclass(frozen=True)
class Sizes:
    """Of the workloads: tokens and numbers of requests."""

    mix: int
    mix_tokens: tuple[int, int]  # least and most, of prompts and of outputs
    prefill: tuple[int, int]  # requests, tokens of each
    single: tuple[int, int]  # tokens in, out
    map: tuple[int, int, int]  # requests, tokens in, out
    copilot: tuple[int, int, int, int]  # requests, shared tokens, own tokens, tokens out


GPU = Sizes(256, (100, 1024), (32, 2048), (1024, 50), (66, 474, 50), (64, 5107, 1060, 331))
CPU = Sizes(24, (20, 200), (4, 512), (256, 50), (16, 237, 25), (16, 1000, 60, 40))
QUICK = Sizes(4, (5, 20), (2, 64), (32, 8), (4, 40, 8), (4, 64, 20, 8))
FIGURES = {"mix": "tok/s out", "prefill": "tok/s in", "single": "s", "map": "s", "copilot": "s"}
PARTS = tuple(FIGURES)
PREFILL_AS_VLLM = "prefill, weights as vLLM's"
VLLM_WEIGHTS = (-1e-3, 1e-3)  # uniform, norms too
VLLM_BATCH = 256  # most requests at once


def run(quick: bool, only: Sequence[str] = PARTS) -> dict[str, Any]:
    """The workloads ``only`` on each model; prints a table."""
    sizes = QUICK if quick else GPU if on_gpu() else CPU
    models = chosen_models("llama-7b,llama3-8b,qwen3-0.6b")
    repeats = 1 if quick else REPEATS
    peers: dict[str, dict[str, Spread]] = {}
    results: dict[str, dict[str, Spread]] = {}
    for what in (setting(model, quick) for model in models):
        peers[what.model] = _vllm_figures(what, sizes, repeats, only)
        results[what.model] = _figures(what, sizes, repeats, only)
    _print(results, peers)
    return {"sizes": sizes.__dict__, "models": results, "vllm": peers}


def setting(model: str, quick: bool) -> Setting:
    """How this machine runs a model."""
    return Setting(
        model,
        DTYPES.get(model, "float16") if on_gpu() else "bfloat16",
        "cuda" if on_gpu() else "cpu",
        cast(Backend, os.environ.get("PARROT_BENCH_BACKEND", "auto")),
        num_blocks=256 if quick else None,
    )


def _vllm_figures(what: Setting, sizes: Sizes, repeats: int, only: Sequence[str]) -> dict[str, Spread]:
    """None where vLLM is not there, or cannot run, which is said."""
    python = interpreter()
    if not python or what.model not in SHAPES:
        return {}
    try:
        with started(python, what.model, what.dtype, "default", VLLM_BATCH) as vllm:
            return measure(vllm, f"vLLM {vllm.version} {what.model}", sizes, repeats, only)
    except RuntimeError as error:
        print(f"vLLM: not measured: {error}", flush=True)
        return {}


def _figures(what: Setting, sizes: Sizes, repeats: int, only: Sequence[str]) -> dict[str, Spread]:
    engine = LocalEngine(what)
    figures = measure(engine, what.model, sizes, repeats, only)
    if on_gpu() and what.model in SHAPES and "prefill" in only:
        figures[PREFILL_AS_VLLM] = measure_as_vllm(engine, sizes, repeats)
    return figures


def measure_as_vllm(engine: LocalEngine, sizes: Sizes, repeats: int) -> Spread:
    """Prefill with vLLM's dummy weights, which the engine has from then on."""
    engine.draw_weights(*VLLM_WEIGHTS)
    return spread([_prefill(engine, sizes) for _ in range(repeats)])


def measure(
    engine: AnyEngine, name: str, sizes: Sizes, repeats: int, only: Sequence[str] = PARTS
) -> dict[str, Spread]:
    """The figure of each workload in ``only`` over its repeats, in turns."""
    engine.generate([engine.random_ids(16)] * 2, [4, 4])
    times: dict[str, list[float]] = {part: [] for part in only}
    workloads = dict(_workloads(engine, sizes))
    for _ in range(repeats):
        for part in only:
            times[part].append(workloads[part]())
            print(f"{name} {part} {times[part][-1]:.4g} {FIGURES[part]}", flush=True)
    return {part: spread(values) for part, values in times.items()}


def _workloads(engine: AnyEngine, sizes: Sizes) -> Iterator[tuple[str, Callable[[], float]]]:
    low, high = sizes.mix_tokens
    step = (high - low) / max(sizes.mix - 1, 1)
    prompt_lens = [round(low + i * step) for i in range(sizes.mix)]
    output_lens = prompt_lens[1::2] + prompt_lens[::2]  # no relation between the two

    def mix() -> float:
        seconds = engine.generate([engine.random_ids(n) for n in prompt_lens], output_lens, TEMPERATURE)
        return sum(output_lens) / seconds

    def single() -> float:
        return engine.generate([engine.random_ids(sizes.single[0])], [sizes.single[1]], TEMPERATURE)

    def map_stage() -> float:
        count, length, outputs = sizes.map
        return engine.generate(_fresh(engine, count, length), [outputs] * count, TEMPERATURE)

    def copilot() -> float:
        count, shared, own, outputs = sizes.copilot
        prefix = engine.random_ids(shared)
        prompts = [prefix + ids for ids in _fresh(engine, count, own)]
        return engine.generate(prompts, [outputs] * count, TEMPERATURE)

    yield from (
        ("mix", mix),
        ("prefill", lambda: _prefill(engine, sizes)),
        ("single", single),
        ("map", map_stage),
        ("copilot", copilot),
    )


def _prefill(engine: AnyEngine, sizes: Sizes) -> float:
    count, length = sizes.prefill
    return count * length / engine.generate(_fresh(engine, count, length), [1] * count)


def _fresh(engine: AnyEngine, count: int, length: int) -> list[list[int]]:
    return [engine.random_ids(length) for _ in range(count)]


def _print(results: dict[str, dict[str, Spread]], peers: dict[str, dict[str, Spread]]) -> None:
    rows = []
    for model, figures in results.items():
        for name, figure in figures.items():
            workload = name.partition(",")[0]
            unit = FIGURES[workload]
            measured = peers.get(model, {}).get(workload)
            stored = ENGINE.get(model, {}).get(workload)
            cells = [_cell(stored), _cell(measured["median"] if measured else None)]
            peer = measured["median"] if measured else stored
            rows.append(
                [f"{model}, {name}, {unit}", show(figure, 3), *cells, _ratio(figure["median"], peer, unit)]
            )
    heads = ["", "Parrot", "vLLM, stored", "vLLM, this run", "as fast as vLLM"]
    print_table("median (least to most)", heads, rows, width=120)


def _cell(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:g}"


def _ratio(ours: float, peer: float | None, unit: str) -> str:
    if peer is None:
        return "-"
    return f"{ours / peer if 'tok/s' in unit else peer / ours:.2f}x"
