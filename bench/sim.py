"""The figures of the paper on simulated engines: ``python -m bench sim [--only NAME ...]``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .simulation import figure12, figure17, figure18, figure19, scale
from .simulation.figure import Figure

PICTURES = Path(__file__).parents[1] / "build" / "pictures"
NUM_SEEDS, NUM_SEEDS_QUICK, NUM_SEEDS_SCALE = 5, 2, 3
QUICK = (
    f"--quick: {NUM_SEEDS_QUICK} seeds and smaller workloads; the figures are not comparable with those in "
    f"bench/results and the docs, which are of {NUM_SEEDS} seeds and the full workloads\n"
)
PARTS: dict[str, Callable[..., Figure | tuple[Figure, ...]]] = {
    "19": figure19.run,
    "17": figure17.run,
    "18": figure18.run,
    "12a": figure12.run_background,
    "12b": figure12.run_many,
    "scale": scale.run,
}


def run(quick: bool, only: Iterable[str] = ()) -> dict[str, Any]:
    """Simulate, print a table and draw a picture per figure."""
    # Each simulated manager says that its tokenizer of made-up words cannot be constrained; nothing here is.
    logging.getLogger("parrot").setLevel(logging.ERROR)
    if quick:
        print(QUICK)
    figures: dict[str, Any] = {}
    for name in only or PARTS:
        started = time.perf_counter()
        num_seeds = NUM_SEEDS_QUICK if quick else NUM_SEEDS_SCALE if name == "scale" else NUM_SEEDS
        made = PARTS[name](range(1, num_seeds + 1), quick=quick)
        took_s = time.perf_counter() - started
        for full in (made,) if isinstance(made, Figure) else made:
            # The paper's figures are of the full workloads.
            figure = replace(full, title=f"{full.title} (quick)", paper={}) if quick else full
            figure.print()
            figures[figure.number] = figure.record()
            _draw(figure)
        print(f"{name}: simulated in {took_s:.1f} s\n", flush=True)
    return {"figures": figures}


def _draw(figure: Figure) -> None:
    if figure.x_label and len(figure.xs) == 1:
        print(f"no picture: a single value of {figure.x_label}")
        return
    path = PICTURES / f"figure-{figure.number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.draw(path)
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    else:
        print(f"drawn in {path}")
