"""The arms of ``python -m bench kernel``: each makes launches of one layer's attention on a row's tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from parrot.kernels.shared_prefix import (
    Implementation,
    PlanCosts,
    SharedPrefixAttention,
    shared_prefix_attention_reference,
)

from .kernel_rows import HEAD_DIM, Problem, Row
from .peers import attention_gpu

SCALE = HEAD_DIM**-0.5
Launch = Callable[
    [Tensor, Tensor], Tensor
]  # of the keys and values of one copy of the cache; returns the output
Arm = Callable[[Problem], Launch]

# Costs around the planner's own, to see on another GPU whether they are still the best.
BALANCES = {
    "ours, half the costs": PlanCosts(55, 3, 3),
    "ours, twice the costs": PlanCosts(220, 10, 10),
    "ours, own entries as shared ones": PlanCosts(110, 110, 5),
}


def make_kernel(
    problem: Problem, implementation: Implementation, costs: PlanCosts | None = None
) -> SharedPrefixAttention:
    """Our kernel with a plan of the row."""
    n, blocks = problem.block_tables.shape
    kernel = SharedPrefixAttention(
        max_requests=n,
        max_blocks=blocks,
        num_heads=problem.row.heads,
        num_kv_heads=problem.row.kv_heads,
        head_dim=HEAD_DIM,
        device=problem.device,
        num_blocks=problem.num_blocks,
        implementation=implementation,
        costs=costs,
    )
    kernel.plan(problem.block_tables, problem.seq_lens)
    return kernel


def shared_prefix(implementation: Implementation, costs: PlanCosts | None = None) -> Arm:
    """Our kernel or its Triton twin."""

    def prepare(problem: Problem) -> Launch:
        kernel = make_kernel(problem, implementation, costs)
        output = torch.full_like(problem.query, float("nan"))

        def launch(keys: Tensor, values: Tensor) -> Tensor:
            kernel(problem.query, keys, values, output, SCALE)
            return output

        return launch

    return prepare


def reference(problem: Problem) -> Launch:
    """The torch twin, in float64."""
    tables = torch.from_numpy(problem.block_tables).to(problem.device)
    lens = problem.seq_lens.tolist()
    return lambda keys, values: shared_prefix_attention_reference(
        problem.query.double(), keys, values, tables, lens, SCALE
    )


def launch_once(rows: Sequence[Row], device: torch.device) -> None:
    """One launch of our kernel in each row, for a profiler."""
    for row in rows:
        problem = Problem(row, torch.float16, device)
        shared_prefix("cuda")(problem)(*problem.caches[0])
    torch.cuda.synchronize(device)


def installed_arms(device: torch.device) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """Ours and the peers' arms that this machine has, by name."""
    if device.type != "cuda":
        return {"torch": reference}, {}
    ours: dict[str, Arm] = {}
    if find_spec("parrot._kernels"):
        ours["ours"] = shared_prefix("cuda")
    if find_spec("triton"):
        ours["triton"] = shared_prefix("triton")
    return ours, dict(attention_gpu.installed_arms(SCALE))


def time_graph(launches: list[Callable[[], object]], repeats: int) -> list[float]:
    """Microseconds of one launch in each replay of a graph of all of them, again and again up to 16."""
    launches = launches * -(-16 // len(launches))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the plan's upload and the data come from another stream
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(launches))
    return times


def time_calls(launches: list[Callable[[], object]], repeats: int) -> list[float]:
    """The same without a graph, on a CPU."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        launches[i % len(launches)]()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def measure_arm(arm: Arm, problem: Problem, expected: Tensor, repeats: int) -> dict[str, Any]:
    """Median, least and most microseconds of an arm, and its error in the first copy of the cache; or why it
    was not run: what it raised, which must not end the run of the others."""
    timer = time_graph if problem.device.type == "cuda" else time_calls
    try:
        launch = arm(problem)
        error = ((launch(*problem.caches[0]).double() - expected).norm() / expected.norm()).item()
        times = timer([lambda kv=kv: launch(*kv) for kv in problem.caches], repeats)  # type: ignore[misc]
    except attention_gpu.CannotRun as reason:
        return {"not run": str(reason)}
    except Exception as failure:
        return {"not run": f"{type(failure).__name__}: {failure}"[:300]}
    return {
        "us": round(statistics.median(times), 2),
        "least": round(min(times), 2),
        "most": round(max(times), 2),
        "error": float(f"{error:.2e}"),
    }
