"""Milliseconds per output token of a batch that shares a prefix, and of four groups that each share one.

On a GPU: LLaMA-7B's shape in fp16 with random weights, 6,000 shared tokens, beside vLLM: its arms are run
before ours where ``PARROT_PEER_VLLM_PYTHON`` names an interpreter that has it, else its figures are stored.
Without one: SmolLM2 in bfloat16, 1,000 shared tokens, beside our own attention without sharing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from parrot.dummy_model import SHAPES

from .any_engine import AnyEngine
from .engine import setting
from .local_engine import LocalEngine, Setting, chosen_models, on_gpu
from .peers.stored_vllm import DECODE_SHARED_MS, FOUR_GROUPS_MS
from .peers.vllm_engine import ARMS, interpreter, started
from .timing import Spread, print_table, show, spread

GROUPS = 4
VLLM_BATCH = 128  # most requests at once


@dataclasses.dataclass(frozen=True)
class Sizes:
    """``few`` and ``many``: tokens of the two runs whose difference is measured."""

    batches: tuple[int, ...]
    shared: int
    own: int
    few: int
    many: int
    repeats: int


GPU = Sizes((1, 8, 16, 32, 64), 6000, 100, 16, 144, 3)
CPU = Sizes((1, 8, 16, 32), 1000, 50, 4, 20, 3)
QUICK = Sizes((1, 4), 64, 10, 2, 6, 1)


def run(quick: bool) -> dict[str, Any]:
    """Every batch in every arm, in turns; prints a table."""
    sizes = QUICK if quick else GPU if on_gpu() else CPU
    model, *others = chosen_models("llama-7b")
    if others:
        raise SystemExit(f"PARROT_BENCH_MODELS: decode-shared takes one model, not {', '.join(others)} too")
    shared = setting(model, quick)
    rows = [(f"{batch}", [batch]) for batch in sizes.batches]
    rows.append((f"{GROUPS} x {max(sizes.batches) // GROUPS}", [max(sizes.batches) // GROUPS] * GROUPS))
    peers = _measure_peers(shared, rows, sizes)
    arms: dict[str, AnyEngine] = {"Parrot": LocalEngine(shared)}
    if not on_gpu():  # two engines of a large model do not fit one GPU
        arms["without sharing"] = LocalEngine(_unshared(shared))
    results = {name: _measure(arms, groups, sizes) for name, groups in rows}
    for name, figures in peers.items():
        results[name].update(figures)
    _print(results, sizes)
    return {"model": model, "sizes": dataclasses.asdict(sizes), "ms_per_token": results}


def _unshared(what: Setting) -> Setting:
    return dataclasses.replace(what, share_prefixes=False)


def _measure_peers(
    what: Setting, rows: list[tuple[str, list[int]]], sizes: Sizes
) -> dict[str, dict[str, Spread]]:
    """The rows in each arm of vLLM, if it is there; an arm that cannot run is left out, and says why."""
    results: dict[str, dict[str, Spread]] = {name: {} for name, _ in rows}
    python = interpreter()
    if not python or what.model not in SHAPES:
        return results
    for arm, kind in ARMS.items():
        try:
            with started(python, what.model, what.dtype, kind, VLLM_BATCH) as vllm:
                for name, groups in rows:
                    results[name] |= _measure({arm: vllm}, groups, sizes)
                    print(f"{arm} {vllm.version}, {name}: {show(results[name][arm])} ms", flush=True)
        except RuntimeError as error:
            print(f"{arm}: not measured: {error}", flush=True)
    return results


def _measure(arms: Mapping[str, AnyEngine], groups: list[int], sizes: Sizes) -> dict[str, Spread]:
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(sizes.repeats):
        for name, engine in arms.items():
            prompts = []
            for count in groups:
                prefix = engine.random_ids(sizes.shared)
                prompts += [prefix + engine.random_ids(sizes.own) for _ in range(count)]
            engine.generate(prompts, [1] * len(prompts))
            times[name].append(engine.ms_per_token(prompts, sizes.few, sizes.many))
    return {name: spread(values) for name, values in times.items()}


def _print(results: dict[str, dict[str, Spread]], sizes: Sizes) -> None:
    arms = list(next(iter(results.values())))
    stored = [peer for peer in DECODE_SHARED_MS if on_gpu() and sizes is GPU and peer not in arms]
    rows = []
    for name, figures in results.items():
        cells = [show(figures[arm]) if arm in figures else "-" for arm in arms]
        for peer in stored:
            figure = DECODE_SHARED_MS[peer].get(int(name)) if name.isdigit() else FOUR_GROUPS_MS
            cells.append("-" if figure is None else f"{figure:g}")
        rows.append([name, *cells])
    title = f"ms per output token, {sizes.shared} shared + {sizes.own} own tokens"
    title += f"; stored: {'; '.join(stored)}" if stored else ""
    print_table(title, ["requests", *arms, *stored], rows)
