"""Shared-prefix decode attention on the GPU: time over the memory floor, beside peers (docs/attention.md).

Needs the package with its CUDA module, and torch; no model, no manager. Each row rotates over copies of the
KV cache that together exceed the L2 cache, pages are shuffled, and times are medians of CUDA-graph replays
(30, of peers 10). Every measurement is printed as it is made, and ``--json`` is written anew after each row,
so that a run that is cut off keeps its rows. An arm that raises is not run, and its row says why:

    python -m bench.kernel --quick --json FILE --only grid groups deep balance peers planning
    python -m bench.kernel --row "32/8 16x6000 +256" --once    under a profiler
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .kernel_arms import (
    BALANCES,
    Arm,
    installed_arms,
    launch_once,
    make_kernel,
    measure_arm,
    reference,
    shared_prefix,
)
from .kernel_planning import measure_planning
from .kernel_report import show_measurement, show_planning, summarize
from .kernel_rows import Problem, Row, all_rows, plan_costs
from .timing import print_result

# Rows of ours and its twin; then what is measured on all of these rows.
PARTS = ("grid", "groups", "deep", "balance", "peers", "planning")
REPLAYS, PEER_REPLAYS, QUICK_REPLAYS = 30, 10, 8
Save = Callable[[dict[str, Any]], None]


class Run:
    """The measurements of one run, kept as they are made."""

    def __init__(
        self, rows: Sequence[Row], device: torch.device, repeats: int, min_bytes: int, save: Save | None
    ) -> None:
        self.rows, self.device, self.repeats, self._min_bytes, self._save = (
            rows,
            device,
            repeats,
            min_bytes,
            save,
        )
        self.result: dict[str, Any] = {"device": _describe(device), "rows": {}}
        self._expected: dict[str, Tensor] = {}

    def problem(self, row: Row) -> Problem:
        """The same tensors whenever a row is measured."""
        torch.manual_seed(0)
        return Problem(row, torch.float16, self.device, self._min_bytes)

    def measure(self, row: Row, arms: dict[str, Arm], most_repeats: int = REPLAYS) -> None:
        """Times of ``arms`` in a row, added to what the row has."""
        problem = self.problem(row)
        kept = self.result["rows"].setdefault(row.name, _describe_row(problem))
        if row.name not in self._expected:
            self._expected[row.name] = reference(problem)(*problem.caches[0]).cpu()
        expected = self._expected[row.name].to(self.device)
        if "plan" not in kept:
            kept["plan"] = self._describe_plan(problem)
        for name, arm in arms.items():
            kept["arms"][name] = measure_arm(arm, problem, expected, min(self.repeats, most_repeats))
            show_measurement(row.name, name, kept)
        self.keep()

    def _describe_plan(self, problem: Problem) -> dict[str, Any]:
        """What our plan of a row moves and multiplies over the floor."""
        kernel = make_kernel(problem, "cuda" if self.device.type == "cuda" else "triton")
        costs = plan_costs(problem, kernel.entries, kernel.num_parts)
        return {"entries": kernel.num_entries, "parts": kernel.num_parts, **costs}

    def keep(self) -> None:
        """Hand what is there to whoever keeps it."""
        if self._save is not None:
            self._save(self.result)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a kernel that copies 2 GiB on the device: stored rows of peers
    hold where it agrees with theirs. (A copy recorded in a graph goes to a copy engine, which is slower.)"""
    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mul(source, 1.0, out=target)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2e3 * source.numel() * source.element_size() / statistics.median(times[3:])


def run(
    quick: bool,
    only: list[str] | None = None,
    *,
    device: torch.device | None = None,
    rows: Sequence[Row] | None = None,
    min_bytes: int = 400_000_000,
    save: Save | None = None,
) -> dict[str, Any]:
    """The parts ``only`` (all of them): ours and its twin on every row first, then what else there is."""
    parts = only or list(PARTS)
    device = device or _gpu()
    rows = [
        row for row in rows or all_rows() if row.part in parts or not {"grid", "groups", "deep"} & set(parts)
    ]
    made = Run(rows, device, QUICK_REPLAYS if quick else REPLAYS, min_bytes, save)
    if device.type == "cuda":
        made.result["copy_bandwidth"] = round(copy_bandwidth())
        print(
            f"copy bandwidth {made.result['copy_bandwidth'] / 1e12:.2f} TB/s (read and written)", flush=True
        )
    ours, peers = installed_arms(device)
    for row in rows:
        made.measure(row, ours)
    if "planning" in parts:
        made.result["planning"] = {}
        for row in rows:
            made.result["planning"][row.name] = measure_planning(made.problem(row), 20 if quick else 100)
            show_planning(row.name, made.result["planning"][row.name])
        made.keep()
    if "balance" in parts and "ours" in ours:
        for row in rows:
            made.measure(row, {name: shared_prefix("cuda", costs) for name, costs in BALANCES.items()})
    if "peers" in parts:
        for row in rows if peers else ():
            made.measure(row, peers, PEER_REPLAYS)
    made.result.update(summarize(made.result))
    made.keep()
    return made.result


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise SystemExit("bench kernel needs a CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _describe_row(problem: Problem) -> dict[str, Any]:
    return {
        "part": problem.row.part,
        "requests": problem.num_requests,
        "bytes": problem.bytes,
        "flops": problem.flops,
        "floor_us": round(problem.floor_us, 2),
        "arms": {},
    }


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPLAYS} replays")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--row", nargs="+", metavar="NAME", help="only rows that are printed by these names")
    parser.add_argument(
        "--once", action="store_true", help="one launch of our kernel in each row and no more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each row")
    options = parser.parse_args(argv)
    names = [row.name for row in all_rows()]
    for name in options.row or ():
        if name not in names:
            parser.error(f"no such row: {name}; there are {'; '.join(names)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; the last line is ``RESULT`` and JSON, but on a terminal. Exit code 1 where an arm of
    ours was not run."""
    options = _options(argv)
    rows = [row for row in all_rows() if not options.row or row.name in options.row]
    if options.once:
        launch_once(rows, _gpu())
        return 0

    def save(result: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    result = run(options.quick, options.only, rows=rows, save=save)
    print_result(result)
    return 1 if result["not_run"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
